"""Other tools in environments of their own: their packages want other versions of what tared wants.

Each is made once, in var/peers, from the package index.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest
from places import ROOT

_FOLDER = ROOT / "var" / "peers" / f"cp{sys.version_info.major}{sys.version_info.minor}"
_LIMIT_S = 1800.0
PACKAGES = {
    "tvm": ("apache-tvm==0.27.0.post1", "onnx"),
    "triton": ("tritonclient[grpc]>=2.50",),
    "datumaro": ("datumaro==1.13.12",),  # what CVAT reads and writes COCO with
    # PPQ is of 2023: newer protobuf refuses its generated code, newer onnx and NumPy lack what it imports. 5 GB, torch.
    "ppq": ("ppq==0.6.6", "onnx<1.16", "protobuf<3.21", "numpy<2", "torch"),
}


def run_in(peer: str, program: str, *arguments: object) -> Any:
    """Run a program in a peer's environment, and return the JSON of its last line. Skips where it cannot be made."""
    done = subprocess.run(
        [_python(peer), "-c", program, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=_LIMIT_S,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def _python(peer: str) -> Path:
    """The interpreter of a peer's environment, which is made where it is not there."""
    folder = _FOLDER / peer
    python = folder / "bin" / "python"
    if (folder / "made").exists():
        return python
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *PACKAGES[peer]]
    done = subprocess.run(install, capture_output=True, text=True, check=False, timeout=_LIMIT_S)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["pip gives no reason"])[-1]
        pytest.skip(f"no environment for {peer}: {reason}")
    (folder / "made").touch()
    return python
