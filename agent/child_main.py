"""What every child process of a job does around its work: it speaks by lines, and ends with an outcome."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from agent.outcome import Emit, Outcome
from calibrate.errors import TaredError


def run_child(work: Callable[[Path, Emit], Outcome]) -> int:
    """Do the job in the directory that the command line names; the exit code."""
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever a library prints must not tear the channel

    def emit(message: Mapping[str, Any]) -> None:
        channel.write(json.dumps(message) + "\n")  # whole: another thread may have the last word
        channel.flush()

    try:
        outcome = work(Path(sys.argv[1]), emit)
    except TaredError as error:
        outcome = Outcome(error=error)
    emit(outcome.message())
    return 0
