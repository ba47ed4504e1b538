"""The state of a board in a test: opened as by one more process, looked at beside it, and spoilt."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

from unexpected import unexpected

from agent.common.errors import AgentError
from agent.jobs.job import JobJournal, JobRecord
from agent.state.store import FILE, StateStore


def kept_in(folder: Path, on_error: Callable[[AgentError], None] = unexpected) -> StateStore:
    """Open the state in a folder, as the next process does."""
    state = StateStore(folder)
    state.report_to(on_error)
    return state


def spoil(folder: Path, statement: str, *values: object) -> None:
    """Change a row behind the back of those who keep it."""
    with closing(sqlite3.connect(folder / FILE)) as db, db:
        db.execute(statement, values)


@contextmanager
def refusing(state: StateStore) -> Iterator[None]:
    """Let another process keep the file to itself, so that it can neither be read nor written."""
    state._file = replace(state._file, patience_s=0.0)
    with closing(sqlite3.connect(state.path, isolation_level=None)) as db:
        db.execute("BEGIN EXCLUSIVE")
        yield


def records_in(folder: Path) -> Sequence[JobRecord]:
    """Return the jobs in the journal of a daemon that may run beside."""
    return JobJournal(StateStore.copy_of(folder, ["jobs"])).records()


# Counts what changes the disk or a file's content, and dies before the call of that number.
_KILLED = """
import os, signal, sqlite3, sys
from pathlib import Path
left = int(sys.argv[2])
def step():
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
class Counted(sqlite3.Connection):
    def execute(self, statement, *values):
        step()
        return super().execute(statement, *values)
connect = sqlite3.connect
sqlite3.connect = lambda *given, **more: connect(*given, factory=Counted, **more)
def before(function):
    def counted(*given, **more):
        step()
        return function(*given, **more)
    return counted
for name in ("replace", "link", "rename", "unlink", "fsync"):
    setattr(os, name, before(getattr(os, name)))
from agent.state.store import StateStore
StateStore(Path(sys.argv[1]))
"""


def open_until(folder: Path, step: int) -> bool:
    """Open the state in a process that is killed before a step; return whether it came that far."""
    done = subprocess.run([sys.executable, "-c", _KILLED, str(folder), str(step)], check=False, timeout=60.0)
    assert done.returncode in (0, -signal.SIGKILL)
    return done.returncode != 0
