"""Run a job's child process: start it, follow its lines, pause it, limit its memory, and end it.

Both ends of the pipe are here. The child writes one JSON object per line on its standard output: `{"step", "percent"}`
while it advances, `{"warning"}` for a line of the log, and last its `JobOutcome` (`run_child`). `JobProcess` is the
daemon's end.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import psutil

from agent.common.clock import SYSTEM_CLOCK, Clock
from agent.common.errors import AgentError
from agent.common.state_files import parse_or_none
from agent.validation.verdict import Verdict
from calibrate.errors import TaredError
from engines.trial import START_FOLDER

log = logging.getLogger(__package__)

Emit = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True)
class JobOutcome:
    """The end of a job: an accepted artefact with its verdict, or an error.

    A refusal has the verdict on the first candidate: that a recalibration gains nothing is worth knowing.
    """

    artefact: Path | None = None
    verdict: Verdict | None = None
    error: TaredError | None = None

    def as_message(self) -> dict[str, Any]:
        """Return the child's last line."""
        verdict = self.verdict.as_dict() if self.verdict else None
        if self.error is not None:
            return {"error": self.error.as_dict(), "verdict": verdict}
        return {"artefact": str(self.artefact), "verdict": verdict}

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> JobOutcome:
        """Read the result of `as_message`, on the daemon's side.

        Raises AttributeError, KeyError, TypeError or ValueError for anything else.
        """
        verdict = Verdict.from_dict(message["verdict"]) if message.get("verdict") else None
        if "error" in message:
            if not all(isinstance(words, str) for words in message["error"].values()):
                raise TypeError("an error that is not text")
            return cls(verdict=verdict, error=AgentError(**message["error"]))
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


_FREE_MEMORY = "free memory, add swap, or build with smaller profiles; the engine in service keeps serving"
# Code and remedy by the signal that ended the child. SIGKILL comes from the kernel when memory is short, or a person.
_CAUSES: dict[int, tuple[str, str]] = {
    signal.SIGKILL: ("recalibration.memory", _FREE_MEMORY),
    **dict.fromkeys(
        (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE),
        ("recalibration.crash", "the builder crashed: report the model and the versions of `tared doctor`"),
    ),
}
_TRY_AGAIN = "see the log, then try again"
# Exceptions of parsing a line that is no message of ours.
_NO_MESSAGE = (ArithmeticError, AttributeError, KeyError, TypeError, ValueError)
_END_S = 2.0  # between SIGTERM and SIGKILL
_WATCH_EVERY_S = 0.5
_WEIGH_EVERY = 4  # polls: going through all descendants takes time


def start_background(
    nice: int, module: str, *arguments: str, stdout: int, stderr: int | IO[bytes]
) -> subprocess.Popen[str]:
    """Start a module as a process that gives way to the frame path, see background.py.

    It has its own session. So a Ctrl-C in the terminal reaches the daemon alone, which ends the child itself, and one
    signal reaches all that the child starts. Raises OSError.
    """
    return subprocess.Popen(
        [sys.executable, "-m", "agent.jobs.background", str(nice), str(os.getpid()), module, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
        cwd=START_FOLDER,
    )


@dataclass
class JobProcess:
    """`python -m MODULE DIRECTORY`, niced by background.py; its job has been written to the directory.

    The callbacks are called in a thread of this object's own. An outcome always comes, and comes last, also from a
    process that dies without a word. By then nothing that the process started is running, and the directory is removed.
    The process does not outlive the thread that made this object.

    Args:
        on_progress: Called with step and percent.
        module: Prints lines as `run_child` does.
        nice: Its priority, see background.py.
        memory_bytes: Resident memory that it may take, with all that it starts; None: half of the board's. Beyond, it
            is killed, and the outcome is the error `recalibration.memory`. The address space is not limited, because
            CUDA reserves many times what it uses.

    Raises OSError when no process can be started.
    """

    directory: Path
    on_progress: Callable[[str, int], None]
    on_outcome: Callable[[JobOutcome], None]
    module: str = "agent.jobs.candidate"
    nice: int = 0
    memory_bytes: int | None = None
    clock: Clock = SYSTEM_CLOCK

    def __post_init__(self) -> None:
        self._most_bytes = psutil.virtual_memory().total // 2 if self.memory_bytes is None else self.memory_bytes
        self._over_limit: AgentError | None = None
        self._stderr = self.directory / "stderr"
        self._signals = threading.Lock()  # held while the process id is certain to be this process's
        self._reaped = False
        self._ended = threading.Event()
        with self._stderr.open("wb") as errors:
            directory = str(self.directory.absolute())
            self._process = start_background(self.nice, self.module, directory, stdout=subprocess.PIPE, stderr=errors)
        threading.Thread(target=self._watch, name="candidate-watch", daemon=True).start()
        self._follower = threading.Thread(target=self._follow, name="candidate", daemon=True)
        self._follower.start()

    def pause(self) -> None:
        """Stop it, with all that it started; it keeps its memory."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on; does nothing if it was not paused."""
        self._signal(signal.SIGCONT)

    def end(self) -> None:
        """End the process if it still runs, and wait until it has gone. This takes a few seconds at most."""
        self._signal(signal.SIGTERM)
        self._signal(signal.SIGCONT)  # one that is paused receives SIGTERM only now
        self._follower.join(_END_S)
        if self._follower.is_alive():
            self._signal(signal.SIGKILL)
            self._follower.join(_END_S)

    def _signal(self, number: signal.Signals) -> None:
        """Signal the process and all that it started, unless it has ended: then its id may be another's."""
        with self._signals:
            if not self._reaped:
                os.killpg(self._process.pid, number)

    def _watch(self) -> None:
        """Enforce the memory limit. Once the process has ended, end what it left, which would keep the pipe open."""
        for poll in itertools.count():
            if self.clock.wait(self._ended, _WATCH_EVERY_S):
                return
            if self._has_ended():
                self._signal(signal.SIGKILL)
                return
            if poll % _WEIGH_EVERY:
                continue
            used_bytes = _resident_bytes(self._process.pid)
            if used_bytes > self._most_bytes:
                self._over_limit = AgentError(
                    "recalibration.memory",
                    f"the candidate process took {used_bytes / 2**20:.0f} MiB of memory",
                    f"at most {self._most_bytes / 2**20:.0f} MiB",
                    f"raise recalibration.memory_bytes, or {_FREE_MEMORY}",
                )
                self._signal(signal.SIGKILL)
                return

    def _has_ended(self) -> bool:
        with self._signals:
            return self._reaped or bool(os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG))

    def _follow(self) -> None:
        outcome: JobOutcome | None = None
        try:
            outcome = self._read_messages()
        except _NO_MESSAGE as error:
            self._signal(signal.SIGKILL)
            found = f"a line of the candidate process that cannot be understood: {error!r}"
            outcome = JobOutcome(error=AgentError("recalibration.child", found, "progress or an outcome", _TRY_AGAIN))
        finally:
            status = self._reap()
            outcome = outcome or JobOutcome(error=self._over_limit or self._death(status))
            shutil.rmtree(self.directory, ignore_errors=True)
            self.on_outcome(outcome)

    def _read_messages(self) -> JobOutcome | None:
        """Read all lines; return the outcome, if there is one. Raises one of _NO_MESSAGE."""
        outcome: JobOutcome | None = None
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                message = parse_or_none(partial(json.loads, line))
                if not isinstance(message, dict):  # a line that was cut short
                    continue
                if "step" in message:
                    percent = int(message["percent"])
                    if not 0 <= percent <= 100:
                        raise ValueError(f"{percent} percent")
                    self.on_progress(str(message["step"]), percent)
                elif "warning" in message:
                    log.warning("event=job problem=%r", message["warning"])
                elif message:
                    outcome = JobOutcome.from_message(message)
        return outcome

    def _reap(self) -> int:
        """Wait for the end of the process, and end what it left running; return its status."""
        os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)  # its id stays its own until it is reaped
        self._signal(signal.SIGKILL)
        with self._signals:
            self._reaped = True
            status = self._process.wait()
        self._ended.set()
        return status

    def _death(self, status: int) -> AgentError:
        words = ""
        with contextlib.suppress(OSError):
            words = self._stderr.read_text(encoding="utf-8", errors="replace").strip().rpartition("\n")[2]
        found = f"the candidate process ended with status {status}" + (f": {words}" if words else "")
        code, remedy = _CAUSES.get(-status, ("recalibration.child", _TRY_AGAIN))
        return AgentError(code, found, "a process that reports its outcome", remedy)


def _resident_bytes(pid: int) -> int:
    """Return the memory of a process and all its descendants; pages that they share count more than once.

    What has just ended counts as nothing, and so does what cannot be read for lack of descriptors.
    """
    total = 0
    with contextlib.suppress(psutil.Error, OSError):
        leader = psutil.Process(pid)
        for process in (leader, *leader.children(recursive=True)):
            with contextlib.suppress(psutil.Error, OSError):
                total += process.memory_info().rss
    return total
