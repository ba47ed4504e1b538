"""A stand-in for the NVIDIA driver library, made from the CUDA toolkit's own headers.

PyCUDA links against libcuda.so, which comes with a driver and not with the toolkit. A machine without a driver builds
PyCUDA against this stub; with the stub loaded `pycuda.driver` imports, and its `init()` says that there is no device.
Every other function answers CUDA_ERROR_STUB_LIBRARY, as NVIDIA's own stubs do.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from gpu.errors import GpuCheckError

NO_DEVICE, STUB_LIBRARY = 100, 34
HEADERS = ("cuda.h", "cudaProfiler.h")
# What is called before the first device is asked for, and how errors become words.
ANSWERS = {
    "cuInit": f"int cuInit(unsigned flags) {{ return {NO_DEVICE}; }}",
    "cuDriverGetVersion": "int cuDriverGetVersion(int *version) { *version = 0; return 0; }",
    "cuGetErrorName": f"""int cuGetErrorName(int error, const char **text) {{
        *text = error == {NO_DEVICE} ? "CUDA_ERROR_NO_DEVICE" : "CUDA_ERROR_STUB_LIBRARY"; return 0; }}""",
    "cuGetErrorString": f"""int cuGetErrorString(int error, const char **text) {{
        *text = error == {NO_DEVICE} ? "no CUDA-capable device is detected" : "the stub libcuda"; return 0; }}""",
}


def find_toolkit() -> Path:
    """The CUDA toolkit: $CUDA_HOME, the one nvcc belongs to, or the newest under /usr/local."""
    named = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    nvcc = shutil.which("nvcc")
    installed = [Path(nvcc).resolve().parents[1]] if nvcc else []
    versions = sorted(Path("/usr/local").glob("cuda-*"), reverse=True)
    candidates = [*named, *installed, Path("/usr/local/cuda"), *versions]
    for folder in candidates:
        if (folder / "include" / HEADERS[0]).is_file():
            return folder
    looked = ", ".join(dict.fromkeys(map(str, candidates)))
    raise GpuCheckError(
        f"no CUDA toolkit ({looked}: none holds include/{HEADERS[0]})",
        "the headers of CUDA 12 or later",
        "install the CUDA toolkit (nvcc and headers suffice, no driver), or name its folder in CUDA_HOME",
    )


def build_stub(toolkit: Path, folder: Path) -> Path:
    """Write libcuda.so.1 and the link libcuda.so into `folder`; returns the library."""
    compiler = shutil.which("gcc")
    if compiler is None:
        raise GpuCheckError("no gcc", "a C and C++ compiler", "install gcc and g++ (Debian: build-essential)")
    includes = [part for header in HEADERS for part in ("-include", header)]
    preprocess = [compiler, "-E", "-P", "-I", str(toolkit / "include"), *includes, "-x", "c", os.devnull]
    declared = subprocess.run(preprocess, check=True, capture_output=True, text=True).stdout
    names = sorted(set(re.findall(r"\b(cu[A-Z]\w*)\s*\(", declared)))
    source = "\n".join(ANSWERS.get(name, f"int {name}(void) {{ return {STUB_LIBRARY}; }}") for name in names)
    folder.mkdir(parents=True, exist_ok=True)
    library, link = folder / "libcuda.so.1", folder / "libcuda.so"
    compile_ = [compiler, "-shared", "-fPIC", "-w", f"-Wl,-soname,{library.name}", "-o", str(library), "-x", "c", "-"]
    subprocess.run(compile_, input=source, check=True, text=True)
    link.unlink(missing_ok=True)
    link.symlink_to(library.name)
    return library
