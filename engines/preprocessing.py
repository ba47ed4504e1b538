"""What preprocessing is, in numbers, and preprocessing on the device: one launch from a frame to the network input.

Runtime-neutral as engines/kernels.py is. The levels are those of OpenCV's resize and cvtColor, the products and sums
those of NumPy: what comes out equals agent.preprocess bit for bit, so it does not matter to a calibration, or to
whoever compares two engines, which of the two made a network input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from engines.kernels import Buffer, Executor

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
_PIXEL_BYTES = 3
_ONE = np.float32(1 << 11)  # OpenCV's INTER_RESIZE_COEF_SCALE: weights of bytes are fixed-point numbers of 11 bits

Layout = Literal["NCHW", "NHWC"]
PixelType = Literal["float32", "uint8"]
IMAGE_CHANNELS = (1, 3, 4)


def image_layout(shape: Sequence[object]) -> Layout | None:
    """Where an image of rank 4 has its channels, by their number; None where neither place has one of an image's."""
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
        """Of the network input: one image, channels where the layout has them."""
        channels, size = len(self.gain), (self.height, self.width)
        return (1, channels, *size) if self.layout == "NCHW" else (1, *size, channels)


_TABLES = 8  # of sizes of frames: cameras may take turns


class DevicePreprocess:
    """Turns frames that lie on the device into network inputs there.

    Holds the tables of a few transforms, each uploaded once: frames of sizes that take turns cost a launch each, and no
    allocation.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._tables: dict[ImageTransform, Buffer] = {}

    def has_room(self, transform: ImageTransform) -> bool:
        """Whether `run` gives up no table for it."""
        return transform in self._tables or len(self._tables) < _TABLES

    def run(
        self,
        transform: ImageTransform,
        frame_address: int,
        input_address: int,
        stream: object | None = None,
        row_bytes: int | None = None,
    ) -> None:
        """Queue on `stream` the network input of one frame.

        frame_address: of a BGR frame uint8 (frame_height, frame_width, 3) whose rows begin `row_bytes` apart, by
        default 3 * frame_width. input_address: receives what `transform` has as shape and type of the network input.
        Where it does not have room for the transform, all tables are given up: what was queued before must be done.

        Raises ValueError for rows that overlap; DeviceError as Executor.upload and launch do.
        """
        least = transform.frame_width * _PIXEL_BYTES
        row_bytes = least if row_bytes is None else row_bytes
        if row_bytes < least:
            raise ValueError(f"rows {row_bytes} bytes apart, for {transform.frame_width} pixels of {_PIXEL_BYTES}")
        table = self._tables.get(transform)
        if table is None:
            if not self.has_room(transform):
                self._tables.clear()
            table = self._tables[transform] = self._executor.upload(_table(transform), stream)
        blocks = -(-transform.height * transform.width // self._executor.geometry.threads)
        arguments = (table, np.uint64(frame_address), np.int32(row_bytes), np.uint64(input_address))
        self._executor.launch("preprocess", blocks, arguments, stream)


def _table(transform: ImageTransform) -> NDArray[np.uint8]:
    """What the kernel reads beside the frame: a HEADER, then a TAP for every column and every row of the input."""
    header = np.zeros(1, HEADER)
    header["width"], header["height"] = transform.width, transform.height
    header["pad"], header["color"] = transform.pad, _COLORS[transform.color]
    header["channels_last"], header["is_bytes"] = transform.layout == "NHWC", transform.dtype == "uint8"
    header["gain"][0, : len(transform.gain)] = transform.gain
    header["bias"][0, : len(transform.bias)] = transform.bias
    columns = taps_along(transform.frame_width, transform.inner_width, clamps=True)
    columns["first"] *= _PIXEL_BYTES
    columns["second"] *= _PIXEL_BYTES
    rows = taps_along(transform.frame_height, transform.inner_height, clamps=False)
    parts = (
        header,
        _placed(columns, transform.left, transform.width),
        _placed(rows, transform.top, transform.height),
    )
    return np.concatenate([part.view(np.uint8) for part in parts])


def taps_along(source_px: int, target_px: int, clamps: bool) -> NDArray[np.void]:
    """Where each pixel along one axis comes from when `source_px` of them are scaled to `target_px`: TAP (target_px,).

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
    """The taps along an axis of the network input: `taps` from `offset_px` on, cut to the axis, amid padding."""
    placed = np.zeros(size_px, TAP)
    placed["first"] = -1
    begin, end = max(offset_px, 0), min(offset_px + taps.size, size_px)
    placed[begin:end] = taps[begin - offset_px : end - offset_px]
    return placed
