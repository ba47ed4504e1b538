"""`tared plan`: which layers may be INT8, found by measurement and certified. `search.py` is the way through."""
