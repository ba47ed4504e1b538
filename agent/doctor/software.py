"""Examine the software that tared needs: Python, packages, OpenCV, and what the GPU takes."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import sys
from pathlib import Path
from platform import python_version

from agent.camera.gstreamer import WITHOUT_GSTREAMER, gstreamer_version
from agent.doctor.finding import Finding, attempt, gib
from agent.system.board import read_text
from calibrate.errors import install_extra
from calibrate.native import COMPILED
from engines.cuda.gpu import DRIVER, Gpu, nvcc_path
from engines.errors import DeviceError
from engines.trt.release import open_release

# The first OpenCV that follows a change of the picture's size. Measured: 4.8, 4.10, 4.12 do not, 4.13, 5.0 do.
_FOLLOWS_SIZES = (4, 13)


def examine_software(backend: str = "") -> list[Finding]:
    """Examine what is installed in this environment; backend: the configured one."""
    return [
        Finding("python", python_version(), sys.version_info >= (3, 10), True, "install Python 3.10 or later"),
        package("onnxruntime", needed=True, remedy="pip install onnxruntime"),
        package("openvino", needed=backend == "openvino", remedy=f"for INT8 on the CPU: {install_extra('openvino')}"),
        _compiled_code(),
        _opencv(),
        _gstreamer(),
        package("amqtt", needed=False, remedy=f"{install_extra('demo')}, or name your broker as mqtt.host"),
    ]


def package(name: str, *, needed: bool, remedy: str, module: str = "") -> Finding:
    """Find out which release of a package is installed, if any; `module`: its name for import, if it is another."""
    if importlib.util.find_spec(module or name) is None:
        return Finding(name, "not installed", False, needed, remedy)
    try:
        return Finding(name, importlib.metadata.version(name), True, needed)
    except importlib.metadata.PackageNotFoundError:  # JetPack installs modules without metadata
        return Finding(name, "installed", True, needed)


def _compiled_code() -> Finding:
    remedy = "install a C compiler and tared again; until then calibration and observing cost more time"
    found = "compiled" if COMPILED else "in Python: the same bits, slower"
    return Finding("histograms", found, COMPILED, False, remedy)


def _opencv() -> Finding:
    remedy = "pip install opencv-python-headless"
    if importlib.util.find_spec("cv2") is None:
        return Finding("opencv", "not installed", False, True, remedy)
    try:
        from agent.camera.opencv import opencv_version
    except ImportError as error:  # JetPack's was built for NumPy 1; PyPI's takes its place in the environment
        return Finding("opencv", f"does not load: {error}".partition("\n")[0], False, True, remedy)
    version = opencv_version()
    if tuple(int(part) for part in version.split(".")[:2]) < _FOLLOWS_SIZES:
        found = f"{version}, which repeats the last picture where a stream's or a file's size changes"
        remedy = "keep the picture size of each camera: after a change it counts as frozen; files are read wrongly"
        return Finding("opencv", found, False, False, remedy)
    return Finding("opencv", version, True, True)


def _gstreamer() -> Finding:
    version = gstreamer_version()
    if version is not None:
        return Finding("gstreamer", version, True, False)
    remedy = f"for sources csi: and gst:, and decoder: gstreamer: {WITHOUT_GSTREAMER}"
    return Finding("gstreamer", "no Python bindings of GStreamer", False, False, remedy)


def examine_gpu(root: Path, needed: bool) -> list[Finding]:
    """Examine the GPU and what it takes; needed: the configuration selects the backend."""
    runtime = attempt("tensorrt", lambda: open_release().name)
    pycuda = package("pycuda", needed=False, remedy=f"{install_extra('jetson')}, with nvcc in PATH")
    graphs = package("cuda-bindings", module="cuda", needed=False, remedy=f"for CUDA graphs: {install_extra('jetson')}")
    gpu = attempt("gpu", _gpu)
    compiler = nvcc_path()
    remedy = "install the CUDA toolkit's nvcc (JetPack: sudo apt install nvidia-jetpack)"
    nvcc = Finding("nvcc", compiler or "not found", compiler is not None, False, "" if compiler else remedy)
    crossing = attempt("builder", lambda: open_release(crossing=True).name)
    if runtime.ok and gpu.ok and nvcc.ok:
        backend = attempt("backend tensorrt", _ready, needed)
    elif crossing.ok:
        found = "builds only: tared build --offline"
        backend = Finding("backend tensorrt", found, False, needed, "to run engines it needs a GPU, PyCUDA and nvcc")
    else:
        lacking = ", ".join(finding.name for finding in (runtime, gpu, nvcc) if not finding.ok)
        backend = Finding("backend tensorrt", f"no {lacking}", False, needed, "onnxruntime serves on the CPU meanwhile")
    return [_driver(root), runtime, pycuda, graphs, gpu, nvcc, backend]


def _ready() -> str:
    """Open the backend: TensorRT-RTX says only then that it does not support the GPU."""
    from engines.trt.backend import TensorRtBackend

    TensorRtBackend()
    return "ready"


def _driver(root: Path) -> Finding:
    """Examine the kernel's driver: nvgpu on a Jetson up to Orin, nvidia on later ones and on a PC."""
    for name in ("nvidia", "nvgpu"):
        module = root / "sys/module" / name
        if module.is_dir():
            return Finding("driver", f"{name} {read_text(module / 'version')}".strip(), True, False)
    remedy = "nothing to do on a machine without an NVIDIA GPU; else install its driver (JetPack brings it)"
    return Finding("driver", "no NVIDIA driver in the kernel", False, False, remedy)


def _gpu() -> str:
    """Describe the GPU. The driver is tried first, so that PyCUDA is not needed to find that there is no GPU."""
    try:
        ctypes.CDLL(DRIVER)
    except OSError as error:
        raise DeviceError(
            "cuda.driver", "no NVIDIA driver", DRIVER, "nothing to do on a machine without an NVIDIA GPU"
        ) from error
    with Gpu() as gpu:
        facts = gpu.describe()
        memory = "shared memory" if gpu.integrated else f"{gib(gpu.free_bytes)} free"
    return f"{facts['gpu']}, sm {facts['sm']}, CUDA {facts['cuda']}, {memory}"
