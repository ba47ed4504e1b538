"""The `input` and `profiles` of a model spec: how frames become network inputs, and of which shapes those may be."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, PositiveInt, ValidationInfo, field_validator

from agent.schema import Finite, Strict

_FOLLOWING = ("native", "nearest", "rect")


def _rank_four(shape: tuple[int, ...]) -> tuple[int, ...]:
    if len(shape) != 4:
        raise ValueError("four dimensions: batch, channels, height, width, or channels last")
    return shape


Shape = Annotated[tuple[PositiveInt, ...], AfterValidator(_rank_four)]


class InputSpec(Strict):
    """From a BGR frame to the network input: (x * scale - mean) / std, channels in the order of `color`.

    resize: `letterbox` scales a frame into the input, with its proportions, and pads; `stretch` scales it to the input;
    `pad` keeps its pixels as they are, pads it to the input, and cuts off what lies beyond. With the others the input
    of a model of open size follows the frame, in `multiple`s within the profile: `native` is `pad` to the frame's own
    size, rounded up; `nearest` is `stretch` to the allowed size next to the frame's, with the frame's proportions where
    that is beyond the profile; `rect` is `letterbox` into the opt shape without the padding that no multiple asks for.
    """

    color: Literal["bgr", "rgb", "gray"] = "bgr"
    resize: Literal["letterbox", "stretch", "pad", "native", "nearest", "rect"] = "letterbox"
    anchor: Literal["top-left", "center"] = "top-left"
    pad: Annotated[int, Field(ge=0, le=255)] = 114
    multiple: PositiveInt = 1
    mean: tuple[Finite, ...] = (0.0,)
    std: tuple[Finite, ...] = (1.0,)
    scale: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] = 1.0

    @property
    def channels(self) -> int:
        return 1 if self.color == "gray" else 3

    @property
    def follows_frames(self) -> bool:
        """Whether frames of several sizes become network inputs of several sizes."""
        return self.resize in _FOLLOWING

    @field_validator("multiple")
    @classmethod
    def _only_of_open_sizes(cls, multiple: int, info: ValidationInfo) -> int:
        if multiple != 1 and info.data.get("resize", "native") not in _FOLLOWING:
            raise ValueError("1 unless resize is native, nearest or rect: every other input has the model's one size")
        return multiple

    @field_validator("mean", "std")
    @classmethod
    def _one_value_or_one_per_channel(cls, values: tuple[float, ...], info: ValidationInfo) -> tuple[float, ...]:
        color = info.data.get("color", "bgr")
        channels = 1 if color == "gray" else 3
        if len(values) not in (1, channels):
            raise ValueError("one value for color 'gray'" if channels == 1 else "one value, or one per channel")
        return values

    @field_validator("std")
    @classmethod
    def _nonzero(cls, values: tuple[float, ...]) -> tuple[float, ...]:
        if 0.0 in values:
            raise ValueError("values other than zero")
        return values


class ShapeRange(Strict):
    """The shapes of one input in an optimization profile, each (batch, channels, height, width), or channels last."""

    min: Shape
    opt: Shape
    max: Shape

    @field_validator("opt", "max")
    @classmethod
    def _not_below(cls, shape: tuple[int, ...], info: ValidationInfo) -> tuple[int, ...]:
        for lower in ("min", "opt"):
            bound = info.data.get(lower, shape)
            if any(low > high for low, high in zip(bound, shape, strict=True)):
                raise ValueError(f"no dimension below '{lower}' {list(bound)}")
        return shape
