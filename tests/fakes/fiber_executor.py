"""kernels.cu on the CPU: an executor for machines without a GPU. cuda_headers/fibers.h says what it checks."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from engines.cuda.kernels import KernelGeometry, kernel_source
from engines.errors import DeviceError

HEADERS = Path(__file__).parent / "cuda_headers"
KERNELS = ("abs_histogram", "entropy_search", "preprocess")
COMPILER = shutil.which(os.environ.get("CXX", "g++"))
_STRICT = ["-std=c++20", "-fPIC", "-pthread", "-Wall", "-Wextra", "-Werror"]
_SANITIZER_DEFINES = {"": [], "thread": ["-DTHREAD_SANITIZER"], "address": ["-DADDRESS_SANITIZER"]}

Array = NDArray[Any]


@dataclass(frozen=True)
class FiberBuffer:
    """Memory of exactly the asked size, aligned as CUDA's."""

    address: int
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]


class _Launch(ctypes.Structure):
    """fibers::Launch"""

    _fields_ = [(name, ctypes.c_uint) for name in ("grid", "block", "shared_bytes", "seed")]


class FiberExecutor:
    """A CudaExecutor on one CPU thread; everything is done when the call returns.

    Args:
        source: The text of kernels.cu, or of a version with a planted bug.
        seed: 0 runs threads and blocks in order; any other number gives an order of its own.
        sanitizer: "thread" or "address"; the process must have preloaded it.
        resident: The answer of `resident_blocks` for every kernel.
    """

    def __init__(
        self,
        geometry: KernelGeometry,
        source: str | None = None,
        seed: int = 0,
        sanitizer: str = "",
        resident: int = 8,
    ) -> None:
        self.geometry = geometry
        self._resident = resident
        self.launches = 0
        self._seed = seed
        self._library = ctypes.CDLL(str(build(geometry, source or kernel_source(), sanitizer)))
        self._library.fibers_allocate.restype = ctypes.c_void_p
        self._library.fibers_allocate.argtypes = [ctypes.c_size_t]
        self._library.fibers_free.argtypes = [ctypes.c_void_p]

    def resident_blocks(self, kernel: str) -> int:  # noqa: ARG002  one number serves for every kernel
        return self._resident

    def upload(self, array: Array, stream: object | None = None) -> FiberBuffer:  # noqa: ARG002  no streams
        buffer = self._allocate(array.shape, array.dtype, array.nbytes)
        contiguous = np.ascontiguousarray(array)
        ctypes.memmove(buffer.address, contiguous.ctypes.data, array.nbytes)
        return buffer

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> FiberBuffer:
        kind = np.dtype(dtype)
        return self._allocate(shape, kind, int(np.prod(shape)) * kind.itemsize)

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike, stream: object | None = None) -> FiberBuffer:
        return self.upload(np.zeros(shape, dtype), stream)

    def download(self, buffer: FiberBuffer, stream: object | None = None) -> Array:  # noqa: ARG002  no streams
        array = np.empty(buffer.shape, buffer.dtype)
        ctypes.memmove(array.ctypes.data, buffer.address, array.nbytes)
        return array

    def launch(
        self,
        kernel: str,
        blocks: int,
        arguments: Sequence[FiberBuffer | np.int32 | np.uint64],
        stream: object | None = None,  # noqa: ARG002  fibers know no streams
        shared_bytes: int | None = None,
    ) -> None:
        shared = self.geometry.shared_bytes()[kernel] if shared_bytes is None else shared_bytes
        launch = _Launch(blocks, self.geometry.threads, shared, self._seed)
        plain = [a.address if isinstance(a, FiberBuffer) else a for a in arguments]
        values = [ctypes.c_int32(int(a)) if isinstance(a, np.int32) else ctypes.c_uint64(int(a)) for a in plain]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        error = ctypes.create_string_buffer(256)
        self.launches += 1
        function = getattr(self._library, f"launch_{kernel}")
        if function(ctypes.byref(launch), pointers, error, ctypes.c_size_t(len(error))) != 0:
            raise DeviceError("fibers.launch", f"{kernel}: {error.value.decode()}", "a correct kernel", "mend it")

    def _allocate(self, shape: tuple[int, ...], dtype: np.dtype[np.generic], nbytes: int) -> FiberBuffer:
        address = self._library.fibers_allocate(nbytes)
        buffer = FiberBuffer(address, shape, dtype)
        weakref.finalize(buffer, self._library.fibers_free, address)
        return buffer


def build(geometry: KernelGeometry, source: str, sanitizer: str = "") -> Path:
    """The shared library of these kernels, compiled unless a process before this one has done so.

    Raises RuntimeError with the compiler's words.
    """
    wrapper = "\n".join(['#include "cuda_cpu.h"', source, *(f"EXPORT_KERNEL({name})" for name in KERNELS), ""])
    defines = [f"-D{name}={value}" for name, value in geometry.defines().items()]
    options = [*_STRICT, "-ffp-contract=off", "-Wno-unknown-pragmas", "-shared", f"-I{HEADERS}", *defines]
    options += ["-g", "-O1", f"-fsanitize={sanitizer}"] if sanitizer else ["-O2"]
    return _compiled("kernels.so", wrapper, [*options, "-x", "c++", "-", "-x", "none", str(_scheduler(sanitizer))])


def sanitizer_runtime(sanitizer: str) -> Path | None:
    """The library to preload into a process that loads sanitised kernels; None where the compiler has none."""
    name = {"thread": "libtsan.so", "address": "libasan.so"}[sanitizer]
    found = subprocess.run([str(COMPILER), f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    path = Path(found.stdout.strip())
    return path.resolve() if path.is_absolute() else None


@lru_cache(maxsize=3)
def _scheduler(sanitizer: str) -> Path:
    options = [*_STRICT, "-O2", "-c", f"-I{HEADERS}", *_SANITIZER_DEFINES[sanitizer]]
    return _compiled("fibers.o", (HEADERS / "fibers.cpp").read_text(), [*options, "-x", "c++", "-"])


def _compiled(name: str, source: str, options: list[str]) -> Path:
    """Compile `source` from standard input to a file named by everything that went into it."""
    content = [source, *options, *(path.read_text() for path in sorted(HEADERS.iterdir()))]
    key = hashlib.sha256("\0".join(content).encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"tared-kernels-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} is another user's, and code would be loaded from it")
    path = folder / f"{key}-{name}"
    if not path.exists():
        partial = path.with_suffix(f".{os.getpid()}-{os.urandom(4).hex()}")
        command = [str(COMPILER), *options, "-o", str(partial)]
        done = subprocess.run(command, input=source, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
        partial.replace(path)
    return path
