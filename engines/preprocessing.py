"""Describe preprocessing in numbers (ImageTransform), and paint frames into network inputs on the host.

DevicePreprocess of engines/cuda/kernels.py does the same on the device, in one launch from a frame to its input. The
levels are those of OpenCV's resize and cvtColor, the products and sums those of NumPy: the result equals
agent.vision.preprocess bit for bit. So calibrations and comparisons of engines do not depend on which of the three made
a network input.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from calibrate.native import open_library

HEADER = np.dtype(
    [
        ("width", "<i4"),
        ("height", "<i4"),
        ("pad", "<i4"),
        ("color", "<i4"),
        ("gain", "<f4", 3),
        ("bias", "<f4", 3),
        ("channels_last", "<i4"),
        ("is_bytes", "<i4"),
    ]
)
"""struct Transform of kernels.cu, field by field."""

TAP = np.dtype([("first", "<i4"), ("second", "<i4"), ("first_weight", "<i4"), ("second_weight", "<i4")])
"""struct Tap of kernels.cu, field by field."""

_COLORS = {"bgr": 0, "rgb": 1, "gray": 2}
PIXEL_BYTES = 3
_ONE = np.float32(1 << 11)  # OpenCV's INTER_RESIZE_COEF_SCALE: weights of bytes are fixed-point numbers of 11 bits

Layout = Literal["NCHW", "NHWC"]
PixelType = Literal["float32", "uint8"]
IMAGE_CHANNELS = (1, 3, 4)


def image_layout(shape: Sequence[object]) -> Layout | None:
    """Return where an image of rank 4 has its channels, by their number; None if neither axis has an image's number."""
    if len(shape) != 4:
        return None
    return "NCHW" if shape[1] in IMAGE_CHANNELS else "NHWC" if shape[3] in IMAGE_CHANNELS else None


@dataclass(frozen=True)
class ImageTransform:
    """All numbers that take BGR frames uint8 (frame_height, frame_width, 3) to the network input.

    The frame is scaled to (inner_height, inner_width), bilinearly as OpenCV's INTER_LINEAR scales bytes, and placed on
    a canvas of the input's size full of `pad`, its upper left corner at (top, left). These may be negative: what lies
    beyond the canvas is cut off, which only a frame of its own size does. Then channels come in the order of `color`,
    and each is level * gain + bias in float32, the product rounded first; in uint8 it is the level, gain is 1 and bias
    0. Sizes and places are in pixels.
    """

    frame_height: int
    frame_width: int
    inner_height: int
    inner_width: int
    top: int
    left: int
    height: int
    width: int
    pad: int
    color: Literal["bgr", "rgb", "gray"]
    gain: tuple[float, ...]
    bias: tuple[float, ...]
    layout: Layout = "NCHW"
    dtype: PixelType = "float32"

    @property
    def input_shape(self) -> tuple[int, int, int, int]:
        """The shape of the network input: one image, channels where the layout has them."""
        channels, size = len(self.gain), (self.height, self.width)
        return (1, channels, *size) if self.layout == "NCHW" else (1, *size, channels)


def transform_table(transform: ImageTransform) -> NDArray[np.uint8]:
    """Return the kernel's table: a HEADER, then a TAP for every column and every row of the network input."""
    header = np.zeros(1, HEADER)
    header["width"], header["height"] = transform.width, transform.height
    header["pad"], header["color"] = transform.pad, _COLORS[transform.color]
    header["channels_last"], header["is_bytes"] = transform.layout == "NHWC", transform.dtype == "uint8"
    header["gain"][0, : len(transform.gain)] = transform.gain
    header["bias"][0, : len(transform.bias)] = transform.bias
    columns = taps_along(transform.frame_width, transform.inner_width, clamps=True)
    columns["first"] *= PIXEL_BYTES
    columns["second"] *= PIXEL_BYTES
    rows = taps_along(transform.frame_height, transform.inner_height, clamps=False)
    parts = (
        header,
        _placed(columns, transform.left, transform.width),
        _placed(rows, transform.top, transform.height),
    )
    return np.concatenate([part.view(np.uint8) for part in parts])


def taps_along(source_px: int, target_px: int, clamps: bool) -> NDArray[np.void]:
    """Return the source of each pixel along an axis when `source_px` are scaled to `target_px`: TAP (target_px,).

    The operations and their types are those of OpenCV (resize in modules/imgproc/src/resize.cpp), for they decide the
    last level: positions in double, their fractions in float, weights rounded half to even. Beyond the outermost pixel
    centres both pixels are the edge's. `clamps`, as OpenCV does along rows but not down columns, gives one of them all
    the weight instead of sharing it out, which rounds differently.
    """
    scale = 1.0 / (target_px / source_px)
    position = ((np.arange(target_px) + 0.5) * scale - 0.5).astype(np.float32)
    first = np.floor(position)
    fraction = position - first
    if clamps:
        fraction[(first < 0) | (first >= source_px - 1)] = 0.0
    taps = np.zeros(target_px, TAP)
    taps["first"] = first.clip(0, source_px - 1)
    taps["second"] = (first + 1).clip(0, source_px - 1)
    taps["first_weight"] = np.rint((np.float32(1.0) - fraction) * _ONE)
    taps["second_weight"] = np.rint(fraction * _ONE)
    return taps


def _placed(taps: NDArray[np.void], offset_px: int, size_px: int) -> NDArray[np.void]:
    """Return the taps along an axis of the network input: `taps` from `offset_px` on, cut to the axis, amid padding."""
    placed = np.zeros(size_px, TAP)
    placed["first"] = -1
    begin, end = max(offset_px, 0), min(offset_px + taps.size, size_px)
    placed[begin:end] = taps[begin - offset_px : end - offset_px]
    return placed


_VERSION = 1  # as in resize.c
_LANES, _COLUMNS = 4, 4  # LANES and COLUMNS there
_WORD = 8  # bytes that are read at once
_BY_LANE = (0, 2, 1)  # channels in the order of the lanes
_POINTERS = ctypes.c_void_p * PIXEL_BYTES
_NUMBERS = ctypes.c_float * PIXEL_BYTES


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
    """Return True if the pass was built with the package, and loads."""
    return _library() is not None


@cache
def _library() -> ctypes.CDLL | None:
    library = open_library(Path(__file__).parent / "_resize", "tared_resize_version", _VERSION)
    if library is not None:
        library.tared_resize.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_void_p]
        library.tared_resize.restype = None
    return library


class HostPreprocess:
    """Paints frames of one size into one network input. It holds buffers: use one object per thread."""

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
            _NUMBERS(*(values[channel] for channel in order)) for values in (transform.gain, transform.bias)
        )
        plan.planes = _POINTERS(*(window[channel].ctypes.data for channel in order))
        plan.stride = window.strides[1] // window.itemsize
        plan.across = (ctypes.c_void_p * 2)(*(row.ctypes.data for row in self._across))
        self._at = ctypes.addressof(plan)

    @staticmethod
    def takes(transform: ImageTransform) -> bool:
        """Return True if the pass is compiled, and made for such a transform."""
        is_scaled = (transform.inner_height, transform.inner_width) != (transform.frame_height, transform.frame_width)
        kind = transform.layout, transform.dtype
        return (
            is_scaled
            and transform.frame_width * PIXEL_BYTES >= _WORD
            and transform.color != "gray"
            and kind == ("NCHW", "float32")
            and is_compiled()
        )

    def paint(self, frame: NDArray[np.uint8]) -> None:
        """Make the network input of a BGR frame uint8 of the transform's size, whose pixels lie side by side."""
        begin: int = frame.__array_interface__["data"][0]  # `ctypes.data` leaves objects in a circle behind
        self._resize(begin, frame.strides[0], self._at)


def _columns(transform: ImageTransform) -> tuple[NDArray[np.int32], NDArray[np.uint64], NDArray[np.uint16]]:
    """Return offsets, shifts and weights of struct plan. If a column has only one pixel, the second weighs nothing."""
    taps = taps_along(transform.frame_width, transform.inner_width, clamps=True)
    padded = -(-len(taps) // _COLUMNS) * _COLUMNS
    taps = np.pad(taps, (0, padded - len(taps)), mode="edge")
    begins = taps["first"] * PIXEL_BYTES
    offsets = np.minimum(begins, transform.frame_width * PIXEL_BYTES - _WORD).astype(np.int32)
    weights = np.array([np.divmod(taps[name], 16) for name in ("first_weight", "second_weight")])
    by_column = weights.reshape(4, -1, _COLUMNS).transpose(1, 0, 2)  # (groups, parts, columns)
    return offsets, 8 * (begins - offsets).astype(np.uint64), by_column.repeat(_LANES, axis=2).astype(np.uint16)
