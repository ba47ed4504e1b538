"""Makes `import pycuda, pytest` work on a GPU machine, which may have no network, no pip and no venv."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from gpu.errors import GpuCheckError

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ("numpy", "pcodec", "pytest", "pytest_timeout", "pycuda.driver")
FROM_INDEX = ("pycuda>=2024.1", "pcodec>=1.0", "pytest>=8.2", "pytest-timeout>=2.3")
DRIVER = "libcuda.so.1"
CUDA_BIN = "/usr/local/cuda/bin"  # where the toolkit is on a Jetson; no PATH leads there by itself
_DEVICE = """
import pycuda.driver as cuda
cuda.init()
device = cuda.Device(0)
capability = ".".join(map(str, device.compute_capability()))
print(f"{device.name()}, compute capability {capability}, {device.total_memory() / 2**30:.0f} GiB, "
      f"driver for CUDA {cuda.get_driver_version() // 1000}.{cuda.get_driver_version() % 1000 // 10}")
"""

Environment = dict[str, str]


def prepare(wheelhouse: Path, site: Path) -> Environment:
    """The environment variables under which this Python finds all of NEEDED; raises GpuCheckError.

    Wheels are unpacked into a folder on PYTHONPATH. A virtual environment would need venv, and would hide the CuPy and
    PyTorch that this machine may have and that the benchmark compares with.
    """
    require_driver()
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(site), str(ROOT), os.environ.get("PYTHONPATH", ""))),
        "PATH": os.pathsep.join((os.environ.get("PATH", os.defpath), CUDA_BIN)),
        "PYTHONUNBUFFERED": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "REQUIRE_GPU": "1",
    }
    shutil.rmtree(site, ignore_errors=True)
    wheels = sorted(wheelhouse.glob("*.whl"))
    if wheels:
        unpack(wheels, site)
    elif problem_with(environment):
        _install_from_index(site)
    problem = problem_with(environment)
    if problem:
        raise GpuCheckError(
            f"{problem} from {sys.executable}",
            f"all of {', '.join(NEEDED)}",
            "numpy 1.26 or later has to be on this machine; `make wheelhouse` brings the others",
        )
    return environment


def require_driver() -> None:
    """Said first, before anything is installed: the commonest mistake is the wrong machine."""
    try:
        ctypes.CDLL(DRIVER)
    except OSError as error:
        raise GpuCheckError(
            f"no NVIDIA driver ({error})", "a machine with an NVIDIA GPU", "run `make gpu-check` there"
        ) from error


def require_device(environment: Environment) -> str:
    """The first device in words, as PyCUDA sees it; raises GpuCheckError where there is none."""
    done = _python(_DEVICE, environment)
    if done.returncode != 0:
        raise GpuCheckError(
            f"a driver library but no usable GPU ({_last_line(done.stderr)})",
            "a CUDA device",
            "run `make gpu-check` where `nvidia-smi` shows a GPU; in a container, pass the device through",
        )
    return done.stdout.strip()


def require_compilers(environment: Environment) -> None:
    """PyCUDA compiles kernels.cu for the device it meets, and nvcc calls the host's compiler."""
    missing = [name for name in ("nvcc", "g++") if shutil.which(name, path=environment["PATH"]) is None]
    if missing:
        raise GpuCheckError(
            f"no {' and no '.join(missing)} on PATH or in {CUDA_BIN}",
            "nvcc and g++, to compile the kernels",
            "install the CUDA toolkit and g++ (JetPack: cuda-nvcc; Debian: build-essential)",
        )


def unpack(wheels: list[Path], site: Path) -> None:
    """Wheels are zip files, and nothing in ours but the packages themselves is wanted."""
    for wheel in wheels:
        if not fits(wheel.name):
            raise GpuCheckError(
                f"{wheel.name} in {wheel.parent}",
                f"wheels for Python {platform.python_version()} on {platform.machine()}",
                f"`make wheelhouse PYTHON={sys.version_info.major}.{sys.version_info.minor}` where they are built",
            )
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)


def fits(wheel: str) -> bool:
    """Whether this Python on this processor can use a wheel of this name."""
    python, abi, machine = wheel.removesuffix(".whl").split("-")[-3:]
    return _fits_python(python.split("."), abi) and (machine == "any" or machine.endswith(platform.machine()))


def _fits_python(tags: list[str], abi: str) -> bool:
    """A wheel for the stable ABI fits its own Python and every later one."""
    major, minor = sys.version_info[:2]
    if abi == "abi3":
        return any(tag.startswith(f"cp{major}") and int(tag[3:]) <= minor for tag in tags)
    return "py3" in tags or f"cp{major}{minor}" in tags


def problem_with(environment: Environment) -> str:
    """Why NEEDED cannot be imported; empty when it can."""
    done = _python(f"import {', '.join(NEEDED)}", environment)
    return _last_line(done.stderr) if done.returncode else ""


def has_module(name: str, environment: Environment) -> bool:
    """Whether this Python finds a module under these variables."""
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({name!r}) is None)"
    return _python(code, environment).returncode == 0


def _install_from_index(site: Path) -> None:
    print(f"no wheelhouse: installing {', '.join(FROM_INDEX)} with pip, a few minutes", flush=True)
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(site), *FROM_INDEX]
    done = subprocess.run(install, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise GpuCheckError(
            f"no wheels in wheelhouse/, and pip failed ({_last_line(done.stderr)})",
            "either the one or the other",
            f"`make wheelhouse PYTHON={sys.version_info.major}.{sys.version_info.minor}` on a machine with network and "
            "CUDA toolkit, and copy the folder wheelhouse/ here",
        )


def _python(code: str, environment: Environment) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[-1]
