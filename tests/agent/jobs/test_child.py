"""The candidate process seen from the daemon, whatever it prints and however it dies."""

from __future__ import annotations

import json
import os
import queue
import stat
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from brokers import eventually

from agent.common.errors import AgentError
from agent.jobs import child_process
from agent.jobs.child_process import JobOutcome, JobProcess

_STARTED = """echo '{"step": "BUILDING", "percent": 50}'"""
_BUSY = f"{_STARTED}; while :; do :; done"


class Script:
    """Stands in for the Python interpreter, so that the child is any shell script."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._path = folder / "child.sh"
        self._monkeypatch = monkeypatch
        self.job = folder / "job"
        self.progress: list[tuple[str, int]] = []
        self._outcomes: queue.Queue[JobOutcome] = queue.Queue()

    def start(self, text: str, memory_bytes: int | None = None) -> JobProcess:
        self._path.write_text(f"#!/bin/sh\n{text}\n")
        self._path.chmod(self._path.stat().st_mode | stat.S_IXUSR)
        self._monkeypatch.setattr(sys, "executable", str(self._path))
        self.job.mkdir()
        return JobProcess(
            self.job,
            lambda step, percent: self.progress.append((step, percent)),
            self._outcomes.put,
            memory_bytes=memory_bytes,
        )

    def process(self) -> psutil.Process:
        """The process itself, once its script runs and said so by its first progress."""
        eventually(lambda: bool(self.progress))
        return _child_on(self.job)

    def outcome(self) -> JobOutcome:
        outcome = self._outcomes.get(timeout=60.0)
        assert not self.job.exists()
        return outcome


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Script:
    return Script(tmp_path, monkeypatch)


def test_a_child_that_searches_nothing_imports_no_scipy() -> None:
    """36 MiB of a board's memory, and half a second of each job."""
    source = "import sys, agent.jobs.candidate; assert 'scipy' not in sys.modules"
    subprocess.run([sys.executable, "-c", source], check=True, timeout=60)


def test_lines_that_are_no_messages_are_passed_over(script: Script) -> None:
    script.start(
        """echo 'a library says hello'; echo '[1, 2]'; printf '\\377\\376\\n'
echo '{"step": "BUILDING", "percent": 50}'
echo '{"error": {"code": "engine.graph", "found": "f", "expected": "e", "remedy": "r"}}'
printf '{"step": "BUIL'"""
    )
    error = script.outcome().error
    assert script.progress == [("BUILDING", 50)]
    assert isinstance(error, AgentError)
    assert (error.code, error.found, error.expected, error.remedy) == ("engine.graph", "f", "e", "r")


def test_a_warning_of_the_child_is_logged(script: Script, caplog: pytest.LogCaptureFixture) -> None:
    script.start("""echo '{"warning": "a file is damaged"}'; echo '{"artefact": "a", "verdict": null}'""")
    assert script.outcome().artefact == Path("a")
    assert "problem='a file is damaged'" in caplog.text


@pytest.mark.parametrize(
    ("text", "words", "code"),
    [
        ("exit 3", "status 3", "recalibration.child"),
        ("echo 'first line' >&2; echo 'out of cheese' >&2; exit 1", "status 1: out of cheese", "recalibration.child"),
        ("printf '\\377\\n' >&2; kill -9 $$", "status -9", "recalibration.memory"),
        ("kill -SEGV $$", "status -11", "recalibration.crash"),
        ("kill -ABRT $$", "status -6", "recalibration.crash"),
    ],
)
def test_a_death_without_a_word_is_an_outcome(script: Script, text: str, words: str, code: str) -> None:
    script.start(text)
    error = script.outcome().error
    assert error is not None
    assert error.code == code
    assert words in str(error)


def test_a_child_that_ignores_sigterm_is_killed(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "_END_S", 0.2)
    process = script.start(f"trap '' TERM; {_STARTED}; while :; do sleep 0.1; done")
    script.process()
    process.end()
    error = script.outcome().error
    assert error is not None
    assert "-9" in error.found


def _child_on(job: Path) -> psutil.Process:
    """The child that works on a job. Of one that has just become another program the kernel shows no arguments."""
    found: list[psutil.Process] = []

    def is_there() -> bool:
        found[:] = (child for child in psutil.Process().children() if _works_on(child, job))
        return bool(found)

    eventually(is_there)
    (child,) = found
    return child


def _works_on(child: psutil.Process, job: Path) -> bool:
    with suppress(psutil.Error):  # one of another test, which has just ended
        return child.cmdline()[-1:] == [str(job)]
    return False


@pytest.mark.parametrize(
    "line",
    [
        '{"step": "BUILDING"}',
        '{"step": "BUILDING", "percent": 101}',
        '{"step": "BUILDING", "percent": 1e999}',
        '{"hello": "world"}',
        '{"artefact": "a", "verdict": [1]}',
        '{"error": {"code": 1, "found": "f", "expected": "e", "remedy": "r"}}',
    ],
)
def test_a_line_that_cannot_be_understood_ends_the_child_and_is_its_outcome(script: Script, line: str) -> None:
    child = script.start(f"{_STARTED}; echo '{line}'; exec sleep 1000")
    error = script.outcome().error
    assert error is not None
    assert error.code == "recalibration.child"
    assert "cannot be understood" in error.found
    child.end()  # it is gone, and reaped
    assert not any(_works_on(each, script.job) for each in psutil.Process().children())


def _is_gone(process: psutil.Process) -> bool:
    """Return whether it ended; its new parent may not have noticed yet."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_the_childs_own_children_are_paused_too(script: Script) -> None:
    child = script.start(f"(while :; do :; done) & {_STARTED}; wait")
    (started,) = script.process().children()
    child.pause()
    eventually(lambda: started.status() == psutil.STATUS_STOPPED)
    child.resume()
    eventually(lambda: started.status() != psutil.STATUS_STOPPED)
    child.end()
    script.outcome()


def test_a_paused_process_can_be_ended(script: Script) -> None:
    child = script.start(_BUSY)
    process = script.process()
    child.pause()
    eventually(lambda: process.status() == psutil.STATUS_STOPPED)
    child.end()
    assert "-15" in str(script.outcome().error)  # it took SIGTERM, and was not killed
    child.pause()
    child.resume()
    child.end()  # nothing happens to a process that is over


@pytest.mark.parametrize("start", ["exec", ""])
def test_more_memory_than_allowed(script: Script, start: str) -> None:
    """By the process itself, and by one that it starts."""
    hungry = "import time; taken = bytearray(b'x') * (300 << 20); time.sleep(60)"
    script.start(f'{_STARTED}; {start} {sys.executable} -c "{hungry}"; wait', memory_bytes=200 << 20)
    error = script.outcome().error
    assert error is not None
    assert error.code == "recalibration.memory"
    assert error.expected == "at most 200 MiB"
    assert int(error.found.split()[-4]) > 200
    assert "recalibration.memory_bytes" in error.remedy


def test_the_childs_own_children_end_with_it(script: Script) -> None:
    """Not even where one keeps the pipe open, which would hide the end of the process."""
    script.start(f"sleep 1000 & {_STARTED}; wait")
    process = script.process()
    (left,) = process.children()
    process.kill()
    assert "status -9" in str(script.outcome().error)
    eventually(lambda: _is_gone(left))


_FACTS = """
import json, pathlib, psutil, sys
me = psutil.Process()
facts = {"argv": sys.argv[1:], "nice": me.nice(),
         "idle_io": me.ionice().ioclass == psutil.IOPRIO_CLASS_IDLE,
         "oom": pathlib.Path("/proc/self/oom_score_adj").read_text().strip(),
         "group": group.read_text().split()[-1] if (group := pathlib.Path("/proc/self/autogroup")).exists() else ""}
print(json.dumps({"error": {"code": "facts", "found": json.dumps(facts), "expected": "e", "remedy": "r"}}))
"""


def test_the_child_gives_way_before_its_module_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "facts.py").write_text(_FACTS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((os.environ.get("PYTHONPATH", ""), str(tmp_path))))
    job, outcomes = tmp_path / "job", queue.Queue[JobOutcome]()
    job.mkdir()
    JobProcess(job, lambda *_: None, outcomes.put, module="facts", nice=12)
    error = outcomes.get(timeout=60.0).error
    assert error is not None
    nice = max(12, os.getpriority(os.PRIO_PROCESS, 0))
    assert json.loads(error.found) == {
        "argv": [str(job)],
        "nice": nice,
        "idle_io": True,
        "oom": "1000",
        "group": str(nice) if Path("/proc/self/autogroup").exists() else "",
    }


_DAEMON = """
import pathlib, sys, threading
from agent.jobs.child_process import JobProcess
child = JobProcess(pathlib.Path(sys.argv[1]), lambda *_: print("ready", flush=True), print, module="sleeper")
threading.Event().wait()
"""


def test_the_child_ends_with_a_daemon_that_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while it is paused, when it could not notice by itself."""
    (tmp_path / "sleeper.py").write_text(
        'import time; print(\'{"step": "A", "percent": 1}\', flush=True); time.sleep(999)'
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((os.environ.get("PYTHONPATH", ""), str(tmp_path))))
    job = tmp_path / "job"
    job.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", _DAEMON, str(job)], stdout=subprocess.PIPE, encoding="utf-8"
    ) as daemon:
        assert daemon.stdout is not None
        assert daemon.stdout.readline() == "ready\n"
        (child,) = psutil.Process(daemon.pid).children()
        child.suspend()
        daemon.kill()
    eventually(lambda: _is_gone(child))
