"""A candidate process seen from the daemon: started, followed line by line, ended."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agent.candidate import Outcome
from agent.errors import AgentError

# By the signal that ended it. SIGKILL comes from the kernel when memory is short, or from a person.
_CAUSES: dict[int, tuple[str, str]] = {
    signal.SIGKILL: (
        "recalibration.memory",
        "free memory, add swap, or build with smaller profiles; what serves goes on",
    ),
    **dict.fromkeys(
        (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE),
        ("recalibration.crash", "the builder crashed: report the model and the versions of `tared doctor`"),
    ),
}
_END_S = 2.0  # for a process that was asked to end; then it is killed


class CandidateProcess:
    """`python -m agent.candidate DIRECTORY`, whose job has been written there; the directory goes with it.

    on_progress(step, percent) and on_outcome(outcome) are called in a thread of this object's own. An outcome always
    comes, and last, also from a process that dies without a word.
    """

    def __init__(
        self, directory: Path, on_progress: Callable[[str, int], None], on_outcome: Callable[[Outcome], None]
    ) -> None:
        """Raises OSError when no process can be started."""
        self._directory = directory
        self._on_progress = on_progress
        self._on_outcome = on_outcome
        self._stderr = directory / "stderr"
        with self._stderr.open("wb") as errors:
            # Its own session: a Ctrl-C in the terminal is for the daemon, which ends the child itself.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "agent.candidate", str(directory)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                encoding="utf-8",
                errors="replace",
                start_new_session=True,
            )
        self._follower = threading.Thread(target=self._follow, name="candidate", daemon=True)
        self._follower.start()

    def end(self) -> None:
        """End the process if it still runs, and wait until it has gone; takes a few seconds at most."""
        self._process.terminate()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._follower.join(_END_S)

    def _follow(self) -> None:
        outcome: Outcome | None = None
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                message = _message(line)
                if "step" in message:
                    self._on_progress(str(message["step"]), int(message["percent"]))
                elif message:
                    outcome = Outcome.from_message(message)
        status = self._process.wait()
        outcome = outcome or Outcome(error=self._death(status))
        shutil.rmtree(self._directory, ignore_errors=True)
        self._on_outcome(outcome)

    def _death(self, status: int) -> AgentError:
        words = ""
        with contextlib.suppress(OSError):
            words = self._stderr.read_text(encoding="utf-8", errors="replace").strip().rpartition("\n")[2]
        found = f"the candidate process ended with status {status}" + (f": {words}" if words else "")
        code, remedy = _CAUSES.get(-status, ("recalibration.child", "see the log, try again"))
        return AgentError(code, found, "a process that reports its outcome", remedy)


def _message(line: str) -> dict[str, Any]:
    """A line of the channel; empty for one that was cut short."""
    try:
        message = json.loads(line)
    except ValueError:
        return {}
    return message if isinstance(message, dict) else {}
