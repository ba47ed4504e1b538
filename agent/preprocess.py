"""From a camera frame to the network input, and from network pixels back to the frame."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import cv2
import numpy as np
from numpy.typing import NDArray

from agent.errors import CameraError, ConfigError
from agent.model_spec import InputSpec


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

    def __init__(self, spec: InputSpec, input_shape: Sequence[int]) -> None:
        """Prepare for inputs of `input_shape` (1, channels, height, width). Raises ConfigError."""
        if len(input_shape) != 4 or tuple(input_shape[:2]) != (1, spec.channels):
            raise ConfigError(
                "model.input",
                f"input shape {list(input_shape)}",
                f"[1, {spec.channels}, height, width] for color '{spec.color}'",
                "correct input.color, or export the model channels first (NCHW)",
            )
        _, channels, height, width = input_shape
        self._spec = spec
        self._canvas = np.empty((height, width, 3), np.uint8)
        self._window = self._canvas
        self._geometry: Geometry | None = None
        self._tensor = np.empty((1, channels, height, width), np.float32)
        mean, std = (np.array(values, np.float64).reshape(-1, 1, 1) for values in (spec.mean, spec.std))
        self._gain = (spec.scale / std).astype(np.float32)
        self._bias = (-mean / std).astype(np.float32)

    def __call__(self, frame: NDArray[np.uint8]) -> tuple[NDArray[np.float32], Geometry]:
        """The network input (1, channels, height, width) of a BGR frame uint8 (height, width, 3).

        The next call overwrites the returned tensor: copy it to keep it. Raises CameraError
        (`camera.frame`) on a frame of another type or shape.
        """
        if frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[2] != 3 or not frame.size:
            raise CameraError(
                "camera.frame",
                f"a frame {frame.dtype} of shape {frame.shape}",
                "uint8 (height, width, 3) in BGR order",
                "convert the source to 8-bit BGR",
            )
        height, width = frame.shape[:2]
        geometry = self._geometry
        if geometry is None or (geometry.frame_height_px, geometry.frame_width_px) != (height, width):
            geometry = self._lay_out(width, height)
        size = (self._window.shape[1], self._window.shape[0])
        cv2.resize(frame, size, dst=self._window, interpolation=cv2.INTER_LINEAR)
        if self._spec.color == "gray":
            planes = cv2.cvtColor(self._canvas, cv2.COLOR_BGR2GRAY)[np.newaxis]
        else:
            planes = self._canvas.transpose(2, 0, 1)[:: -1 if self._spec.color == "rgb" else 1]
        np.multiply(planes, self._gain, out=self._tensor[0])
        if self._bias.any():
            np.add(self._tensor, self._bias, out=self._tensor)
        return self._tensor, geometry

    def _lay_out(self, frame_width: int, frame_height: int) -> Geometry:
        """Place frames of a new size on the canvas; the padding around them is painted once."""
        height, width = self._canvas.shape[:2]
        inner_width, inner_height, left, top = width, height, 0, 0
        if self._spec.resize == "letterbox":
            ratio = min(width / frame_width, height / frame_height)
            inner_width = max(1, round(frame_width * ratio))
            inner_height = max(1, round(frame_height * ratio))
            if self._spec.anchor == "center":
                left, top = (width - inner_width) // 2, (height - inner_height) // 2
        self._canvas[:] = self._spec.pad
        self._window = self._canvas[top : top + inner_height, left : left + inner_width]
        scale_x, scale_y = inner_width / frame_width, inner_height / frame_height
        self._geometry = Geometry(frame_width, frame_height, scale_x, scale_y, left, top)
        return self._geometry
