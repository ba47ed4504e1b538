"""From a camera frame to the network input, and from network pixels back to the frame."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import cv2
import numpy as np
from numpy.typing import NDArray

from agent.errors import CameraError, ConfigError
from agent.model_spec import InputSpec
from engines.preprocessing import ImageTransform


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
        offset = np.array((self.left_px, self.top_px) * 2, np.float32)
        scale = np.array((self.scale_x, self.scale_y) * 2, np.float32)
        limit = np.array((self.frame_width_px, self.frame_height_px) * 2, np.float32)
        in_frame: NDArray[np.float32] = np.clip((boxes - offset) / scale, np.float32(0.0), limit)
        return in_frame


class Preprocessor:
    """Turns BGR frames of any size into the float32 input of one model.

    Resizes bilinearly without antialiasing, as the trainers of these models do (YOLOX, Ultralytics,
    FastestDet all use OpenCV's INTER_LINEAR): what the weights saw in training is what they get here.
    """

    def __init__(self, spec: InputSpec, input_shape: Sequence[int], largest: Sequence[int] | None = None) -> None:
        """Prepare for inputs of `input_shape` (1, channels, height, width).

        Where `resize` is 'native', that is the smallest and `largest` the largest shape. Raises ConfigError.
        """
        if len(input_shape) != 4 or tuple(input_shape[:2]) != (1, spec.channels):
            raise ConfigError(
                "model.input",
                f"input shape {list(input_shape)}",
                f"[1, {spec.channels}, height, width] for color '{spec.color}'",
                "correct input.color, or export the model channels first (NCHW)",
            )
        self._spec = spec
        self._smallest = (input_shape[2], input_shape[3])
        self._largest = self._smallest if largest is None else (largest[2], largest[3])
        std = np.resize(np.array(spec.std, np.float64), spec.channels)
        self._gain: tuple[float, ...] = tuple((spec.scale / std).astype(np.float32).tolist())
        self._bias: tuple[float, ...] = tuple((-np.array(spec.mean) / std).astype(np.float32).tolist())
        self._last: tuple[ImageTransform, Geometry] | None = None
        self._canvas = np.empty((0, 0, 3), np.uint8)
        self._tensor = np.empty((1, spec.channels, 0, 0), np.float32)
        self._painted: ImageTransform | None = None

    def transform(self, frame: NDArray[np.uint8]) -> tuple[ImageTransform, Geometry]:
        """How frames of this one's size become the network input; equal sizes give the same object.

        Raises CameraError (`camera.frame`) unless it is BGR uint8 (height, width, 3) with any pixel in it.
        """
        if frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[2] != 3 or not frame.size:
            raise CameraError(
                "camera.frame",
                f"a frame {frame.dtype} of shape {frame.shape}",
                "uint8 (height, width, 3) in BGR order",
                "convert the source to 8-bit BGR",
            )
        height, width = frame.shape[:2]
        if self._last is None or (self._last[0].frame_height, self._last[0].frame_width) != (height, width):
            self._last = self._lay_out(height, width)
        return self._last

    def __call__(self, frame: NDArray[np.uint8]) -> tuple[NDArray[np.float32], Geometry]:
        """The network input (1, channels, height, width) of a BGR frame uint8 (height, width, 3).

        The next call may overwrite the returned tensor: copy it to keep it. Raises CameraError as `transform`.
        """
        transform, geometry = self.transform(frame)
        if transform is not self._painted:
            self._paint(transform)
        window = self._canvas[_inside(transform.top, transform.inner_height, transform.height),
                              _inside(transform.left, transform.inner_width, transform.width)]  # fmt: skip
        if transform.inner_height == transform.frame_height and transform.inner_width == transform.frame_width:
            window[:] = frame[_inside(-transform.top, transform.height, transform.frame_height),
                              _inside(-transform.left, transform.width, transform.frame_width)]  # fmt: skip
        else:
            cv2.resize(frame, (transform.inner_width, transform.inner_height), window, interpolation=cv2.INTER_LINEAR)
        if transform.color == "gray":
            planes = cv2.cvtColor(self._canvas, cv2.COLOR_BGR2GRAY)[np.newaxis]
        else:
            planes = self._canvas.transpose(2, 0, 1)[:: -1 if transform.color == "rgb" else 1]
        np.multiply(planes, _by_channel(transform.gain), out=self._tensor[0])
        if any(transform.bias):
            np.add(self._tensor, _by_channel(transform.bias), out=self._tensor)
        return self._tensor, geometry

    def _lay_out(self, frame_height: int, frame_width: int) -> tuple[ImageTransform, Geometry]:
        """Place frames of a new size in the network input."""
        height, width = self._input_size(frame_height, frame_width)
        inner_height, inner_width = frame_height, frame_width
        if self._spec.resize == "stretch":
            inner_height, inner_width = height, width
        elif self._spec.resize == "letterbox":
            ratio = min(width / frame_width, height / frame_height)
            inner_width = max(1, round(frame_width * ratio))
            inner_height = max(1, round(frame_height * ratio))
        top, left = 0, 0
        if self._spec.anchor == "center":
            top, left = (height - inner_height) // 2, (width - inner_width) // 2
        transform = ImageTransform(
            frame_height, frame_width, inner_height, inner_width, top, left, height, width,
            self._spec.pad, self._spec.color, self._gain, self._bias,
        )  # fmt: skip
        scale_x, scale_y = inner_width / frame_width, inner_height / frame_height
        return transform, Geometry(frame_width, frame_height, scale_x, scale_y, left, top)

    def _input_size(self, frame_height: int, frame_width: int) -> tuple[int, int]:
        """(height, width) of the network input for frames of this size."""
        multiple = self._spec.multiple
        height, width = (-(-side // multiple) * multiple for side in (frame_height, frame_width))
        (least_height, least_width), (most_height, most_width) = self._smallest, self._largest
        return min(max(height, least_height), most_height), min(max(width, least_width), most_width)

    def _paint(self, transform: ImageTransform) -> None:
        """Make ready for frames of another size; the padding around them is painted once."""
        if self._canvas.shape[:2] != (transform.height, transform.width):
            self._canvas = np.empty((transform.height, transform.width, 3), np.uint8)
            self._tensor = np.empty((1, self._spec.channels, transform.height, transform.width), np.float32)
        self._canvas[:] = transform.pad
        self._painted = transform


def _inside(offset: int, length: int, limit: int) -> slice:
    """What [offset, offset + length) has in common with [0, limit)."""
    return slice(max(offset, 0), min(offset + length, limit))


def _by_channel(values: tuple[float, ...]) -> NDArray[np.float32]:
    """(channels, 1, 1), to be broadcast over an image."""
    return np.array(values, np.float32).reshape(-1, 1, 1)
