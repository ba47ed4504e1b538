"""The `commands` and `privacy` sections of config.yaml."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from agent.credentials import FileOrCredential, based
from agent.schema import Strict


class CommandsConfig(Strict):
    """Whose word counts. product: what releases have to name. unsigned: None refuses where there are keys, and from a
    broker on another machine."""

    operator_keys: tuple[FileOrCredential, ...] = ()
    release_keys: tuple[FileOrCredential, ...] = ()
    product: str | None = Field(default=None, min_length=1, max_length=256)
    unsigned: Literal["refuse", "allow"] | None = None
    clock: Literal["synchronised", "trusted"] = "synchronised"

    def based(self, base: Path) -> CommandsConfig:
        """The same section, relative paths taken from the folder `base`."""
        update = {
            name: tuple(based(path, base) for path in getattr(self, name)) for name in ("operator_keys", "release_keys")
        }
        return self.model_copy(update=update)


class PrivacyConfig(Strict):
    """What of the pictures may leave the board, and what of the counts that calibrate."""

    snapshot: bool = False
    histograms: bool = False
