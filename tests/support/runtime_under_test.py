"""The runtime that serves in the tests of jobs, plans, probation and the store: $TARED_TEST_RUNTIME, or ONNX Runtime.

`make openvino` runs them on OpenVINO. Observer, reference and what-ifs stay on ONNX Runtime, as in a daemon.
"""

from __future__ import annotations

import os

from engines.interface import Backend
from engines.registry import open_backend

RUNTIME = os.environ.get("TARED_TEST_RUNTIME", "onnxruntime")


def backend_class() -> type[Backend]:
    """Return its class, for tests that change what it says of itself."""
    return type(open_backend(RUNTIME))
