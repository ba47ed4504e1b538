"""`tared label --list`: how far the labels are, and what they come to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from label_bench import LabelBench

from fleet.cli.main import main


def test_progress_and_accuracy_by_camera_and_regime(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The engines served dog and meant cat; labels behind the first that waits do not count."""
    bench = LabelBench(tmp_path, "classify", 24)
    bench.draw(24, camera="yard")
    command = ["label", "--list", "-c", str(bench.config)]
    assert main([*command, "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["accuracy"] is None, "as on a new board"
    bench.store.label_all({**dict.fromkeys(range(1, 16), 0), **dict.fromkeys(range(16, 21), 1), 23: 1, 24: 1})
    bench.store.skip(21)
    assert main([*command, "--json"]) == 0
    listed = json.loads(capfd.readouterr().out)
    assert [listed[key] for key in ("drawn", "labelled", "skipped", "waiting")] == [25, 22, 1, 2]
    gate, yard = listed["cells"]
    assert (gate["camera"], gate["regime"], gate["waiting"], yard["waiting"]) == ("gate", "a1b2", 1, 1)
    overall = listed["accuracy"]["overall"]
    assert listed["accuracy"]["labels"] == 20
    assert (overall["accuracy"]["estimate"], overall["reference"]["estimate"]) == (0.25, 0.75)
    assert overall["reference"]["low"] < 0.75 < overall["reference"]["high"]
    assert main(command) == 0
    lines = [" ".join(line.split()) for line in capfd.readouterr().out.splitlines()]
    assert lines[:4] == [
        "camera regime drawn labelled skipped waiting", "gate a1b2 24 22 1 1", "yard a1b2 1 0 0 1", "all 25 22 1 2",
    ]  # fmt: skip
    assert any(line.startswith("all 20 0.250 [") for line in lines)
