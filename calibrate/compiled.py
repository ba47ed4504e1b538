"""The shared object that the package was built with, where there was a C compiler; what uses it also does without."""

from __future__ import annotations

import ctypes
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_VERSION = 2  # as in count.c
_NOTHING = ctypes.c_char * 0  # the type of what is there, of which only the address counts


def load() -> ctypes.CDLL | None:
    """The functions of count.c and unpack.c with their signatures; None where none of this version is there."""
    library = open_library(Path(__file__).parent / "_count", "tared_count_version", _VERSION)
    if library is None:
        return None
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    library.tared_survey.argtypes = [pointer, size, pointer]
    library.tared_count.argtypes = [pointer, size, ctypes.c_float, ctypes.c_uint32, pointer]
    library.tared_unpack.argtypes = [ctypes.c_char_p, size, pointer, size]
    library.tared_add.argtypes = [pointer, pointer, size, ctypes.c_uint32, ctypes.c_int64]
    library.tared_survey.restype = library.tared_count.restype = None
    library.tared_unpack.restype, library.tared_add.restype = ctypes.c_int32, ctypes.c_int64
    return library


def open_library(stem: Path, symbol: str, version: int) -> ctypes.CDLL | None:
    """The shared object that was built as `stem`, of this version by its int32 `symbol`; None where there is none."""
    built = [path for path in (stem.with_name(stem.name + suffix) for suffix in EXTENSION_SUFFIXES) if path.exists()]
    if not built:
        return None
    try:
        library = ctypes.CDLL(str(built[0]))
        return library if ctypes.c_int32.in_dll(library, symbol).value == version else None
    except (OSError, ValueError):  # not of this machine, cut short, or without the symbol
        return None


def address(array: NDArray[np.int64]) -> object:
    """Of a contiguous array that may be written, for a pointer argument; `array.ctypes.data` takes longer."""
    return ctypes.byref(_NOTHING.from_buffer(array))  # type: ignore[arg-type]  # an array is a buffer
