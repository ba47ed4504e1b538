"""The tools that the benchmarks compare with: each in an environment of its own, each answering through a pipe.

An environment is made once, under var/peers/NAME, and made anew when its requirements change. A peer that cannot be
installed raises PeerError, and the benchmark shows the reason in its table. A worker is a script of benchmarks/workers
that runs in the peer's environment and stays alive, so that ours and theirs take turns on the same input; it measures
its own CPU time.
"""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.workers.serve import packed, unpacked

ROOT = Path(__file__).resolve().parents[1]
WORKERS = ROOT / "benchmarks" / "workers"
VAR = ROOT / "var"
TORCH = ("torch==2.13.0",)  # always first: whatever depends on torch would otherwise bring a CUDA build


class PeerError(Exception):
    """Why a peer takes no part: one line."""


@dataclass(frozen=True)
class Peer:
    """A tool and what `pip install` has to be called with, in order; with nothing it runs in this environment."""

    name: str
    installs: tuple[tuple[str, ...], ...] = ()


TARED = Peer("tared")
HERE = Peer("this environment")  # numpy, onnxruntime and opencv as constraints.txt pins them
PYTORCH_QUANTIZATION = Peer(
    "pytorch-quantization",
    (
        TORCH,
        ("--no-deps", "pytorch-quantization==2.1.3"),  # its sphinx theme and its CUDA kernels are not needed
        ("numpy==2.4.6", "scipy==1.17.1", "absl-py==2.5.0", "prettytable==3.18.0", "pyyaml==6.0.3", "tqdm==4.67.3"),
    ),
)
MODELOPT = Peer(
    "modelopt",
    (
        TORCH,
        # The `onnx` extra without CuPy, and with ONNX Runtime's CPU wheel in place of the GPU one.
        (
            "nvidia-modelopt==0.47.0", "onnx==1.21.0", "onnxruntime==1.24.4", "onnx-graphsurgeon==0.6.1",
            "onnxconverter-common==1.16.0", "onnxslim==0.1.98", "onnxscript==0.7.2", "polygraphy==0.53.6",
            "lief==1.0.0", "cppimport", "ml_dtypes", "numpy==2.4.6", "opencv-python-headless", "requests",
            "huggingface_hub",
        ),
    ),
)  # fmt: skip
PPQ = Peer("ppq", (TORCH, ("ppq==0.6.6", "numpy==1.26.4", "onnx==1.14.1", "protobuf==3.20.3")))
MXNET = Peer("mxnet", (("mxnet==1.9.1", "numpy==1.23.5"),))  # the last of each that still go together
NNCF = Peer(
    "nncf",
    (
        (
            "nncf==3.4.0", "openvino==2026.4.1", "onnx==1.23.2", "onnxruntime==1.31.1", "numpy==2.4.6",
            "opencv-python-headless==5.0.0.93", "pydantic", "pyyaml==6.0.3",  # for tared's fidelity, a metric
        ),
    ),
)  # fmt: skip
PYAV = Peer("pyav", (("av==18.1.0", "numpy==2.4.6"),))
RIVER = Peer("river", (("river==0.26.1",),))
SUPERVISION = Peer(
    "supervision",
    (("supervision==0.31.2", "onnxruntime==1.31.1", "opencv-python-headless==5.0.0.93", "numpy==2.4.6"),),
)
INFERENCE = Peer("inference", (("inference-cpu==1.8.3",),))  # 7 GB; it pins onnxruntime 1.21.1 and torch itself
COUNTERS = Peer("counters", (TORCH, ("fast-histogram==0.14", "numba==0.68.1", "numpy==2.4.6")))


@cache
def interpreter(peer: Peer) -> Path:
    """The Python of the peer's environment, which is made when it is not there. Raises PeerError."""
    if not peer.installs:
        return Path(sys.executable)
    folder = VAR / "peers" / peer.name
    python, ready = folder / "bin" / "python", folder / "ready"
    wanted = "\n".join(" ".join(arguments) for arguments in peer.installs)
    if not ready.exists() or ready.read_text(encoding="utf-8") != wanted:
        print(f"setting up {folder.relative_to(ROOT)}, once", file=sys.stderr)
        shutil.rmtree(folder, ignore_errors=True)
        venv.create(folder, with_pip=True)
        for arguments in peer.installs:
            _install(python, arguments)
        ready.write_text(wanted, encoding="utf-8")
    return python


def _install(python: Path, arguments: tuple[str, ...]) -> None:
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise PeerError(f"not installed: {(errors or [f'pip failed on {arguments[-1]}'])[-1]}")


@dataclass(frozen=True)
class Reply:
    """What a worker's function returned, and the seconds one call of it took."""

    value: Any
    cpu_s: float
    wall_s: float


class Worker:
    """A script of benchmarks/workers, alive in its peer's environment; `call` runs one of its functions.

    The numerical libraries in it compute on one thread.
    """

    def __init__(self, peer: Peer, script: str) -> None:
        """Raises PeerError when the environment cannot be made or the script cannot be loaded."""
        limits = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL", "NUMBA")}
        self._process = subprocess.Popen(
            [str(interpreter(peer)), str(WORKERS / "serve.py"), script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # the reason of a failure comes through the pipe
            cwd=ROOT,
            env={**os.environ, **limits},
        )
        self._receive()

    def call(self, function: str, *arguments: Any, repeats: int = 1) -> Reply:
        """The mean of `repeats` calls in a row. Raises PeerError with what the function raised."""
        assert self._process.stdin is not None
        try:
            request = (function, [packed(argument) for argument in arguments], repeats)
            pickle.dump(request, self._process.stdin, protocol=5)
            self._process.stdin.flush()
        except BrokenPipeError:
            raise PeerError("its worker has died") from None
        return self._receive()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _receive(self) -> Reply:
        assert self._process.stdout is not None
        try:
            value, cpu_s, wall_s, error = pickle.load(self._process.stdout)
        except EOFError:
            raise PeerError("its worker has died") from None
        if error:
            raise PeerError(error)
        return Reply(unpacked(value), cpu_s, wall_s)
