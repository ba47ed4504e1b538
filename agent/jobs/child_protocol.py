"""Define what a job's child process reports to the daemon: one JSON object per line on its standard output.

Progress lines are `{"step", "percent"}`. The last line is the `JobOutcome`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.common.errors import AgentError
from agent.validation.verdict import Verdict
from calibrate.errors import TaredError

Emit = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True)
class JobOutcome:
    """The end of a job: an accepted artefact with its verdict, or an error."""

    artefact: Path | None = None
    verdict: Verdict | None = None
    error: TaredError | None = None

    def as_message(self) -> dict[str, Any]:
        """Return the child's last line."""
        if self.error is not None:
            return {"error": {key: getattr(self.error, key) for key in ("code", "found", "expected", "remedy")}}
        return {"artefact": str(self.artefact), "verdict": self.verdict.as_dict() if self.verdict else None}

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> JobOutcome:
        """Read the result of `as_message`, on the daemon's side.

        Raises AttributeError, KeyError, TypeError or ValueError for anything else.
        """
        if "error" in message:
            if not all(isinstance(words, str) for words in message["error"].values()):
                raise TypeError("an error that is not in words")
            return cls(error=AgentError(**message["error"]))
        verdict = Verdict.from_dict(message["verdict"]) if message["verdict"] else None
        return cls(Path(message["artefact"]), verdict)


def run_child(work: Callable[[Path, Emit], JobOutcome]) -> int:
    """Do the job in the directory that the command line names, and report its outcome; return the exit code."""
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever a library prints must not tear the channel

    def emit(message: Mapping[str, Any]) -> None:
        channel.write(json.dumps(message) + "\n")  # whole: another thread may have the last word
        channel.flush()

    try:
        outcome = work(Path(sys.argv[1]), emit)
    except TaredError as error:
        outcome = JobOutcome(error=error)
    emit(outcome.as_message())
    return 0
