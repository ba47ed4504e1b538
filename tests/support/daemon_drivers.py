"""Python that a daemon's process runs before it starts: kill itself or its child, fail, have its clock set.

Each is put before the program of `test_memory_daemon`. Nothing in the product knows of it.
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

from agent.models.model_watch import ModelWatch

ModelWatch.__init__.__defaults__ = (0.2,)  # seconds between two looks


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
    if {first}:
        children.subprocess = subprocess
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

_CLOCK = """
import time

true_time, ahead_s = time.time, 0.0
time.time = lambda: true_time() + ahead_s


def jumping(state, _trigger, write):
    global ahead_s
    write()
    if state == {state!r}:
        ahead_s = {ahead_s!r}


around_writes(jumping)
"""

_REFUSED_WRITE = """
import sqlite3, types

from agent.common import database

refused = []


def connect(*_, **__):
    raise sqlite3.OperationalError("disk I/O error")


def refusing(state, _trigger, write):
    if state != {state!r} or refused:
        return write()
    refused.append(state)
    database.sqlite3 = types.SimpleNamespace(**{{**vars(sqlite3), "connect": connect}})
    try:
        write()
    finally:
        database.sqlite3 = sqlite3


around_writes(refusing)
"""

_ONCE = """
import errno, subprocess, threading, types

from agent.jobs import child_process as child, recalibration
from agent.common.errors import AgentError
from agent.jobs.headroom import Headroom
from agent.control import operations
from engines.errors import EngineError
from engines.store.artefact import Store
from engines.store.retention import StoreCleaner

child.subprocess = types.SimpleNamespace(**vars(subprocess))
child.threading = types.SimpleNamespace(**vars(threading))


def once(owner, name, instead):
    true = getattr(owner, name)

    def first(*words, **more):
        setattr(owner, name, true)
        if isinstance(instead, Exception):
            raise instead
        return instead(true, *words, **more)

    setattr(owner, name, first)


"""

_OTHER_RUNTIME = f"""
from engines.registry import open_backend

runtime = type(open_backend({RUNTIME!r}))
describe = runtime.describe
runtime.describe = lambda backend: {{**describe(backend), "runtime": "another"}}
"""

# By name: what fails once in the daemon, as arguments of `once`.
DAEMON_FAULTS = {
    "write_job": "recalibration, 'write_job', OSError(errno.ENOSPC, 'No space left on device')",
    "popen": "child.subprocess, 'Popen', OSError(errno.EAGAIN, 'Resource temporarily unavailable')",
    "room": "StoreCleaner, 'ensure_room', EngineError('store.room', 'none', 'some', 'make some')",
    "delay": "Headroom, 'reason_to_wait', AgentError('headroom.delay', 'hot', 'cool', 'cool it')",
    "pause": "Headroom, 'reason_to_pause', AgentError('headroom.pause', 'hot', 'cool', 'cool it')",
    "memory": "recalibration, 'JobProcess', lambda true, *words, **_: true(*words[:3], memory_bytes=1)",
    "timeout": "recalibration, 'SupervisedChild', lambda true, *words: true(*words[:-1], 0.0)",
    "candidate": "operations, 'read_artefact', EngineError('artefact.damaged', 'a damaged one', 'a whole one', 'none')",
    "promote": "Store, 'promote', EngineError('store.write', 'No space left on device', 'room', 'make some')",
}

# By name: what the daemon's first child does.
CHILD_FAULTS = {
    "traceback": "from agent.models import model\n\nmodel.calibrate = lambda *_: {}[0]",
    "calibration": """
from agent.models import model
from calibrate.errors import CalibrationError


def calibrate(*_):
    raise CalibrationError("calibration.empty", "nothing", "something", "none")


model.calibrate = calibrate
""",
    "builder": """
from agent.models import build
from engines.errors import EngineError


def build_artefact(*_, **__):
    raise EngineError("engine.build", "a builder that fails", "one that builds", "none")


build.build_artefact = build_artefact
""",
    "judge": """
from agent.validation.verdict import Judge


def judge(*_, **__):
    raise ValueError("a judge that fails")


Judge.__call__ = judge
""",
}


def at_write(moment: str, state: str, trigger: str, number: int = signal.SIGKILL) -> str:
    """Sends itself the signal right before, or right after, a job's state is journaled."""
    return _AROUND_WRITES + _AT_WRITE.format(moment=moment, state=state, trigger=trigger, number=int(number))


def in_child(source: str, first: bool) -> str:
    """Each child runs this before it begins, or the first one alone."""
    return _IN_CHILD.format(source=source + _GO_ON, first=first)


def child_killed(moment: str, step: str) -> str:
    """Each child kills itself right before, or right after, it reports a step; OUTCOME is its last line."""
    return in_child(_KILL_CHILD.format(moment=moment, step=step), first=False)


def clock_jumps(state: str, ahead_s: float) -> str:
    """From when a job is first in this state on, the wall clock is ahead by so much."""
    return _AROUND_WRITES + _CLOCK.format(state=state, ahead_s=ahead_s)


def write_refused(state: str) -> str:
    """The journal's disk fails once, when a job is to be in this state."""
    return _AROUND_WRITES + _REFUSED_WRITE.format(state=state)


def other_runtime() -> str:
    """The runtime is another one than the engines in the store were built for."""
    return _OTHER_RUNTIME + in_child(_OTHER_RUNTIME, first=False)


def failing(name: str) -> str:
    """Once, as DAEMON_FAULTS or CHILD_FAULTS has it."""
    if name in CHILD_FAULTS:
        return in_child(CHILD_FAULTS[name], first=True)
    return f"{_ONCE}once({DAEMON_FAULTS[name]})\n"
