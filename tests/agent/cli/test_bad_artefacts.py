"""Calibrations and artefacts that are damaged or none: refused by name before anything is made of them."""

from __future__ import annotations

import json

import pytest
from bench import Bench, build, classifier

from engines.onnxruntime_backend import OnnxRuntimeBackend


def test_a_calibration_of_another_model_is_refused(bench: Bench) -> None:
    spec = bench.spec("twin", classifier(lambda _: "image"))
    said = bench.refuses(*build(bench, spec))
    mine = json.loads((bench / "calibration.json").read_text())["model_sha256"]
    assert said.startswith(f"calibration.model: a calibration of model {mine[:12]}; expected one of twin.onnx, ")


@pytest.mark.parametrize("name", ["manifest.json", "engine.onnx", "calibration.json", "calibration.npz", "plan.json"])
def test_a_damaged_artefact_is_refused_by_name_before_a_runtime_sees_it(
    bench: Bench, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OnnxRuntimeBackend, "load", lambda *_: pytest.fail("the runtime saw it"))
    file = bench / "artefact" / name
    whole = file.read_bytes()
    commands: list[list[object]] = [
        ["infer", bench / "artefact", "--frames", bench / "clip.avi", "-o", bench / "results.jsonl"],
        ["evaluate", bench / "artefact", "--dataset", bench.folder],
    ]
    middle = len(whole) // 2
    for damaged in (whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :], whole[:-1], b""):
        file.write_bytes(damaged)
        for command in commands:
            assert bench.refuses(*command).startswith(f"artefact.damaged: {file} is not what was written")


@pytest.mark.parametrize(
    ("name", "code"), [("nowhere", "config.missing"), (".", "artefact.missing"), ("clip.avi", "config.unreadable")]
)
def test_files_that_are_no_artefact_are_refused(bench: Bench, name: str, code: str) -> None:
    for command in (
        ["infer", bench / name, "--frames", bench / "clip.avi"],
        ["evaluate", bench / name, "--dataset", "x"],
    ):
        assert bench.refuses(*command).startswith(f"{code}: ")
