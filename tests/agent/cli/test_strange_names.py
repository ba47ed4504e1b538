"""Names that would steer a terminal: tensors, nodes, labels, files, folders, through each command that shows them."""

from __future__ import annotations

import io
import re
import shlex
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
from bench import Bench, classifier, picture
from onnx import ModelProto, helper
from places import ROOT
from rich.text import Text

from agent.common.redaction import shown
from agent.common.table import ShownConsole, tabulate
from fleet.cli.main import main

BAD = (
    "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\x08"  # a title, a cleared screen, C1's own sequence, text from right to left
)
SGR = re.compile(r"\x1b\[[\d;]*m")


def strange_model() -> ModelProto:
    """A classifier all of whose names are strange."""
    model = classifier(lambda net: net.conv("image", 3, 3))
    graph = model.graph

    def renamed(name: str) -> str:
        return f"{name}{BAD}" if name else name

    for value in (*graph.input, *graph.output):
        value.name = renamed(value.name)
    for tensor in graph.initializer:
        tensor.name = renamed(tensor.name)
    for node in graph.node:
        node.name = renamed(node.name)
        node.input[:] = [renamed(name) for name in node.input]
        node.output[:] = [renamed(name) for name in node.output]
    model.producer_name = BAD
    helper.set_model_props(model, {"names": str({number: f"{BAD}{number}" for number in range(5)}), "author": BAD})
    return model


def steering(text: str) -> set[str]:
    """By Unicode's own categories, not by the expression of the product."""
    return {char for char in text if unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp")} - {"\n", "\t"}


@pytest.mark.slow
def test_no_command_lets_a_name_steer_the_terminal(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = bench / f"here{BAD}"
    folder.mkdir()
    monkeypatch.chdir(folder)
    Path(f"m{BAD}.onnx").write_bytes(strange_model().SerializeToString())
    for number in range(5):
        bench.images(f"set/{BAD}{number}", picture(40 * number))
    clip, spec, plan = bench / "clip.avi", f"m{BAD}.yaml", f"plan{BAD}.json"
    labelled, absent, odd = bench / "set", f"absent{BAD}", f"odd\udc9b{BAD}"
    backend = ("--backend", "onnxruntime")
    said = ""
    for code, arguments in (
        (0, ("inspect", f"m{BAD}.onnx")),
        (0, ("inspect", f"m{BAD}.onnx", "-o", spec)),
        (0, ("check", spec, "--frames", clip, "-o", f"check{BAD}.png")),
        (0, ("calibrate", spec, "--frames", clip, "-o", f"c{BAD}.json")),
        (
            0,
            (
                "plan",
                spec,
                "--calibration",
                f"c{BAD}.json",
                "--frames",
                clip,
                "--max-loss",
                0.7,
                "--costs",
                "macs",
                "--all",
                "-o",
                plan,
            ),
        ),
        (0, ("plan", plan, "--show")),
        (0, ("plan", plan, "--explain", "*")),
        (0, ("build", spec, "--calibration", f"c{BAD}.json", *backend, "-o", f"engine{BAD}")),
        (0, ("inspect", f"engine{BAD}")),
        (0, ("infer", f"engine{BAD}", "--frames", clip)),
        (0, ("evaluate", f"engine{BAD}", "--dataset", labelled)),
        (0, ("export", f"engine{BAD}", "--to", "onnx", "-o", f"out{BAD}")),
        (0, ("report", f"engine{BAD}", "-o", f"report{BAD}.html")),
        (2, ("inspect", f"engine{BAD}", "--layers")),
        (2, ("infer", absent, "--frames", clip)),
        (2, ("infer", f"engine{BAD}", "--frames", absent)),
        (2, ("evaluate", f"engine{BAD}", "--dataset", absent)),
        (2, ("run", "-c", odd)),
        (2, ("store", "list", "-c", absent)),
        (2, ("config", "--check", absent)),
        (2, (absent,)),
        (2, ("plan", plan, "--explain", absent)),
    ):
        assert main([str(argument) for argument in arguments]) == code, (arguments, bench.captured())
        printed = "".join(bench.captured())
        assert steering(printed) == set(), arguments
        said += printed
    assert said.count(r"\u001b[2J") > 30
    assert r"\u009b31m\u202e\b" in said


def test_a_terminal_gets_our_styles_alone() -> None:
    written = io.StringIO()
    console = ShownConsole(file=written, force_terminal=True, width=200)
    console.print(tabulate(("name", BAD), [(BAD, Text(BAD, "red"))], console.width))
    console.print(Text(BAD, "bold"), BAD, {BAD: [BAD]}, markup=False)
    assert SGR.search(written.getvalue())
    assert steering(SGR.sub("", written.getvalue())) == set()


def test_words_of_every_language_stay_as_they_are() -> None:
    words = "Ärger, 交通, שלום, नमस्ते, می‌خواهم, 👩‍🔧\tb\n"  # with the joiners that some scripts and pictures need
    assert shown(words) == words


def test_a_process_without_stdout_runs_all_the_same() -> None:
    command = "exec >&- 2>&-; exec " + shlex.join(
        [sys.executable, "-c", "from fleet.cli.main import main; main(['--version'])"]
    )
    assert subprocess.run(["sh", "-c", command], cwd=ROOT, timeout=60).returncode == 0
