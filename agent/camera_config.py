"""`camera:` of config.yaml: where the frames come from, and what becomes of them before anything else sees them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

from pydantic import Field

from agent.framing import Framing, Polygon, Region
from agent.schema import Finite, Strict
from agent.source import Source, Transport, is_live, parse_source


class CameraConfig(Strict):
    """Where the frames come from."""

    name: str = "camera"
    source: str
    policy: Literal["auto", "freshest", "every-frame"] = "auto"
    speed: Finite = Field(default=1.0, ge=0.0)
    transport: Transport = "tcp"
    decode_threads: int = Field(default=1, ge=1, le=16)
    silence_s: Finite = Field(default=2.0, ge=0.2, le=60.0)
    labels: Path | None = None
    region: Region | None = None
    masks: tuple[Polygon, ...] = ()

    def opened(self) -> Source:
        """What is read, and how. Raises CameraError as `parse_source`."""
        return replace(
            parse_source(self.source),
            transport=self.transport,
            decode_threads=self.decode_threads,
            framing=Framing(self.region, self.masks),
        )

    def based(self, base: Path) -> CameraConfig:
        """The same with its relative paths taken from `base`."""
        source = self.source if is_live(self.source) else str(base / self.source)
        return self.model_copy(update={"source": source, "labels": base / self.labels if self.labels else None})
