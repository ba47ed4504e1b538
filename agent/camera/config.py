"""Validate the `camera:` section of config.yaml and turn it into a `Source`."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo

from agent.camera.source import (
    MAX_PIXELS,
    CaptureSettings,
    Decoder,
    Flip,
    Framing,
    PixelFormat,
    Source,
    Transport,
    is_live,
    parse_source,
)
from agent.camera.stream_health import SILENCE_S
from agent.common.errors import CameraError
from agent.common.schema import Finite, LocalPath, Strict, in_folder


def _frozen_seconds(value: object) -> object:
    """Check `frozen_s` with one message, where pydantic would give one for each type of the union."""
    is_seconds = isinstance(value, int | float) and not isinstance(value, bool) and 0.5 <= value <= 9.0
    if not (is_seconds or value is None or value == "auto"):
        raise ValueError("auto, null, or seconds from 0.5 to 9")
    return value


def _spans(region: tuple[float, float, float, float]) -> tuple[float, float, float, float]:
    left, top, right, bottom = region
    if not (left < right and top < bottom):
        raise ValueError("left, top, right, bottom with left < right and top < bottom")
    return region


def _locate(source: str, info: ValidationInfo) -> str:
    return source if is_live(source) else str(in_folder(Path(source), info))


Pixels = Annotated[int, Field(ge=16, le=16384)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]  # part of the picture's width or height
Region = Annotated[tuple[Share, Share, Share, Share], AfterValidator(_spans)]
Polygon = Annotated[tuple[tuple[Share, Share], ...], Field(min_length=3)]
FrozenSeconds = Annotated[float | Literal["auto"] | None, BeforeValidator(_frozen_seconds)]


class CameraConfig(Strict):
    """One camera: where its frames come from, and what is requested of it."""

    name: str = "camera"
    source: Annotated[str, AfterValidator(_locate)]
    policy: Literal["auto", "freshest", "every-frame"] = "auto"
    speed: Finite = Field(default=1.0, ge=0.0)
    loop: bool = False
    transport: Transport = "tcp"
    decoder: Decoder = "ffmpeg"
    decode_threads: int = Field(default=1, ge=1, le=16)
    pixel_format: PixelFormat | None = None
    width: Pixels | None = None
    height: Pixels | None = None
    fps: Annotated[Finite, Field(ge=1.0, le=240.0)] | None = None
    flip: Flip = "none"
    max_pixels: int = Field(default=MAX_PIXELS, ge=1 << 12, le=1 << 30)
    silence_s: Finite = Field(default=SILENCE_S, ge=0.2, le=20.0)
    frozen_s: FrozenSeconds = "auto"
    labels: LocalPath | None = None
    region: Region | None = None
    masks: tuple[Polygon, ...] = ()

    def to_source(self) -> Source:
        """Return the source with everything that is requested of it.

        Raises CameraError as `parse_source`, and `camera.option` for a key that does not fit the kind of source and is
        not at its default, or for a width without a height.
        """
        if (self.width is None) != (self.height is None):
            found = f"camera.width: {self.width}, camera.height: {self.height}"
            raise CameraError("camera.option", found, "both keys or neither", "set the other key too")
        source = parse_source(self.source)
        source.check_accepts(self.model_dump(exclude_defaults=True))
        settings = CaptureSettings(**{field.name: getattr(self, field.name) for field in fields(CaptureSettings)})
        source = replace(source, requested=settings)
        frozen_s = source.usual_frozen_s if self.frozen_s == "auto" else self.frozen_s
        return replace(
            source,
            frozen_s=frozen_s,
            framing=Framing(self.region, self.masks),
            loop=self.loop,
            max_pixels=self.max_pixels,
        )
