"""`make wheelhouse` and `make gpu-check`: the checks that need a GPU, brought to a machine that has one."""
