"""PyCUDA of a machine that has none: tests/fakes/fake_pycuda.py."""

import sys

from fake_process import PYCUDA

driver, compiler = PYCUDA.driver, PYCUDA.compiler
sys.modules |= {"pycuda.driver": driver, "pycuda.compiler": compiler}
