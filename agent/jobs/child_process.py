"""A child process seen from the daemon: started, followed line by line, paused, limited, ended."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from agent.common.errors import AgentError
from agent.jobs.child_protocol import JobOutcome

_FREE_MEMORY = "free memory, add swap, or build with smaller profiles; what serves goes on"
# By the signal that ended it. SIGKILL comes from the kernel when memory is short, or from a person.
_CAUSES: dict[int, tuple[str, str]] = {
    signal.SIGKILL: ("recalibration.memory", _FREE_MEMORY),
    **dict.fromkeys(
        (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE),
        ("recalibration.crash", "the builder crashed: report the model and the versions of `tared doctor`"),
    ),
}
_TRY_AGAIN = "see the log, try again"
_NONSENSE = (
    ArithmeticError,
    AttributeError,
    KeyError,
    TypeError,
    ValueError,
)  # what a message raises that is none of ours
_END_S = 2.0  # for a process that was asked to end; then it is killed
_WATCH_EVERY_S = 0.5
_WEIGH_EVERY = 4  # looks: going through all descendants takes time
_NICE = 10


class JobProcess:
    """`python -m MODULE DIRECTORY`, whose job has been written there; the directory goes with it.

    module: prints lines as candidate.py does. nice: its priority, see background.py. memory_bytes: resident memory
    that it may take, with all that it starts; None: half of the board's. Beyond, it is killed, and the outcome is
    the error `recalibration.memory`. No limit on its address space: CUDA reserves many times what it uses.

    on_progress(step, percent) and on_outcome(outcome) are called in a thread of this object's own. An outcome always
    comes, and last, also from a process that dies without a word; nothing that it started runs on then. It does not
    outlive the thread that made this object.
    """

    def __init__(
        self,
        directory: Path,
        on_progress: Callable[[str, int], None],
        on_outcome: Callable[[JobOutcome], None],
        module: str = "agent.jobs.candidate",
        nice: int = _NICE,
        memory_bytes: int | None = None,
    ) -> None:
        """Raises OSError when no process can be started, or no thread to follow it."""
        self._directory = directory
        self._on_progress = on_progress
        self._on_outcome = on_outcome
        self._memory_bytes = psutil.virtual_memory().total // 2 if memory_bytes is None else memory_bytes
        self._over_limit: AgentError | None = None
        self._stderr = directory / "stderr"
        self._signals = threading.Lock()  # held while the process id is certain to be this process's
        self._reaped = False
        self._ended = threading.Event()
        with self._stderr.open("wb") as errors:
            # Its own session: a Ctrl-C in the terminal is for the daemon, which ends the child itself; and one signal
            # reaches all that it starts.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "agent.jobs.background", str(nice), str(os.getpid()), module, str(directory)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                encoding="utf-8",
                errors="replace",
                start_new_session=True,
            )
        try:
            threading.Thread(target=self._watch, name="candidate-watch", daemon=True).start()
            self._follower = threading.Thread(target=self._follow, name="candidate", daemon=True)
            self._follower.start()
        except RuntimeError as error:  # as the interpreter has it where the kernel refuses one more
            self._reap_unfollowed()
            raise OSError(errno.EAGAIN, str(error)) from error

    def pause(self) -> None:
        """Let it stand still, with all that it started; it keeps its memory."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on; nothing where it was not paused."""
        self._signal(signal.SIGCONT)

    def end(self) -> None:
        """End the process if it still runs, and wait until it has gone; takes a few seconds at most."""
        self._signal(signal.SIGTERM)
        self._signal(signal.SIGCONT)  # one that is paused hears of its end only now
        self._follower.join(_END_S)
        if self._follower.is_alive():
            self._signal(signal.SIGKILL)
            self._follower.join(_END_S)

    def _signal(self, number: signal.Signals) -> None:
        """To the process and all that it started, unless it is over: then its id may be another's."""
        with self._signals:
            if not self._reaped:
                os.killpg(self._process.pid, number)

    def _watch(self) -> None:
        """Enforce the memory limit; once the process is over, end what it left: that would keep the pipe open."""
        for look in itertools.count():
            if self._ended.wait(_WATCH_EVERY_S):
                return
            if self._over():
                self._signal(signal.SIGKILL)
                return
            if look % _WEIGH_EVERY:
                continue
            used_bytes = _resident_bytes(self._process.pid)
            if used_bytes > self._memory_bytes:
                self._over_limit = AgentError(
                    "recalibration.memory",
                    f"the candidate process took {used_bytes / 2**20:.0f} MiB of memory",
                    f"at most {self._memory_bytes / 2**20:.0f} MiB",
                    f"raise recalibration.memory_bytes, or {_FREE_MEMORY}",
                )
                self._signal(signal.SIGKILL)
                return

    def _over(self) -> bool:
        with self._signals:
            return self._reaped or bool(os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG))

    def _follow(self) -> None:
        outcome: JobOutcome | None = None
        try:
            outcome = self._listen()
        except _NONSENSE as error:
            self._signal(signal.SIGKILL)
            found = f"a line of the candidate process that cannot be understood: {error!r}"
            outcome = JobOutcome(error=AgentError("recalibration.child", found, "progress, or an outcome", _TRY_AGAIN))
        finally:
            status = self._reap()
            outcome = outcome or JobOutcome(error=self._over_limit or self._death(status))
            shutil.rmtree(self._directory, ignore_errors=True)
            self._on_outcome(outcome)

    def _listen(self) -> JobOutcome | None:
        """What the process says last, if anything. Raises one of _NONSENSE."""
        outcome: JobOutcome | None = None
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                message = _message(line)
                if "step" in message:
                    percent = int(message["percent"])
                    if not 0 <= percent <= 100:
                        raise ValueError(f"{percent} percent")
                    self._on_progress(str(message["step"]), percent)
                elif message:
                    outcome = JobOutcome.from_message(message)
        return outcome

    def _reap(self) -> int:
        """Wait for the process's end; what it left running goes with it."""
        os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)  # its id stays its own until it is reaped
        self._signal(signal.SIGKILL)
        with self._signals:
            self._reaped = True
            status = self._process.wait()
        self._ended.set()
        return status

    def _reap_unfollowed(self) -> None:
        """End the process that nobody would follow."""
        self._signal(signal.SIGKILL)
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._reap()

    def _death(self, status: int) -> AgentError:
        words = ""
        with contextlib.suppress(OSError):
            words = self._stderr.read_text(encoding="utf-8", errors="replace").strip().rpartition("\n")[2]
        found = f"the candidate process ended with status {status}" + (f": {words}" if words else "")
        code, remedy = _CAUSES.get(-status, ("recalibration.child", _TRY_AGAIN))
        return AgentError(code, found, "a process that reports its outcome", remedy)


def _resident_bytes(pid: int) -> int:
    """Of a process and all its descendants; pages that they share count more than once."""
    total = 0
    with contextlib.suppress(psutil.Error):  # it has just ended, or a descendant has
        leader = psutil.Process(pid)
        for process in (leader, *leader.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                total += process.memory_info().rss
    return total


def _message(line: str) -> dict[str, Any]:
    """A line of the channel; empty for one that was cut short."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return message if isinstance(message, dict) else {}
