"""kernels.cu through NVIDIA's own compilers, for every board and without a GPU: no warning, no register spilled."""

from __future__ import annotations

import ctypes
import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from fiber_executor import KERNELS

from engines.cuda.kernels import KernelGeometry, kernel_source

NVCC = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
ARCHITECTURES = ["sm_75", "sm_87", "sm_90", "sm_110"]  # oldest that nvcc 13 knows; Orin; Hopper; Thor
SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


def options(geometry: KernelGeometry) -> list[str]:
    return ["-std=c++17", *(f"-D{name}={value}" for name, value in geometry.defines().items())]


@pytest.mark.skipif(NVCC is None, reason="no nvcc: install the CUDA toolkit")
@pytest.mark.parametrize(
    "architecture", [each if each == "sm_87" else pytest.param(each, marks=pytest.mark.trial) for each in ARCHITECTURES]
)
def test_nvcc_compiles_without_warning_or_spill(architecture: str, tmp_path: Path) -> None:
    listed = subprocess.run([str(NVCC), "--list-gpu-code"], capture_output=True, text=True, check=True)
    if architecture not in listed.stdout.split():
        pytest.skip(f"this nvcc knows no {architecture}: its toolkit is too old for the board, or too new")
    compiled = nvcc(tmp_path, KernelGeometry(), architecture)
    assert compiled.returncode == 0, compiled.stderr
    assert SPILLS.findall(compiled.stderr) == [("0", "0", "0")] * len(KERNELS), compiled.stderr


def test_the_defaults_are_the_file_s_own() -> None:
    found = dict(re.findall(r"#ifndef (BITS|TAIL|THREADS)\n#define \1 (\d+)", kernel_source()))
    assert {name: int(value) for name, value in found.items()} == dict(KernelGeometry().defines())


def test_nvrtc_12_compiles_for_a_xavier() -> None:
    """The compiler that JetPack 5 and CUDA 12 have, for the oldest board; nvcc 13 no longer knows it."""
    library = nvrtc()
    program = ctypes.c_void_p()
    source = kernel_source().encode()
    created = library.nvrtcCreateProgram(ctypes.byref(program), source, b"kernels.cu", 0, None, None)
    assert created == 0
    arguments = [
        "--gpu-architecture=sm_72",
        *(f"--include-path={p}" for p in cuda_headers()),
        *options(KernelGeometry()),
    ]
    if len(arguments) == 1 + len(options(KernelGeometry())):
        pytest.skip("no cuda_fp16.h: pip install nvidia-cuda-runtime-cu12")
    array = (ctypes.c_char_p * len(arguments))(*(argument.encode() for argument in arguments))
    code = library.nvrtcCompileProgram(program, len(arguments), array)
    size = ctypes.c_size_t()
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, log)
    assert code == 0, log.value.decode()
    assert "kernels.cu" not in log.value.decode()  # its only complaint is about the board's age
    library.nvrtcGetCUBINSize(program, ctypes.byref(size))
    assert size.value > 10_000


def nvcc(folder: Path, geometry: KernelGeometry, architecture: str) -> subprocess.CompletedProcess[str]:
    source = folder / "kernels.cu"
    source.write_text(kernel_source())
    command = [str(NVCC), "-cubin", f"-arch={architecture}", *options(geometry), "-Xptxas", "-v"]
    command += ["-Werror", "all-warnings", "-o", str(folder / "kernels.cubin"), str(source)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def nvrtc() -> ctypes.CDLL:
    """NVRTC 12 from its wheel, which does not find its own second library."""
    spec = importlib.util.find_spec("nvidia.cuda_nvrtc") if importlib.util.find_spec("nvidia") else None
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("no NVRTC 12: pip install nvidia-cuda-nvrtc-cu12")
    folder = Path(next(iter(spec.submodule_search_locations))) / "lib"
    builtins = sorted(folder.glob("libnvrtc-builtins.so.12*"))
    if not builtins:
        pytest.skip(f"no NVRTC 12 in {folder}")
    ctypes.CDLL(str(builtins[0]), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(folder / "libnvrtc.so.12"))


def cuda_headers() -> list[Path]:
    """Where cuda_fp16.h is: in the runtime's wheel, or in a toolkit."""
    places = [Path("/usr/local/cuda/include")]
    if importlib.util.find_spec("nvidia") and (spec := importlib.util.find_spec("nvidia.cuda_runtime")):
        places = [Path(place) / "include" for place in spec.submodule_search_locations or ()]
    return [place for place in places if (place / "cuda_fp16.h").exists()]
