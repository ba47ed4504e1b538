"""Which signed commands may have been carried out although the log of commands does not know them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from os.path import lexists
from pathlib import Path
from typing import Any

from agent.errors import AgentError
from agent.state_file import StateFile

_SCHEMA = 1


class ReplayBound:
    """What is known of the commands that a log of commands has lost or forgotten, in a file of its own beside it.

    The log of a new board has lost nothing, and refuses nothing: such a board has carried out no command, and its clock
    may be wrong at its first start. Any other log that is begun anew refuses what was issued no later than the newest
    command that the old one took, by the clocks of their senders: this board's may have jumped. Where that is unknown
    too, because the file is damaged or an older tared had none, it is the time of this start.
    """

    def __init__(self, path: Path, log_exists: bool, on_error: Callable[[AgentError], None]) -> None:
        """log_exists: whether there is a log of commands already. on_error hears of a disk that refuses.

        Raises AgentError (`command.schema`).
        """
        self._file = StateFile(path, _SCHEMA, "command.write", on_error)
        known = self._file.read(_take)
        self._newest, self._begun, self._forgotten = known or (0.0, 0.0, 0.0)
        if known is None and (log_exists or lexists(path)):
            self._newest = time.time()
            self._file.write(self._document)

    def log_lost(self) -> None:
        """The log is begun anew."""
        if self._begun != self._newest:
            self._begun = self._newest
            self._file.write(self._document)

    def check(self, issued: float, expires: float) -> None:
        """Of a signed command that the log does not know; Unix times in seconds. Raises AgentError
        (`command.forgotten`)."""
        if issued > self._begun and expires > self._forgotten:
            return
        found = "a command from before the log of commands began, or as old as what it has forgotten"
        expected = "one of which it is known that it was not carried out"
        raise AgentError("command.forgotten", found, expected, "send it anew")

    def note(self, issued: float, forgotten: float) -> None:
        """Before a signed command is carried out; durable when this returns. forgotten: the latest expiry of commands
        that the log has removed, by a clock that may have jumped ahead. Raises AgentError (`command.write`)."""
        self._newest, self._forgotten = max(self._newest, issued), max(self._forgotten, forgotten)
        self._file.replace(self._document)

    @property
    def _document(self) -> dict[str, float]:
        return {"newest": self._newest, "begun": self._begun, "forgotten": self._forgotten}


def _take(document: Mapping[str, Any]) -> tuple[float, float, float]:
    return float(document["newest"]), float(document["begun"]), float(document["forgotten"])
