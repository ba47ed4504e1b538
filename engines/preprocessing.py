"""Describe preprocessing in numbers (ImageTransform), and as the table by which a kernel paints frames.

DevicePreprocess of engines/cuda/kernels.py makes a network input of a frame on the device, in one launch. The levels
are those of OpenCV's resize and cvtColor, the products and sums those of NumPy: the result equals that of
agent.vision.preprocess bit for bit. So calibrations and comparisons of engines do not depend on which of the two made
a network input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

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
