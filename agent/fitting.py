"""How frames of any size are fitted into a network input, and the way from its pixels back to the frame's."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from agent.decoders import Size
from agent.input_spec import InputSpec
from agent.network_input import NetworkInput


@dataclass(frozen=True)
class Geometry:
    """Where a frame lies in the network input: network = frame * scale + offset, per axis, in pixels."""

    frame_width_px: int
    frame_height_px: int
    scale_x: float
    scale_y: float
    left_px: int
    top_px: int

    def to_frame(self, boxes: NDArray[np.float32]) -> NDArray[np.float32]:
        """Boxes (n, 4) x1 y1 x2 y2 in network pixels as boxes in frame pixels, clipped to the frame."""
        offset, scale, limit = self._corners
        in_frame: NDArray[np.float32] = (boxes - offset) / scale
        np.maximum(in_frame, np.float32(0.0), out=in_frame)
        np.minimum(in_frame, limit, out=in_frame)
        return in_frame

    @cached_property
    def _corners(self) -> NDArray[np.float32]:
        """Offset, scale and limit of x1 y1 x2 y2."""
        numbers = (
            (self.left_px, self.top_px),
            (self.scale_x, self.scale_y),
            (self.frame_width_px, self.frame_height_px),
        )
        return np.array([pair * 2 for pair in numbers], np.float32)


@dataclass(frozen=True)
class Fit:
    """What becomes of frames of one size. input, inner: (height, width) of the network input and of the frame in it.

    top, left: where the frame's upper left corner lies; negative where it is cut off. All in pixels.
    """

    input: Size
    inner: Size
    top: int
    left: int

    def geometry(self, frame: Size) -> Geometry:
        """For frames of this (height, width)."""
        (height, width), (inner_height, inner_width) = frame, self.inner
        return Geometry(width, height, inner_width / width, inner_height / height, self.left, self.top)


def fit(spec: InputSpec, taken: NetworkInput, frame: Size) -> Fit:
    """Fit frames of this (height, width) into the network input, as `spec.resize` and `spec.anchor` say."""
    size = _input_size(spec, taken, frame)
    inner = frame
    if spec.resize in ("stretch", "nearest"):
        inner = size
    elif spec.resize in ("letterbox", "rect"):
        inner = _letterboxed(frame, taken.usual)
    top, left = 0, 0
    if spec.anchor == "center":
        top, left = (size[0] - inner[0]) // 2, (size[1] - inner[1]) // 2
    return Fit(size, inner, top, left)


def _input_size(spec: InputSpec, taken: NetworkInput, frame: Size) -> Size:
    """(height, width) of the network input for frames of this size."""
    (height, width), multiple = frame, spec.multiple
    if spec.resize == "nearest":
        ratio = _ratio_within(taken, frame)
        height, width = (round(side * ratio / multiple) * multiple for side in frame)
    else:
        sides = _letterboxed(frame, taken.usual) if spec.resize == "rect" else frame
        height, width = (-(-side // multiple) * multiple for side in sides)
    (least_height, least_width), (most_height, most_width) = taken.least, taken.most
    return min(max(height, least_height), most_height), min(max(width, least_width), most_width)


def _ratio_within(taken: NetworkInput, frame: Size) -> float:
    """By which a frame is scaled so that no side is beyond the largest input; else so that none is below the least."""
    shrunk = min(most / side for most, side in zip(taken.most, frame, strict=True))
    grown = max(least / side for least, side in zip(taken.least, frame, strict=True))
    return shrunk if shrunk < 1.0 else max(grown, 1.0)


def _letterboxed(frame: Size, size: Size) -> Size:
    """The largest (height, width) of the frame's proportions within `size`, at least a pixel each way."""
    ratio = min(size[1] / frame[1], size[0] / frame[0])
    return max(1, round(frame[0] * ratio)), max(1, round(frame[1] * ratio))
