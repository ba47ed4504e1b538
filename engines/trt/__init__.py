"""TensorRT 10, TensorRT 11 and TensorRT-RTX behind one seam; engines/trt/backend.py is the way in."""
