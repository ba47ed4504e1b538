"""The `results` section of config.yaml."""

from __future__ import annotations

from pathlib import Path

from agent.schema import Strict


class ResultsConfig(Strict):
    """Who gets the answer to each frame."""

    file: Path | None = None

    def based(self, base: Path) -> ResultsConfig:
        """The same section, relative paths taken from the folder `base`."""
        return self.model_copy(update={"file": base / self.file if self.file else None})
