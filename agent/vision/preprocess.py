"""What a model takes for an image: layout, type and sizes, from its input and from what the spec says of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import cv2
import numpy as np
from numpy.typing import NDArray

from agent.common.errors import CameraError, ConfigError
from agent.vision.detections import Size
from agent.vision.spec import InputSpec, ModelSpec
from engines.interface import Array, TensorSpec
from engines.preprocessing import HostPreprocess, ImageTransform, Layout, PixelType, image_layout


@dataclass(frozen=True)
class NetworkInput:
    """One image input. Sizes are (height, width) in pixels.

    usual: of most frames, or of all. least, most: bounds of what frames of other sizes become; all three are the same
    unless `input.resize` lets the input follow the frame.
    """

    channels: int
    usual: Size
    least: Size
    most: Size
    layout: Layout = "NCHW"
    dtype: PixelType = "float32"

    def shape(self, size: Size) -> tuple[int, int, int, int]:
        """Of the network input of one frame."""
        return (1, self.channels, *size) if self.layout == "NCHW" else (1, *size, self.channels)

    def size(self, shape: Sequence[int]) -> Size:
        """(height, width) of a network input of this shape."""
        return _size(shape, self.layout)


def network_input(spec: ModelSpec, tensor: TensorSpec) -> NetworkInput:
    """What frames become for the model's input `tensor`.

    Dimensions that the model leaves open come from the first profile: the opt shape, or min and max where the input
    follows the frame; the batch is one frame. Raises ConfigError: `model.profile` where it is missing, disagrees with
    the model or is not of such multiples; `model.input` for what is no image of the spec's colours, for uint8 that the
    spec wants scaled, and where the model does not take the sizes that it is to follow.
    """
    shape = _opt_shape(spec, tensor)
    layout = image_layout(tensor.shape) or image_layout(shape)
    if layout is None or shape[1 if layout == "NCHW" else 3] != spec.input.channels:
        channels = spec.input.channels
        raise ConfigError(
            "model.input",
            f"input '{tensor.name}' of shape {list(shape)}",
            f"[1, {channels}, height, width] or [1, height, width, {channels}] for color '{spec.input.color}'",
            "correct input.color, or export the model with an image of such channels",
        )
    least, most = _bounds(spec, tensor, layout) if spec.input.follows_frames else (shape, shape)
    return NetworkInput(
        spec.input.channels,
        usual=_size(shape, layout),
        least=_size(least, layout),
        most=_size(most, layout),
        layout=layout,
        dtype=_pixel_type(spec, tensor),
    )


def _size(shape: Sequence[int], layout: Layout) -> Size:
    height, width = shape[2:] if layout == "NCHW" else shape[1:3]
    return height, width


def _opt_shape(spec: ModelSpec, tensor: TensorSpec) -> tuple[int, ...]:
    opt = spec.profiles[0][tensor.name].opt if spec.profiles and tensor.name in spec.profiles[0] else None
    shown = _shown(tensor)
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
    wanted = tensor.shape if opt is None else opt
    for size, profiled in zip(tensor.shape, wanted, strict=True):
        if size not in (None, profiled):
            raise ConfigError(
                "model.profile",
                f"opt shape {list(wanted)} for input '{tensor.name}' of shape {shown}",
                "a profile that keeps the model's fixed dimensions",
                "correct the profile, or export the model with open dimensions",
            )
    return tuple(size or 1 for size in wanted)


def _bounds(spec: ModelSpec, tensor: TensorSpec, layout: Layout) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The profile's min and max, of a model that leaves height and width open."""
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
    told = "".join(f", and input.{key} {value}" for key, value in given.items())
    raise ConfigError(
        "model.input",
        f"input '{tensor.name}' of type {tensor.dtype}{told}",
        "float32, or uint8 without scale, mean and std, which the graph has then",
        "leave these out of the spec, or export the model with a float32 input",
    )


def _shown(tensor: TensorSpec) -> list[int | str]:
    return [size if size is not None else "?" for size in tensor.shape]


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
