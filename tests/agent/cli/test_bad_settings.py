"""MODEL.yaml, config.yaml and arguments that cannot be: every error said at once, with its remedy."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
from bench import Bench, build, calibrate
from warm_start import tared
from worlds import SPEC

DETECTOR = {"path": "model.onnx", "task": "detect", "decoder": "yolox"}
CONFIG: dict[str, Any] = {"model": "model.yaml", "camera": {"source": "clip.avi"}, "state_dir": "state"}


def test_all_errors_of_a_model_spec_are_listed_at_once(bench: Bench) -> None:
    wrong = {**SPEC, "task": "guess", "colour": "bgr", "score_threshold": 7, "input": {"std": [0], "pad": "grey"}}
    said = bench.refuses(*calibrate(bench, bench.write("wrong.yaml", wrong)), lines=7)
    assert said.startswith(f"config.invalid: 5 errors in {bench.folder}/wrong.yaml:\n")
    assert [line.split(":")[0] for line in said.splitlines()[1:-1]] == [
        "  task", "  input.pad", "  input.std", "  score_threshold", "  colour",
    ]  # fmt: skip
    assert "  input.pad: expected integer, got 'grey'" in said


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", "config.unreadable"),
        ("model: [unclosed\n", "config.unreadable"),
        ("\x00\x01", "config.unreadable"),
        ("model: nowhere.yaml\ncamera: {source: clip.avi}\n", "config.missing"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(bench: Bench, text: str, code: str) -> None:
    (bench / "config.yaml").write_text(text)
    assert bench.refuses("run", "-c", bench / "config.yaml").startswith(f"{code}: ")


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"camera": {"source": "gone.mp4"}}, "camera.missing"),
        ({"model": DETECTOR, "camera": {"source": "clip.avi", "labels": "model.yaml"}}, "labels.unreadable"),
        ({"state_dir": "model.yaml"}, "state.write"),
        ({"backend": "magic"}, "backend.missing"),
    ],
)
def test_a_daemon_that_cannot_serve_says_why_and_ends(bench: Bench, changes: dict[str, Any], code: str) -> None:
    config = {**CONFIG, "log_level": "error", **changes}
    done = tared("run", "-c", bench.write("config.yaml", config))
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert "Traceback" not in done.stderr
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert said.startswith(f"error: {code}: ")


@pytest.mark.parametrize(
    ("name", "found"),
    [("tensorrt", "no package tensorrt or tensorrt_rtx; expected tensorrt 10.x, "), ("magic", "backend 'magic'; ")],
)
def test_a_missing_runtime_is_refused_by_every_command(
    bench: Bench, name: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    commands: list[list[object]] = [
        calibrate(bench),
        build(bench),
        ["infer", bench / "artefact", "--frames", bench / "clip.avi"],
        ["evaluate", bench / "artefact", "--dataset", bench.folder],
    ]
    for command in commands:
        assert bench.refuses(*command, "--backend", name).startswith(f"backend.missing: {found}")


def test_a_precision_that_the_runtime_lacks_is_refused(bench: Bench) -> None:
    said = bench.refuses(*build(bench, "model.yaml", "--precision", "fp16", "--backend", "onnxruntime"))
    assert said.startswith("backend.precision: precision fp16 on onnxruntime; expected int8 or fp32; ")


def test_int8_without_a_calibration_is_refused(bench: Bench) -> None:
    said = bench.refuses("build", bench / "model.yaml", "--precision", "int8", "-o", bench / "new")
    assert said.startswith("calibration.missing: ")
    assert "tared calibrate" in said


@pytest.mark.parametrize(
    "arguments",
    [
        ["fly"],
        ["calibrate", "m.yaml", "--frames", "x", "-o", "c.json", "--count", "0"],
        ["calibrate", "m.yaml", "--frames", "x", "-o", "c.json", "--count", "many"],
        ["build", "m.yaml", "-o", "a", "--precision", "int4"],
        ["run", "--wings", "2"],
        ["send", "board", "status", "--port", "70000"],
    ],
    ids=" ".join,
)
def test_arguments_that_cannot_be_are_refused_in_one_line(bench: Bench, arguments: list[str]) -> None:
    said = bench.refuses(*arguments)
    assert said.startswith("cli.arguments: ")
    assert "--help'" in said
