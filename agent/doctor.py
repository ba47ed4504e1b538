"""What this machine has, what it lacks, and the remedy."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import platform
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import psutil

from calibrate.collect import COMPILED
from calibrate.errors import TaredError
from engines.board import board
from engines.cuda import DRIVER, Gpu, nvcc_path
from engines.kernels import DeviceError
from engines.trt.dialect import open_dialect

_MIN_FREE_BYTES = 1 << 30


@dataclass(frozen=True)
class Finding:
    """One thing looked at. ok: whether it serves; needed: whether tared cannot run without it."""

    name: str
    found: str
    ok: bool
    needed: bool
    remedy: str = ""


def examine() -> list[Finding]:
    """Look at everything the daemon uses."""
    return [
        _board(),
        _python(),
        _package("onnxruntime", needed=True, remedy="pip install onnxruntime"),
        _histograms(),
        _opencv(),
        _gstreamer(),
        _package("amqtt", needed=False, remedy="pip install 'tared[demo]', or name your broker as mqtt.host"),
        *_tensorrt(),
        _memory(),
        _disk(),
    ]


def as_dict(findings: list[Finding]) -> dict[str, Any]:
    """The object that `tared doctor --json` prints."""
    return {"ok": healthy(findings), "findings": [asdict(finding) for finding in findings]}


def healthy(findings: list[Finding]) -> bool:
    """Whether everything needed is there."""
    return all(finding.ok for finding in findings if finding.needed)


def _board() -> Finding:
    facts = board()
    return Finding("board", facts.get("model", f"{facts['machine']}, no Jetson"), True, True)


def _python() -> Finding:
    version = platform.python_version()
    return Finding("python", version, sys.version_info >= (3, 10), True, "install Python 3.10 or later")


def _package(name: str, *, needed: bool, remedy: str) -> Finding:
    if importlib.util.find_spec(name) is None:
        return Finding(name, "not installed", False, needed, remedy)
    try:
        return Finding(name, importlib.metadata.version(name), True, needed)
    except importlib.metadata.PackageNotFoundError:  # JetPack installs modules without metadata
        return Finding(name, "installed", True, needed)


def _tensorrt() -> list[Finding]:
    """The runtime, the GPU and the compiler that backend tensorrt needs, and what they amount to."""
    runtime = _tried("tensorrt", lambda: open_dialect().name)
    gpu = _tried("gpu", _gpu)
    compiler = nvcc_path()
    remedy = "install the CUDA toolkit's nvcc (JetPack: sudo apt install nvidia-jetpack)"
    nvcc = Finding("nvcc", compiler or "not found", compiler is not None, False, "" if compiler else remedy)
    crossing = _tried("builder", lambda: open_dialect(crossing=True).name)
    if runtime.ok and gpu.ok and nvcc.ok:
        amount = Finding("backend tensorrt", "ready", True, False)
    elif crossing.ok:
        found = "builds only: tared build --offline"
        amount = Finding("backend tensorrt", found, False, False, "to run engines it needs a GPU, PyCUDA and nvcc")
    else:
        lacking = ", ".join(finding.name for finding in (runtime, gpu, nvcc) if not finding.ok)
        amount = Finding("backend tensorrt", f"no {lacking}", False, False, "onnxruntime serves on the CPU meanwhile")
    return [runtime, gpu, nvcc, amount]


def _tried(name: str, look: Callable[[], str]) -> Finding:
    """What a look finds, or why it finds nothing."""
    try:
        return Finding(name, look(), True, False)
    except TaredError as error:
        return Finding(name, error.found, False, False, error.remedy)


def _gpu() -> str:
    """The GPU in words. Without a driver nothing else needs to be installed to know that there is none."""
    try:
        ctypes.CDLL(DRIVER)
    except OSError as error:
        raise DeviceError(
            "cuda.driver", "no NVIDIA driver", DRIVER, "nothing to do on a machine without an NVIDIA GPU"
        ) from error
    with Gpu() as gpu:
        told = gpu.describe()
        memory = "shared memory" if gpu.integrated else f"{_gib(gpu.free_bytes)} free"
    return f"{told['gpu']}, sm {told['sm']}, CUDA {told['cuda']}, {memory}"


def _histograms() -> Finding:
    remedy = "install a C compiler and tared again; until then calibration and observing cost more time"
    found = "compiled" if COMPILED else "in NumPy: the same bits, slower"
    return Finding("histograms", found, COMPILED, False, remedy)


def _opencv() -> Finding:
    remedy = "pip install opencv-python-headless; on a Jetson: create the venv with --system-site-packages"
    if importlib.util.find_spec("cv2") is None:
        return Finding("opencv", "not installed", False, True, remedy)
    try:
        from agent.camera import opencv_version
    except ImportError as error:  # JetPack's was built for NumPy 1
        remedy = "on a Jetson: pip install 'numpy<2' 'ml-dtypes<0.6'; elsewhere pip install opencv-python-headless"
        return Finding("opencv", f"does not load: {error}".partition("\n")[0], False, True, remedy)
    return Finding("opencv", opencv_version(), True, True)


def _gstreamer() -> Finding:
    built_in = False
    with suppress(ImportError):  # which `_opencv` has told
        from agent.camera import has_gstreamer

        built_in = has_gstreamer()
    remedy = "for csi cameras use JetPack's own OpenCV; files, v4l2 and rtsp work without"
    return Finding("opencv gstreamer", "yes" if built_in else "no", built_in, False, "" if built_in else remedy)


def _memory() -> Finding:
    available = psutil.virtual_memory().available
    remedy = "end other programs, or add swap: building an engine needs room"
    return Finding("memory available", _gib(available), available >= _MIN_FREE_BYTES, True, remedy)


def _disk() -> Finding:
    free = shutil.disk_usage(".").free
    return Finding("disk free", _gib(free), free >= _MIN_FREE_BYTES, True, "free at least 1 GiB for artefacts")


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"
