"""The fakes as the TensorRT and PyCUDA of a whole process, and of the processes that it starts.

With tests/fakes/fake_machine and tests on PYTHONPATH `import tensorrt` and `import pycuda` find them. When it ends,
each process writes its mistakes to a file of its own in the folder FAKE_MISTAKES.
"""

from __future__ import annotations

import atexit
import gc
import os
from pathlib import Path

from fake_pycuda import FakePycuda
from fake_tensorrt import FakeTensorRt

PYCUDA = FakePycuda()
TENSORRT = FakeTensorRt(PYCUDA, os.environ.get("FAKE_VERSION", "10.3.0"))
TENSORRT.build_s = float(os.environ.get("FAKE_BUILD_S", "0"))
TENSORRT.wrong_from = Path(os.environ["FAKE_WRONG_FROM"]) if "FAKE_WRONG_FROM" in os.environ else None


def _report() -> None:
    gc.collect()
    mistakes = [*TENSORRT.mistakes, *PYCUDA.mistakes]
    if TENSORRT.made:
        report = f"{len(TENSORRT.made)} made, {len(TENSORRT.freed)} freed\n" + "\n".join(mistakes)
        Path(os.environ["FAKE_MISTAKES"], str(os.getpid())).write_text(report)


atexit.register(_report)
