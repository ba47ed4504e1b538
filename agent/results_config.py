"""The `results` section of config.yaml."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from agent.schema import Finite, Strict


class ResultsConfig(Strict):
    """Who gets the answer to each frame."""

    file: Path | None = None
    socket: Path | None = None
    mqtt_per_s: Finite = Field(default=0.0, ge=0.0, le=60.0)

    def based(self, base: Path) -> ResultsConfig:
        """The same section, relative paths taken from the folder `base`."""
        paths = {"file": self.file, "socket": self.socket}
        return self.model_copy(update={name: base / path if path else None for name, path in paths.items()})
