"""Pure numerics of calibration: NumPy in, NumPy out.

No I/O, threads, logging, clocks, networks or cameras in here; engines and agent build on it, never the other way.
"""
