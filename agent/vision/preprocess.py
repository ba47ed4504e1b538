"""Turn a frame into the network's input, and bring boxes from network pixels back to the frame.

`network_input` reads from the model and its spec what image the network takes: layout, type and sizes. `Preprocessor`
makes that image of frames of any size. It places each frame in the input as the spec's `resize` and `anchor` say, and
returns a `Geometry` with it, by which `Geometry.to_frame` brings boxes back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import cv2
import numpy as np
from numpy.typing import NDArray

from agent.common.errors import CameraError, ConfigError
from agent.vision.boxes import Part, Size
from agent.vision.spec import InputSpec, ModelSpec
from engines.interface import Array, TensorSpec
from engines.preprocessing import ImageTransform, Layout, PixelType, image_layout

cv2.setNumThreads(1)  # frames are small: its pool would wait for longer than it works, on the cores of everybody else

_LEVELS = 256  # values of a byte
_SIZES = 16  # frame sizes whose buffers are kept: cameras of several sizes may take turns


@dataclass(frozen=True)
class NetworkInput:
    """One image input. All sizes are (height, width) in pixels.

    Args:
        usual_size: of most frames, or of all.
        min_size: the least size that frames become. The same as usual_size unless `input.resize` lets the input follow
            the frame.
        max_size: the largest, likewise.
    """

    channels: int
    usual_size: Size
    min_size: Size
    max_size: Size
    layout: Layout = "NCHW"
    dtype: PixelType = "float32"

    def shape(self, size: Size) -> tuple[int, int, int, int]:
        """Return the shape of the network input of one frame."""
        return (1, self.channels, *size) if self.layout == "NCHW" else (1, *size, self.channels)

    def size(self, shape: Sequence[int]) -> Size:
        """Return the (height, width) of a network input of this shape."""
        return _size(shape, self.layout)


def network_input(spec: ModelSpec, tensor: TensorSpec) -> NetworkInput:
    """Return what image the model takes as its input `tensor`.

    Dimensions that the model leaves open come from the first profile: from its opt shape, or from min and max where the
    input follows the frame. The batch is one frame.

    Raises ConfigError:
        model.profile  the profile is missing, disagrees with the model, or is not of `input.multiple`
        model.input    the input is no image of the spec's colours, is uint8 though the spec wants it scaled, or does
                       not take the sizes of the frames that it is to follow
    """
    shape = _opt_shape(spec, tensor)
    layout = image_layout(tensor.shape) or image_layout(shape)
    channels = spec.input.channels
    if layout is None or shape[1 if layout == "NCHW" else 3] != channels:
        raise ConfigError(
            "model.input",
            f"input '{tensor.name}' of shape {list(shape)}",
            f"[1, {channels}, height, width] or [1, height, width, {channels}] for color '{spec.input.color}'",
            "correct input.color, or export the model with an image of such channels",
        )
    least, most = _profile_bounds(spec, tensor, layout) if spec.input.follows_frames else (shape, shape)
    dtype = _pixel_type(spec, tensor)
    return NetworkInput(channels, _size(shape, layout), _size(least, layout), _size(most, layout), layout, dtype)


def _size(shape: Sequence[int], layout: Layout) -> Size:
    height, width = shape[2:] if layout == "NCHW" else shape[1:3]
    return height, width


def _opt_shape(spec: ModelSpec, tensor: TensorSpec) -> tuple[int, ...]:
    opt = spec.profiles[0][tensor.name].opt if spec.profiles and tensor.name in spec.profiles[0] else None
    shown = [size if size is not None else "?" for size in tensor.shape]
    if len(tensor.shape) != 4:
        raise ConfigError(
            "model.input",
            f"input '{tensor.name}' of shape {shown}",
            "one image input (batch, channels, height, width) or (batch, height, width, channels)",
            "export the model with an image input",
        )
    if opt is None and None in tensor.shape[1:]:
        raise ConfigError(
            "model.profile",
            f"input '{tensor.name}' of open shape {shown} without a profile of that name",
            "its min, opt and max shapes",
            f"add profiles: [{{{tensor.name}: {{min: [...], opt: [...], max: [...]}}}}] to the spec",
        )
    if opt is not None and not tensor.accepts(opt):
        raise ConfigError(
            "model.profile",
            f"opt shape {list(opt)} for input '{tensor.name}' of shape {shown}",
            "a profile that keeps the model's fixed dimensions",
            "correct the profile, or export the model with open dimensions",
        )
    return tuple(size or 1 for size in opt or tensor.shape)


def _profile_bounds(spec: ModelSpec, tensor: TensorSpec, layout: Layout) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the profile's min and max shapes, of a model that leaves height and width open."""
    resize, multiple = spec.input.resize, spec.input.multiple
    height, width = tensor.shape[2:] if layout == "NCHW" else tensor.shape[1:3]
    if height is not None or width is not None:
        raise ConfigError(
            "model.input",
            f"input '{tensor.name}' of height {height or '?'} and width {width or '?'}, and input.resize '{resize}'",
            "a model of open height and width",
            "choose letterbox, stretch or pad, or export the model with open dimensions",
        )
    bounds = spec.profiles[0][tensor.name]
    if any(side % multiple for shape in (bounds.min, bounds.max) for side in _size(shape, layout)):
        raise ConfigError(
            "model.profile",
            f"min {list(bounds.min)} and max {list(bounds.max)} for input '{tensor.name}'",
            f"heights and widths that are multiples of {multiple}, as input.multiple asks",
            "correct the profile or input.multiple",
        )
    return bounds.min, bounds.max


def _pixel_type(spec: ModelSpec, tensor: TensorSpec) -> PixelType:
    if tensor.dtype == np.float32:
        return "float32"
    given = spec.input.model_dump(include={"scale", "mean", "std"}, exclude_defaults=True)
    if tensor.dtype == np.uint8 and not given:
        return "uint8"
    keys = "".join(f", and input.{key} {value}" for key, value in given.items())
    raise ConfigError(
        "model.input",
        f"input '{tensor.name}' of type {tensor.dtype}{keys}",
        "float32, or uint8 without scale, mean and std, if the graph contains them",
        "leave these keys out of the spec, or export the model with a float32 input",
    )


@dataclass(frozen=True)
class Geometry:
    """The place of a frame in the network input: network = frame * scale + offset, per axis, in pixels."""

    frame_width_px: int
    frame_height_px: int
    scale_x: float
    scale_y: float
    left_px: int
    top_px: int

    def to_frame(self, boxes: NDArray[np.float32]) -> NDArray[np.float32]:
        """Convert boxes (n, 4) x1 y1 x2 y2 from network pixels to frame pixels, clipped to the frame."""
        offset, scale, limit = self._corners
        in_frame: NDArray[np.float32] = (boxes - offset) / scale
        np.maximum(in_frame, np.float32(0.0), out=in_frame)
        np.minimum(in_frame, limit, out=in_frame)
        return in_frame

    def points_to_frame(self, points: NDArray[np.float32]) -> NDArray[np.float32]:
        """Convert points (..., 2) x y from network pixels to frame pixels; they may lie beyond the frame."""
        offset, scale, _ = self._corners
        in_frame: NDArray[np.float32] = (points - offset[:2]) / scale[:2]
        return in_frame

    def part(self, size: Size) -> Part:
        """Return the part of a network input of this (height, width) that the frame covers."""
        height, width = round(self.frame_height_px * self.scale_y), round(self.frame_width_px * self.scale_x)
        return _inside(self.top_px, height, size[0]), _inside(self.left_px, width, size[1])

    @cached_property
    def _corners(self) -> NDArray[np.float32]:
        """Return offset, scale and limit of x1 y1 x2 y2."""
        offset, scale = (self.left_px, self.top_px), (self.scale_x, self.scale_y)
        limit = self.frame_width_px, self.frame_height_px
        return np.array([offset * 2, scale * 2, limit * 2], np.float32)


class Preprocessor:
    """Turn BGR frames of any size into the input of one model.

    Frames are resized bilinearly without antialiasing, as the trainers of these models do (YOLOX, Ultralytics and
    FastestDet all use OpenCV's INTER_LINEAR): the network gets what its weights saw in training. Levels become floats
    by a table, 256 values per channel. That is one pass over the pixels, and exact on every machine, where a fused
    multiply-add would round once instead of twice. All buffers are kept, and padding is painted once.
    """

    def __init__(self, spec: InputSpec, network: NetworkInput) -> None:
        self._spec = spec
        self._network = network
        std = np.resize(np.array(spec.std, np.float64), spec.channels)
        gain = (spec.scale / std).astype(np.float32)
        bias = (-np.array(spec.mean) / std).astype(np.float32)
        self._gain: tuple[float, ...] = tuple(gain.tolist())
        self._bias: tuple[float, ...] = tuple(bias.tolist())
        levels = np.arange(_LEVELS, dtype=np.float32)
        self._table = (levels[:, np.newaxis] * gain + bias).astype(network.dtype)
        self._placed = lru_cache(maxsize=_SIZES)(self._place)
        self._painter = lru_cache(maxsize=_SIZES)(self._open_painter)

    def transform(self, frame: NDArray[np.uint8]) -> tuple[ImageTransform, Geometry]:
        """Return how frames of this one's size become the network input; equal sizes give the same object.

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
        """Return the network input of a BGR frame uint8 (height, width, 3), in the shape and type of the model.

        The next call may overwrite the returned tensor: copy it to keep it. Raises CameraError as `transform`.
        """
        _, geometry = self.transform(frame)
        painter = self._painter(*frame.shape[:2])
        painter.paint(frame)
        return painter.tensor, geometry

    def part_of(self, tensor: Array) -> Part:
        """Return the part of a network input, a batch of one, that its frame covers: all but the margins of padding.

        A tensor that was kept without its geometry is asked itself. A margin of the frame in the very color of the
        padding counts as padding.
        """
        by_row = tensor[0].transpose(1, 2, 0) if self._network.layout == "NCHW" else tensor[0]
        shown = (by_row != self._table[self._spec.pad]).any(axis=2)
        if not shown.any():
            return slice(None), slice(None)
        rows, columns = (np.flatnonzero(shown.any(axis=axis)) for axis in (1, 0))
        return slice(int(rows[0]), int(rows[-1]) + 1), slice(int(columns[0]), int(columns[-1]) + 1)

    def _place(self, frame_height: int, frame_width: int) -> tuple[ImageTransform, Geometry]:
        """Fit frames of one size into the network input, as `resize` and `anchor` of the spec say."""
        spec, network, frame = self._spec, self._network, (frame_height, frame_width)
        height, width = _input_size(spec, network, frame)
        inner_height, inner_width = frame  # size of the frame in the network input
        if spec.resize in ("stretch", "nearest"):
            inner_height, inner_width = height, width
        elif spec.resize in ("letterbox", "rect"):
            inner_height, inner_width = _letterboxed(frame, network.usual_size)
        top, left = 0, 0  # the frame's upper left corner; negative where the frame is cut off
        if spec.anchor == "center":
            top, left = (height - inner_height) // 2, (width - inner_width) // 2
        transform = ImageTransform(
            frame_height, frame_width, inner_height, inner_width, top, left, height, width,
            spec.pad, spec.color, self._gain, self._bias, network.layout, network.dtype,
        )  # fmt: skip
        scale_x, scale_y = inner_width / frame_width, inner_height / frame_height
        return transform, Geometry(frame_width, frame_height, scale_x, scale_y, left, top)

    def _open_painter(self, frame_height: int, frame_width: int) -> _Painter:
        transform, _ = self._placed(frame_height, frame_width)
        tensor = np.empty(transform.input_shape, transform.dtype)
        by_channel = tensor[0] if transform.layout == "NCHW" else tensor[0].transpose(2, 0, 1)
        by_channel[:] = self._table[transform.pad][:, np.newaxis, np.newaxis]
        return _Painter(transform, tensor, self._table)


def _input_size(spec: InputSpec, network: NetworkInput, frame: Size) -> Size:
    """Return the (height, width) of the network input for frames of this size."""
    (height, width), multiple = frame, spec.multiple
    if spec.resize == "nearest":
        # Scale so that no side exceeds the largest input; else so that none is below the smallest.
        ratio = min(most / side for most, side in zip(network.max_size, frame, strict=True))
        if ratio >= 1.0:
            ratio = max(1.0, *(least / side for least, side in zip(network.min_size, frame, strict=True)))
        height, width = (round(side * ratio / multiple) * multiple for side in frame)
    else:
        sides = _letterboxed(frame, network.usual_size) if spec.resize == "rect" else frame
        height, width = (-(-side // multiple) * multiple for side in sides)
    (min_height, min_width), (max_height, max_width) = network.min_size, network.max_size
    return min(max(height, min_height), max_height), min(max(width, min_width), max_width)


def _letterboxed(frame: Size, size: Size) -> Size:
    """Return the largest (height, width) of the frame's proportions within `size`, at least a pixel each way."""
    ratio = min(size[1] / frame[1], size[0] / frame[0])
    return max(1, round(frame[0] * ratio)), max(1, round(frame[1] * ratio))


class _Painter:
    """Paint frames of one size into a network input by OpenCV; holds the buffers on the way."""

    def __init__(self, transform: ImageTransform, tensor: Array, table: Array) -> None:
        """Prepare the buffers.

        Args:
            tensor: The network input, full of padding.
            table: (256, channels), the value in `tensor` for each level of each channel.
        """
        self.tensor = tensor
        self._transform = transform
        rows = _inside(transform.top, transform.inner_height, transform.height)
        columns = _inside(transform.left, transform.inner_width, transform.width)
        self._visible = (
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
        """Write the network input of a frame into `tensor`."""
        pixels = frame[self._visible] if self._scaled is None else self._scaled
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
    """Return the intersection of [offset, offset + length) with [0, limit)."""
    return slice(max(offset, 0), min(offset + length, limit))
