"""Preprocessing on the host in one compiled pass, for the most usual case: a frame that is scaled to planes of floats.

Built with the package where there is a C compiler. Everything else, and machines without one, take OpenCV's passes in
agent/preprocess.py, which come out the same: these are the operations of OpenCV's resize, from the tables that
preprocessing on a device has, too.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from calibrate.compiled import open_library
from engines.preprocessing import ImageTransform, taps_along

_VERSION = 1  # as in resize.c
_PIXEL = 3  # bytes of a pixel in the frame
_LANES, _COLUMNS = 4, 4  # LANES and COLUMNS there
_WORD = 8  # bytes that are read at once
_BY_LANE = (0, 2, 1)  # channels in the order of the lanes
_POINTERS = ctypes.c_void_p * _PIXEL
_NUMBERS = ctypes.c_float * _PIXEL


class _Plan(ctypes.Structure):
    """struct plan of resize.c, field by field."""

    _fields_ = (
        ("width", ctypes.c_size_t),
        ("padded", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
        ("offsets", ctypes.c_void_p),
        ("shifts", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("gain", _NUMBERS),
        ("bias", _NUMBERS),
        ("planes", _POINTERS),
        ("stride", ctypes.c_size_t),
        ("across", ctypes.c_void_p * 2),
        ("levels", ctypes.c_void_p),
    )


def is_compiled() -> bool:
    """Whether the pass was built with the package, and loads."""
    return _library() is not None


@cache
def _library() -> ctypes.CDLL | None:
    library = open_library(Path(__file__).parent / "_resize", "tared_resize_version", _VERSION)
    if library is not None:
        library.tared_resize.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_void_p]
        library.tared_resize.restype = None
    return library


class HostPreprocess:
    """Paints frames of one size into one network input. Holds its buffers: one per thread."""

    def __init__(self, transform: ImageTransform, tensor: NDArray[np.float32]) -> None:
        """tensor: receives what `transform` makes of frames, but for its padding. Raises ValueError unless `takes`."""
        library = _library()
        if library is None or not self.takes(transform):
            raise ValueError(f"no compiled pass for {transform}")
        self.tensor = tensor
        self._resize = library.tared_resize
        self._rows = taps_along(transform.frame_height, transform.inner_height, clamps=False)
        self._offsets, self._shifts, self._weights = _columns(transform)
        padded = len(self._offsets)
        self._across, self._levels = np.zeros((2, padded, _LANES), np.int16), np.zeros(padded, np.uint32)
        window = tensor[0, :, transform.top :, transform.left :]
        order = [2 - channel if transform.color == "rgb" else channel for channel in _BY_LANE]
        plan = self._plan = _Plan(width=transform.inner_width, padded=padded, height=transform.inner_height)
        plan.offsets, plan.shifts, plan.weights, plan.rows, plan.levels = (
            array.ctypes.data for array in (self._offsets, self._shifts, self._weights, self._rows, self._levels)
        )
        plan.gain, plan.bias = (
            _NUMBERS(*(of[channel] for channel in order)) for of in (transform.gain, transform.bias)
        )
        plan.planes = _POINTERS(*(window[channel].ctypes.data for channel in order))
        plan.stride = window.strides[1] // window.itemsize
        plan.across = (ctypes.c_void_p * 2)(*(row.ctypes.data for row in self._across))
        self._at = ctypes.addressof(plan)

    @staticmethod
    def takes(transform: ImageTransform) -> bool:
        """Whether it is compiled, and for such a transform."""
        is_scaled = (transform.inner_height, transform.inner_width) != (transform.frame_height, transform.frame_width)
        kind = transform.layout, transform.dtype
        return (
            is_scaled
            and transform.frame_width * _PIXEL >= _WORD
            and transform.color != "gray"
            and kind == ("NCHW", "float32")
            and is_compiled()
        )

    def paint(self, frame: NDArray[np.uint8]) -> None:
        """Make the network input of a BGR frame uint8 of the transform's size, whose pixels lie side by side."""
        begin: int = frame.__array_interface__["data"][0]  # `ctypes.data` leaves objects in a circle behind
        self._resize(begin, frame.strides[0], self._at)


def _columns(transform: ImageTransform) -> tuple[NDArray[np.int32], NDArray[np.uint64], NDArray[np.uint16]]:
    """Offsets, shifts and weights of struct plan. Where a column has but one pixel, the second weighs nothing."""
    taps = taps_along(transform.frame_width, transform.inner_width, clamps=True)
    padded = -(-len(taps) // _COLUMNS) * _COLUMNS
    taps = np.pad(taps, (0, padded - len(taps)), mode="edge")
    begins = taps["first"] * _PIXEL
    offsets = np.minimum(begins, transform.frame_width * _PIXEL - _WORD).astype(np.int32)
    weights = np.array([np.divmod(taps[name], 16) for name in ("first_weight", "second_weight")])
    by_column = weights.reshape(4, -1, _COLUMNS).transpose(1, 0, 2)  # (groups, parts, columns)
    return offsets, 8 * (begins - offsets).astype(np.uint64), by_column.repeat(_LANES, axis=2).astype(np.uint16)
