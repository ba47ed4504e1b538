"""What a job's child process tells the daemon, line by line: how far it is, and last how it ended."""

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
    """How a job ended: with an accepted artefact and its verdict, or with an error."""

    artefact: Path | None = None
    verdict: Verdict | None = None
    error: TaredError | None = None

    def message(self) -> dict[str, Any]:
        """The child's last line."""
        if self.error is not None:
            return {"error": {key: getattr(self.error, key) for key in ("code", "found", "expected", "remedy")}}
        return {"artefact": str(self.artefact), "verdict": self.verdict.as_dict() if self.verdict else None}

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> JobOutcome:
        """What `message` gave, on the other side of the pipe.

        Raises AttributeError, KeyError, TypeError or ValueError for anything else.
        """
        if "error" in message:
            if not all(isinstance(words, str) for words in message["error"].values()):
                raise TypeError("an error that is not told in words")
            return cls(error=AgentError(**message["error"]))
        verdict = Verdict.from_dict(message["verdict"]) if message["verdict"] else None
        return cls(Path(message["artefact"]), verdict)


def run_child(work: Callable[[Path, Emit], JobOutcome]) -> int:
    """Do the job in the directory that the command line names; the exit code."""
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever a library prints must not tear the channel

    def emit(message: Mapping[str, Any]) -> None:
        channel.write(json.dumps(message) + "\n")  # whole: another thread may have the last word
        channel.flush()

    try:
        outcome = work(Path(sys.argv[1]), emit)
    except TaredError as error:
        outcome = JobOutcome(error=error)
    emit(outcome.message())
    return 0
