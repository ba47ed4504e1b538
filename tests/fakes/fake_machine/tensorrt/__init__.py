"""TensorRT of a machine that has none: tests/fakes/fake_tensorrt.py."""

from fake_process import TENSORRT

globals().update({name: value for name, value in vars(TENSORRT.module).items() if name != "__spec__"})
