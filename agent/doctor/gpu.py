"""The runtime, the GPU and the compiler that backend tensorrt needs, and what they amount to."""

from __future__ import annotations

import ctypes
from pathlib import Path

from agent.doctor.finding import Finding, gib, read, tried
from agent.doctor.software import package
from engines.cuda import DRIVER, Gpu, nvcc_path
from engines.kernels import DeviceError
from engines.trt.dialect import open_dialect


def examine_gpu(root: Path, needed: bool) -> list[Finding]:
    """Look at them; needed: whether the configuration asks for the backend."""
    runtime = tried("tensorrt", lambda: open_dialect().name)
    pycuda = package("pycuda", needed=False, remedy="pip install 'tared[jetson]', with nvcc in PATH")
    gpu = tried("gpu", _gpu)
    compiler = nvcc_path()
    remedy = "install the CUDA toolkit's nvcc (JetPack: sudo apt install nvidia-jetpack)"
    nvcc = Finding("nvcc", compiler or "not found", compiler is not None, False, "" if compiler else remedy)
    crossing = tried("builder", lambda: open_dialect(crossing=True).name)
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
