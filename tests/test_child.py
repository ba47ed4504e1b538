"""The candidate process seen from the daemon, whatever it prints and however it dies."""

from __future__ import annotations

import os
import queue
import signal
import stat
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from brokers import eventually

from agent.candidate import Outcome
from agent.child import CandidateProcess
from agent.errors import AgentError


class Script:
    """Stands in for the Python interpreter, so that the child is any shell script."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._path = folder / "child.sh"
        self._monkeypatch = monkeypatch
        self.job = folder / "job"
        self.progress: list[tuple[str, int]] = []
        self._outcomes: queue.Queue[Outcome] = queue.Queue()

    def start(self, text: str) -> CandidateProcess:
        self._path.write_text(f"#!/bin/sh\n{text}\n")
        self._path.chmod(self._path.stat().st_mode | stat.S_IXUSR)
        self._monkeypatch.setattr(sys, "executable", str(self._path))
        self.job.mkdir()
        return CandidateProcess(
            self.job, lambda step, percent: self.progress.append((step, percent)), self._outcomes.put
        )

    def outcome(self) -> Outcome:
        outcome = self._outcomes.get(timeout=10.0)
        assert not self.job.exists()
        return outcome


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Script:
    return Script(tmp_path, monkeypatch)


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


@pytest.mark.parametrize(
    ("text", "told", "code"),
    [
        ("exit 3", "status 3", "recalibration.child"),
        ("echo 'first line' >&2; echo 'out of cheese' >&2; exit 1", "status 1: out of cheese", "recalibration.child"),
        ("printf '\\377\\n' >&2; kill -9 $$", "status -9", "recalibration.memory"),
        ("kill -SEGV $$", "status -11", "recalibration.crash"),
        ("kill -ABRT $$", "status -6", "recalibration.crash"),
    ],
)
def test_a_death_without_a_word_is_an_outcome(script: Script, text: str, told: str, code: str) -> None:
    script.start(text)
    error = script.outcome().error
    assert error is not None
    assert error.code == code
    assert told in str(error)


def test_a_child_that_does_not_listen_is_killed(script: Script) -> None:
    process = script.start('trap \'\' TERM; echo \'{"step": "BUILDING", "percent": 50}\'; while :; do sleep 0.1; done')
    while not script.progress:
        os.sched_yield()
    process.end()
    error = script.outcome().error
    assert error is not None
    assert "-9" in error.found


def _works_on(child: psutil.Process, job: Path) -> bool:
    with suppress(psutil.Error):  # one of another test, which has just ended
        return child.cmdline()[-1:] == [str(job)]
    return False


def test_where_memory_runs_out_the_kernel_takes_the_child(tmp_path: Path) -> None:
    """oom_score_adj(5): 1000 makes it the first to go. It is killed here as the kernel does it."""
    job, outcomes = tmp_path / "job", queue.Queue[Outcome]()
    job.mkdir()
    os.mkfifo(job / "job.json")  # nobody writes it: the child waits with its memory untouched
    CandidateProcess(job, lambda *_: None, outcomes.put)
    (child,) = (child for child in psutil.Process().children() if _works_on(child, job))
    score = Path(f"/proc/{child.pid}/oom_score_adj")
    eventually(lambda: score.read_text().strip() == "1000")
    child.send_signal(signal.SIGKILL)
    error = outcomes.get(timeout=10.0).error
    assert error is not None
    assert error.code == "recalibration.memory"
    assert "status -9" in error.found
    assert "swap" in error.remedy
