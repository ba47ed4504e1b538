"""What a model takes for an image: layout, type and sizes, from its input and from what the spec says of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from agent.decoders import Size
from agent.errors import ConfigError
from agent.model_spec import ModelSpec
from engines.backend import TensorSpec
from engines.preprocessing import Layout, PixelType, image_layout


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
