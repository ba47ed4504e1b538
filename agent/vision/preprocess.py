"""From a camera frame to the network input."""

from __future__ import annotations

from functools import lru_cache

import cv2
import numpy as np
from numpy.typing import NDArray

from agent.errors import CameraError
from agent.fitting import Geometry, fit
from agent.input_spec import InputSpec
from agent.network_input import NetworkInput
from engines.backend import Array
from engines.host_preprocessing import HostPreprocess
from engines.preprocessing import ImageTransform

cv2.setNumThreads(1)  # frames are small: its pool would wait for longer than it works, on the cores of everybody else

_LEVELS = 256  # of a byte
_SIDE_BY_SIDE = (3, 1)  # strides of pixels and their bytes
_SIZES = 16  # of frames whose buffers are kept: cameras of several sizes may take turns


class Preprocessor:
    """Turns BGR frames of any size into the input of one model.

    Resizes bilinearly without antialiasing, as the trainers of these models do (YOLOX, Ultralytics,
    FastestDet all use OpenCV's INTER_LINEAR): what the weights saw in training is what they get here.
    Levels become floats by a table, 256 values per channel: one pass over the pixels, exact whatever the machine, where
    a fused multiply-add would round once instead of twice. All buffers are kept, and padding is painted once. What is
    usual, a frame scaled to planes of floats, is one compiled pass instead, with the same bits.
    """

    def __init__(self, spec: InputSpec, taken: NetworkInput) -> None:
        """spec: how frames become the input that the model takes."""
        self._spec = spec
        self._taken = taken
        std = np.resize(np.array(spec.std, np.float64), spec.channels)
        gain = (spec.scale / std).astype(np.float32)
        bias = (-np.array(spec.mean) / std).astype(np.float32)
        self._gain: tuple[float, ...] = tuple(gain.tolist())
        self._bias: tuple[float, ...] = tuple(bias.tolist())
        levels = np.arange(_LEVELS, dtype=np.float32)
        self._table = (levels[:, np.newaxis] * gain + bias).astype(taken.dtype)
        self._placed = lru_cache(maxsize=_SIZES)(self._place)
        self._painter = lru_cache(maxsize=_SIZES)(self._open_painter)

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
        return self._placed(*frame.shape[:2])

    def __call__(self, frame: NDArray[np.uint8]) -> tuple[Array, Geometry]:
        """The network input of a BGR frame uint8 (height, width, 3), in the shape and type that the model takes.

        The next call may overwrite the returned tensor: copy it to keep it. Raises CameraError as `transform`.
        """
        _, geometry = self.transform(frame)
        painter = self._painter(*frame.shape[:2], frame.strides[1:] == _SIDE_BY_SIDE)
        painter.paint(frame)
        return painter.tensor, geometry

    def _place(self, frame_height: int, frame_width: int) -> tuple[ImageTransform, Geometry]:
        placed = fit(self._spec, self._taken, (frame_height, frame_width))
        transform = ImageTransform(
            frame_height, frame_width, *placed.inner, placed.top, placed.left, *placed.input,
            self._spec.pad, self._spec.color, self._gain, self._bias, self._taken.layout, self._taken.dtype,
        )  # fmt: skip
        return transform, placed.geometry((frame_height, frame_width))

    def _open_painter(self, frame_height: int, frame_width: int, is_dense: bool) -> _Passes | HostPreprocess:
        """is_dense: whether a frame's pixels lie side by side."""
        transform, _ = self._placed(frame_height, frame_width)
        tensor = np.empty(transform.input_shape, transform.dtype)
        by_channel = tensor[0] if transform.layout == "NCHW" else tensor[0].transpose(2, 0, 1)
        by_channel[:] = self._table[transform.pad][:, np.newaxis, np.newaxis]
        if is_dense and HostPreprocess.takes(transform):
            return HostPreprocess(transform, tensor)
        return _Passes(transform, tensor, self._table)


class _Passes:
    """Paints frames of one size into a network input by OpenCV, with the buffers on the way to it."""

    def __init__(self, transform: ImageTransform, tensor: Array, table: Array) -> None:
        """tensor: full of padding. table: (256, channels), what each level of each channel is in it."""
        self.tensor = tensor
        self._transform = transform
        rows = _inside(transform.top, transform.inner_height, transform.height)
        columns = _inside(transform.left, transform.inner_width, transform.width)
        self._seen = (
            _inside(-transform.top, transform.height, transform.inner_height),
            _inside(-transform.left, transform.width, transform.inner_width),
        )
        self._inner = transform.inner_width, transform.inner_height
        is_scaled = self._inner != (transform.frame_width, transform.frame_height)
        self._scaled = np.empty((transform.inner_height, transform.inner_width, 3), np.uint8) if is_scaled else None
        if transform.layout == "NCHW":
            self._windows = [plane[rows, columns] for plane in tensor[0]]
            self._tables = [np.ascontiguousarray(column[np.newaxis]) for column in table.T]
        else:
            self._windows = [tensor[0, rows, columns]]
            self._tables = [table[np.newaxis]]
        is_table = transform.dtype != "uint8"
        self._levels = [np.empty(w.shape, np.uint8) if is_table else w for w in self._windows]

    def paint(self, frame: NDArray[np.uint8]) -> None:
        """Make the network input of a frame."""
        pixels = frame[self._seen] if self._scaled is None else self._scaled
        if self._scaled is not None:
            cv2.resize(frame, self._inner, self._scaled, interpolation=cv2.INTER_LINEAR)
        transform, levels = self._transform, self._levels
        if transform.color == "gray":
            cv2.cvtColor(pixels, cv2.COLOR_BGR2GRAY, levels[0])
        elif transform.layout == "NCHW":
            cv2.split(pixels, levels[::-1] if transform.color == "rgb" else levels)
        elif transform.color == "rgb":
            cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB, levels[0])
        else:
            np.copyto(levels[0], pixels)
        if transform.dtype != "uint8":
            for level, table, window in zip(levels, self._tables, self._windows, strict=True):
                cv2.LUT(level, table, window)


def _inside(offset: int, length: int, limit: int) -> slice:
    """What [offset, offset + length) has in common with [0, limit)."""
    return slice(max(offset, 0), min(offset + length, limit))
