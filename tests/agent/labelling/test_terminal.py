"""`tared label --terminal` on a pseudo-terminal: pictures in half blocks, and a line for each label."""

from __future__ import annotations

import codecs
import json
import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from label_bench import LabelBench
from places import ROOT

from agent.common.errors import AgentError
from agent.labelling.terminal import parse_boxes
from agent.labelling.truth import parse_class
from agent.vision.detections import NO_BOXES
from fleet.cli.main import main

_LIMIT_S = 60.0
STEERING = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class Typist:
    """Types into the command, and reads what its terminal shows."""

    def __init__(self, terminal: int) -> None:
        self._terminal = terminal
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._unread = ""

    def read(self, words: str = "> ") -> str:
        """Read up to these words."""
        give_up_s = time.monotonic() + _LIMIT_S
        while words not in self._unread:
            assert time.monotonic() < give_up_s, self._unread
            self._unread += self._decoder.decode(os.read(self._terminal, 65536))
        read, _, self._unread = self._unread.partition(words)
        return read

    def type(self, line: str) -> str:
        """Type a line; return what is shown until the next prompt."""
        os.write(self._terminal, f"{line}\n".encode())
        return self.read()


@contextmanager
def labelling(bench: LabelBench) -> Iterator[Typist]:
    """The command on a terminal of 80 x 40; it has to end well."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "fleet.cli", "label", "--terminal", "-c", str(bench.config)]
    environment = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor", "COLUMNS": "80", "LINES": "40"}
    process = subprocess.Popen(command, cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    with process:
        try:
            yield Typist(ours)
            assert process.wait(_LIMIT_S) == 0
        finally:
            process.kill()
            os.close(ours)


def test_boxes_are_numbered_chosen_and_added(tmp_path: Path) -> None:
    bench = LabelBench(tmp_path, "detect", 4)
    with labelling(bench) as typist:
        picture = typist.read()
        assert re.search("\x1b\\[[0-9;]*48;2;[0-9;]*m\u2580", picture)
        text = STEERING.sub("", picture)
        assert re.findall(r"^  (\d) (\S+) ([\d ]+)\r$", text, re.M) == [
            ("1", "cat", "40 30 100 90"), ("2", "bus", "2 2 20 20"), ("3", "dog", "40 30 100 90"),
        ]  # fmt: skip  # the engines agree about the bus
        assert "0 of 4: frame 1, camera gate, 160 x 120 pixels" in text
        assert "'9'; expected numbers from 1 to 3" in typist.type("9")
        assert "did you mean dog" in typist.type("1 +dgo 1 2 3 4")
        assert "1 of 4: frame 2" in typist.type("3 2 +traffic light 10 20 110 200")
        assert "2 of 4: frame 3" in typist.type("0")
        assert "so far: nothing there" in typist.type("b")
        assert "2 of 4: frame 3" in typist.type("1,3")
        assert "3 of 4: frame 4" in typist.type("s")
        typist.type("")
        os.write(typist._terminal, b"q\n")
        assert "waiting" in typist.read("gate")
    assert bench.labels() == [
        [[1, 40, 30, 100, 90], [3, 2, 2, 20, 20], [2, 10, 20, 110, 120]],
        [[0, 40, 30, 100, 90], [1, 40, 30, 100, 90]],
        "skipped",
        None,
    ]
    assert [frame.suggested for frame in bench.store.frames()] == [True, True, False, False]


def test_classes_by_name_and_number_from_a_pipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    bench = LabelBench(tmp_path, "classify", 3)
    lines = tmp_path / "lines"
    lines.write_text("Traffic Light\n4\nsnake\n")
    with lines.open() as given:
        monkeypatch.setattr(sys, "stdin", given)
        assert main(["label", "--terminal", "--json", "-c", str(bench.config)]) == 0
    printed = capfd.readouterr()
    assert "class 'snake'; expected a class of the model: cat, dog" in printed.err
    assert json.loads(printed.out)["labelled"] == 2
    assert bench.labels() == [2, 4, None]
    assert not any(frame.suggested for frame in bench.store.frames())


@pytest.mark.parametrize("reply", ["", "0 1", "-1", "1 1 x", "+cat 1 2 3", "+cat 5 5 5 9", "1e3", "+ 1 2 3 4"])
def test_a_line_that_says_nothing_is_asked_again(reply: str) -> None:
    with pytest.raises(AgentError, match=r"labelling\.label"):
        parse_boxes(reply, NO_BOXES, (100, 100), ("cat",))


def test_a_class_is_its_name_before_it_is_a_number() -> None:
    assert parse_class("3", ("5", "3", "1")) == 1
    assert parse_class("2", ("5", "3", "1")) == 2
    assert parse_class("7", ()) == 7
