"""The runtime that serves in the tests of jobs, plans, probation and the store: $TARED_TEST_RUNTIME, or ONNX Runtime.

`make openvino` runs them on OpenVINO. Observer, reference and what-ifs stay on ONNX Runtime, as in a daemon.
"""

from __future__ import annotations

import os

RUNTIME = os.environ.get("TARED_TEST_RUNTIME", "onnxruntime")
