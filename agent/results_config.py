"""The `results` section of config.yaml."""

from __future__ import annotations

from pathlib import Path

from agent.schema import Strict


class ResultsConfig(Strict):
    """Who gets the answer to each frame."""

    file: Path | None = None
    socket: Path | None = None

    def based(self, base: Path) -> ResultsConfig:
        """The same section, relative paths taken from the folder `base`."""
        paths = {"file": self.file, "socket": self.socket}
        return self.model_copy(update={name: base / path if path else None for name, path in paths.items()})
