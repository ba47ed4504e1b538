"""Other tools in environments of their own: their packages want other versions of what tared wants.

Each is made once, in var/peers, from the package index.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
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
    """The interpreter of a peer's environment, which is made where it is not there, by one test process at a time."""
    folder = _FOLDER / peer
    python = folder / "bin" / "python"
    _FOLDER.mkdir(parents=True, exist_ok=True)
    with (_FOLDER / f"{peer}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "made").exists():
            _make(folder, python, PACKAGES[peer])
    return python


def _make(folder: Path, python: Path, packages: Sequence[str]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages]
    done = subprocess.run(install, capture_output=True, text=True, check=False, timeout=_LIMIT_S)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["pip gives no reason"])[-1]
        pytest.skip(f"no environment for {folder.name}: {reason}")
    (folder / "made").touch()
