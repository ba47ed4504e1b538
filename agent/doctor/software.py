"""What tared itself is made of: Python, its packages, OpenCV."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import platform
import sys
from contextlib import suppress
from pathlib import Path

from agent.camera.source import WITHOUT_GSTREAMER
from agent.doctor.finding import Finding, gib, read, tried
from calibrate.native import COMPILED
from engines.cuda.gpu import DRIVER, Gpu, nvcc_path
from engines.errors import DeviceError
from engines.preprocessing import is_compiled
from engines.trt.release import open_release

_FOLLOWS_SIZES = (4, 13)  # measured: 4.8, 4.10 and 4.12 do not, 4.13 and 5.0 do


def examine_software() -> list[Finding]:
    """Look at what is installed in this environment."""
    return [
        _python(),
        package("onnxruntime", needed=True, remedy="pip install onnxruntime"),
        _pass("histograms", COMPILED, "calibration and observing"),
        _pass("preprocessing", is_compiled(), "frames that no GPU makes ready"),
        _opencv(),
        _gstreamer(),
        package("amqtt", needed=False, remedy="pip install 'tared[demo]', or name your broker as mqtt.host"),
    ]


def package(name: str, *, needed: bool, remedy: str) -> Finding:
    """Whether a package is there, and which release."""
    if importlib.util.find_spec(name) is None:
        return Finding(name, "not installed", False, needed, remedy)
    try:
        return Finding(name, importlib.metadata.version(name), True, needed)
    except importlib.metadata.PackageNotFoundError:  # JetPack installs modules without metadata
        return Finding(name, "installed", True, needed)


def _python() -> Finding:
    version = platform.python_version()
    return Finding("python", version, sys.version_info >= (3, 10), True, "install Python 3.10 or later")


def _pass(name: str, compiled: bool, slower: str) -> Finding:
    remedy = f"install a C compiler and tared again; until then {slower} cost more time"
    found = "compiled" if compiled else "in Python: the same bits, slower"
    return Finding(name, found, compiled, False, remedy)


def _opencv() -> Finding:
    remedy = "pip install opencv-python-headless; on a Jetson: create the venv with --system-site-packages"
    if importlib.util.find_spec("cv2") is None:
        return Finding("opencv", "not installed", False, True, remedy)
    try:
        from agent.camera.opencv import opencv_version
    except ImportError as error:  # JetPack's was built for NumPy 1
        remedy = "on a Jetson: pip install 'numpy<2' 'ml-dtypes<0.6'; elsewhere pip install opencv-python-headless"
        return Finding("opencv", f"does not load: {error}".partition("\n")[0], False, True, remedy)
    version = opencv_version()
    if tuple(int(part) for part in version.split(".")[:2]) < _FOLLOWS_SIZES:
        found = f"{version}, which repeats the last picture where a stream's or a file's size changes"
        remedy = "let cameras keep one size: their picture counts as frozen, and they are opened again; files go wrong"
        return Finding("opencv", found, False, False, remedy)
    return Finding("opencv", version, True, True)


def _gstreamer() -> Finding:
    built_in = False
    with suppress(ImportError):  # which `_opencv` has told
        from agent.camera.opencv import has_gstreamer

        built_in = has_gstreamer()
    if built_in:
        return Finding("opencv gstreamer", "yes", True, False)
    return Finding("opencv gstreamer", "no, as in every OpenCV from PyPI", False, False, WITHOUT_GSTREAMER)


def examine_gpu(root: Path, needed: bool) -> list[Finding]:
    """Look at them; needed: whether the configuration asks for the backend."""
    runtime = tried("tensorrt", lambda: open_release().name)
    pycuda = package("pycuda", needed=False, remedy="pip install 'tared[jetson]', with nvcc in PATH")
    gpu = tried("gpu", _gpu)
    compiler = nvcc_path()
    remedy = "install the CUDA toolkit's nvcc (JetPack: sudo apt install nvidia-jetpack)"
    nvcc = Finding("nvcc", compiler or "not found", compiler is not None, False, "" if compiler else remedy)
    crossing = tried("builder", lambda: open_release(crossing=True).name)
    if runtime.ok and gpu.ok and nvcc.ok:
        amount = Finding("backend tensorrt", "ready", True, needed)
    elif crossing.ok:
        found = "builds only: tared build --offline"
        amount = Finding("backend tensorrt", found, False, needed, "to run engines it needs a GPU, PyCUDA and nvcc")
    else:
        lacking = ", ".join(finding.name for finding in (runtime, gpu, nvcc) if not finding.ok)
        amount = Finding("backend tensorrt", f"no {lacking}", False, needed, "onnxruntime serves on the CPU meanwhile")
    return [_driver(root), runtime, pycuda, gpu, nvcc, amount]


def _driver(root: Path) -> Finding:
    """The kernel's: nvgpu on a Jetson up to Orin, nvidia on the others and on a PC."""
    modules = {name: root / "sys/module" / name for name in ("nvidia", "nvgpu")}
    for name, path in modules.items():
        if path.is_dir():
            version = read(path / "version")
            return Finding("driver", f"{name} {version}".strip(), True, False)
    remedy = "nothing to do on a machine without an NVIDIA GPU; else install its driver (JetPack brings it)"
    return Finding("driver", "no NVIDIA driver in the kernel", False, False, remedy)


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
        memory = "shared memory" if gpu.integrated else f"{gib(gpu.free_bytes)} free"
    return f"{told['gpu']}, sm {told['sm']}, CUDA {told['cuda']}, {memory}"
