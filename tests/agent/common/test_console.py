"""Lines on stderr: in the journal with priorities and without progress, elsewhere without and with."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from turned_clock import TurnedClock
from warm_start import TARED, WarmProcess

from agent.common import console
from agent.common.console import ConsoleHandler, Task, say

SAYING = (
    "import logging; from agent.common.console import set_up_logging; "
    "set_up_logging('debug'); log = logging.getLogger('a'); "
)


def run(arguments: list[str], log: Path, connected: bool, source: str = TARED) -> str:
    """With stderr as systemd leaves it: JOURNAL_STREAM names the file, or one that stderr is not connected with."""
    with log.open("wb") as file, pytest.MonkeyPatch.context() as environment:
        here = os.fstat(file.fileno())
        environment.setenv("JOURNAL_STREAM", f"{here.st_dev}:{here.st_ino + (not connected)}")
        WarmProcess(arguments, stderr=file.fileno(), source=source).wait(120.0)
    return log.read_text()


def say_in(log: Path, source: str) -> list[str]:
    return run([], log, connected=True, source=SAYING + source).splitlines()


def test_plain_progress_is_a_line_every_two_seconds_and_none_in_the_journal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for in_journal, lines in ((False, "serving: 3/100 of a clip\n"), (True, "")):
        monkeypatch.setattr(console, "goes_to_journal", lambda in_journal=in_journal: in_journal)
        clock = TurnedClock()
        task = Task("serving", 100, None, clock)
        task.update(1)
        clock.turn(1.9)
        task.update(2)
        clock.turn(0.2)
        task.update(3, "of a clip")
        assert capsys.readouterr().err == lines


@pytest.mark.parametrize(
    ("call", "priority"),
    [("critical", 2), ("error", 3), ("warning", 4), ("info", 6), ("debug", 7)],
)
def test_levels_are_syslogs_priorities(tmp_path: Path, call: str, priority: int) -> None:
    (line,) = say_in(tmp_path / "log", f"log.{call}('it')")
    assert re.fullmatch(rf"<{priority}>time=\S+Z level={call.upper()} at=a msg=it", line)


def test_a_traceback_is_one_line_with_its_priority(tmp_path: Path) -> None:
    (line,) = say_in(tmp_path / "log", "\ntry:\n    {}[0]\nexcept KeyError:\n    log.exception('it')")
    assert line.startswith("<3>")
    assert 'msg=it exception="Traceback ' in line


def test_the_error_that_ends_a_program_has_the_priority_of_errors(tmp_path: Path) -> None:
    command = ["run", "-c", str(tmp_path / "gone.yaml")]
    assert run(command, tmp_path / "log", connected=True).startswith("<3>error: config.missing: ")
    assert run(command, tmp_path / "log", connected=False).startswith("error: config.missing: ")


def test_a_closed_stderr_is_no_journal() -> None:
    command = f"{sys.executable} -c 'from agent.common.console import goes_to_journal; print(goes_to_journal())' 2>&-"
    environment = {**os.environ, "JOURNAL_STREAM": "1:2"}
    done = subprocess.run(["sh", "-c", command], stdout=subprocess.PIPE, text=True, env=environment, check=True)
    assert done.stdout == "False\n"


def test_a_level_of_ones_own_is_a_notice(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "goes_to_journal", lambda: True)
    ConsoleHandler().emit(logging.LogRecord("a", 25, "", 0, "it", None, None))
    say("and that")
    assert capsys.readouterr().err == "<5>it\n<5>and that\n"
