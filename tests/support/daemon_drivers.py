"""Python that a daemon's process runs before it starts: kill itself or its child, or another runtime.

Each is put before `PLAYER` of `daemon_life`. Nothing in the product knows of it.
"""

from __future__ import annotations

import signal

from runtime_under_test import RUNTIME

# around_writes(around): each write of a job's state is done by around(state, trigger, write) instead.
_AROUND_WRITES = """
from agent.jobs.job import JobJournal


def around_writes(around):
    start, enter = JobJournal.start, JobJournal.enter

    def starting(journal, job, trigger, *more):
        around("REQUESTED", trigger, lambda: start(journal, job, trigger, *more))

    def entering(journal, job, state, **more):
        trigger = next(each.trigger for each in journal.records() if each.id == job)
        around(state.value, trigger, lambda: enter(journal, job, state, **more))

    JobJournal.start, JobJournal.enter = starting, entering


"""

_AT_WRITE = """
import os, signal

from agent.models import model_watch

model_watch.POLL_S = 0.2


def dying(state, trigger, write):
    here = (state, trigger) == ({state!r}, {trigger!r})
    if here and {moment!r} == "before":
        os.kill(os.getpid(), {number})
    write()
    if here and {moment!r} == "after":
        os.kill(os.getpid(), {number})


around_writes(dying)
"""

# A child runs this before its work; "-m" lets a next daemon know it for a job's.
_IN_CHILD = """
import subprocess, types

from agent.jobs import child_process as children


def start(command, **more):
    python, *rest = command
    return subprocess.Popen([python, "-c", {source!r}, *rest], **more)


children.subprocess = types.SimpleNamespace(**{{**vars(subprocess), "Popen": start}})
"""

_GO_ON = """
import runpy, sys

sys.argv.pop(1)
module = sys.argv.pop(1)
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""

_KILL_CHILD = """
import json, os, signal, types

from agent.jobs import child_process as child_main


class Channel:
    def __init__(self, file):
        self.file, self.here = file, False

    def write(self, line):
        self.here = json.loads(line).get("step", "OUTCOME") == {step!r}
        if self.here and {moment!r} == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        self.file.write(line)

    def flush(self):
        self.file.flush()
        if self.here:
            os.kill(os.getpid(), signal.SIGKILL)


def fdopen(*words, **more):
    return Channel(os.fdopen(*words, **more))


child_main.os = types.SimpleNamespace(**{{**vars(os), "fdopen": fdopen}})
"""

_OTHER_RUNTIME = f"""
from engines.registry import open_backend

runtime = type(open_backend({RUNTIME!r}))
describe = runtime.describe
runtime.describe = lambda backend: {{**describe(backend), "runtime": "another"}}
"""


def at_write(moment: str, state: str, trigger: str, number: int = signal.SIGKILL) -> str:
    """Sends itself the signal right before, or right after, a job's state is journaled."""
    return _AROUND_WRITES + _AT_WRITE.format(moment=moment, state=state, trigger=trigger, number=int(number))


def in_child(source: str) -> str:
    """Each child runs this before it begins."""
    return _IN_CHILD.format(source=source + _GO_ON)


def child_killed(moment: str, step: str) -> str:
    """Each child kills itself right before, or right after, it reports a step; OUTCOME is its last line."""
    return in_child(_KILL_CHILD.format(moment=moment, step=step))


def other_runtime() -> str:
    """The runtime is another one than the engines in the store were built for."""
    return _OTHER_RUNTIME + in_child(_OTHER_RUNTIME)
