"""Preprocessing once more, in its plainest form: every allowed size tried, every pixel put where it belongs."""

from __future__ import annotations

from collections.abc import Sequence

import cv2
import numpy as np
from numpy.typing import NDArray

from agent.vision.boxes import Size
from agent.vision.preprocess import NetworkInput
from agent.vision.spec import InputSpec
from engines.interface import Array


def allowed(spec: InputSpec, taken: NetworkInput, axis: int) -> list[int]:
    """Every length along an axis, 0 the height, that the network input may have."""
    return [n for n in range(taken.min_size[axis], taken.max_size[axis] + 1) if n % spec.multiple == 0]


def right_sizes(spec: InputSpec, taken: NetworkInput, frame: Size) -> list[Sequence[int]]:
    """Per axis the lengths of the network input that are right for a frame; two, where two are equally near."""
    if not spec.follows_frames:
        return [[side] for side in taken.usual_size]
    if spec.resize == "nearest":
        ratio = 1.0
        if any(side > most for side, most in zip(frame, taken.max_size, strict=True)):
            ratio = min(most / side for side, most in zip(frame, taken.max_size, strict=True))
        elif any(side < least for side, least in zip(frame, taken.min_size, strict=True)):
            ratio = max(least / side for side, least in zip(frame, taken.min_size, strict=True))
        return [_nearest(allowed(spec, taken, axis), frame[axis] * ratio) for axis in (0, 1)]
    needed = letterboxed(frame, taken.usual_size) if spec.resize == "rect" else frame
    return [
        [next((n for n in allowed(spec, taken, axis) if n >= needed[axis]), taken.max_size[axis])] for axis in (0, 1)
    ]


def _nearest(lengths: list[int], wanted: float) -> list[int]:
    least = min(abs(n - wanted) for n in lengths)
    return [n for n in lengths if abs(n - wanted) <= least + 1e-6]


def letterboxed(frame: Size, size: Size) -> Size:
    """The frame's size, scaled until one side is the input's and the other is within it."""
    (height, width), (most_height, most_width) = frame, size
    if height * most_width > width * most_height:
        return most_height, max(1, round(width * (most_height / height)))
    return max(1, round(height * (most_width / width))), most_width


def inner_size(spec: InputSpec, taken: NetworkInput, frame: Size, size: Size) -> Size:
    """Return the size of the frame itself within a network input of this size."""
    if spec.resize in ("letterbox", "rect"):
        return letterboxed(frame, taken.usual_size)
    return size if spec.resize in ("stretch", "nearest") else frame


def network_input_of(spec: InputSpec, taken: NetworkInput, frame: NDArray[np.uint8], size: Size) -> Array:
    """The network input of this size for a frame."""
    inner_height, inner_width = inner_size(spec, taken, frame.shape[:2], size)
    scaled = cv2.resize(frame, (inner_width, inner_height), interpolation=cv2.INTER_LINEAR)
    canvas = np.full((*size, 3), spec.pad, np.uint8)
    top, left = 0, 0
    if spec.anchor == "center":
        top, left = (size[0] - inner_height) // 2, (size[1] - inner_width) // 2
    for y in range(size[0]):
        for x in range(size[1]):
            if 0 <= y - top < inner_height and 0 <= x - left < inner_width:
                canvas[y, x] = scaled[y - top, x - left]
    if spec.color == "gray":
        levels = cv2.cvtColor(canvas, cv2.COLOR_BGR2GRAY)[:, :, np.newaxis]
    else:
        levels = canvas if spec.color == "bgr" else cv2.cvtColor(canvas, cv2.COLOR_BGR2RGB)
    image: Array = levels
    if taken.dtype == "float32":
        gain, bias = numbers(spec)
        image = np.stack([levels[:, :, k] * gain[k] + bias[k] for k in range(levels.shape[2])], axis=2)
    return image[np.newaxis] if taken.layout == "NHWC" else np.moveaxis(image, 2, 0)[np.newaxis]


def numbers(spec: InputSpec) -> tuple[list[np.float32], list[np.float32]]:
    """(x * scale - mean) / std, as a gain and a bias in float32 for each channel."""
    std = [*spec.std] * (spec.channels // len(spec.std))
    mean = [*spec.mean] * (spec.channels // len(spec.mean))
    return [np.float32(spec.scale / s) for s in std], [np.float32(-m / s) for m, s in zip(mean, std, strict=True)]
