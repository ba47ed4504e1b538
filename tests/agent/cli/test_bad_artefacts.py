"""Calibrations and artefacts that are damaged or none: refused by name before anything is made of them."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from bench import Bench, build, calibrate, classifier

from engines.onnxruntime_backend import OnnxRuntimeBackend
from engines.store.signing import seal


def test_a_calibration_of_another_model_is_refused(bench: Bench) -> None:
    spec = bench.spec("twin", classifier(lambda _: "image"))
    said = bench.refuses(*build(bench, spec))
    mine = json.loads((bench / "calibration.json").read_text())["model_sha256"]
    assert said.startswith(f"calibration.model: a calibration of model {mine[:12]}; expected one of twin.onnx, ")


@pytest.mark.parametrize("name", ["calibration.json", "calibration.npz"])
@pytest.mark.parametrize(
    "damage",
    [lambda whole: whole[: len(whole) // 2], lambda _: b"", lambda _: b"text\n" * 99, None],
    ids=["cut", "empty", "text", "missing"],
)
def test_a_damaged_calibration_is_refused(bench: Bench, name: str, damage: Callable[[bytes], bytes] | None) -> None:
    whole = (bench / name).read_bytes()
    (bench / name).unlink()
    if damage is not None:
        (bench / name).write_bytes(damage(whole))
    assert bench.refuses(*build(bench)).startswith(f"calibration.unreadable: {bench.folder}/calibration.")


def test_an_unknown_method_is_refused_with_the_known_ones(bench: Bench) -> None:
    for method in ("guess", "percentile:101", "percentile:ninety", "global:-1", "max:3"):
        said = bench.refuses(*calibrate(bench), "--method", method)
        assert said.startswith(f"threshold.method: method '{method}'; expected entropy, entropy:nvidia")


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
    "changes",
    [
        {"files": None},
        {"files": {}},
        {"files": ["engine.onnx"]},
        {"engine": "../model.onnx"},
        {"engine": ["engine.onnx"]},
        {"inputs": "none"},
        {"inputs": {"backend": ["onnxruntime"]}},
        {"id": None},
        {"schema": "new"},
        {"schema": None},
    ],
    ids=str,
)
def test_a_manifest_that_makes_no_sense_is_refused_though_its_seal_is_right(
    bench: Bench, changes: dict[str, object]
) -> None:
    manifest = bench / "artefact" / "manifest.json"
    document = json.loads(manifest.read_bytes())
    del document["seal"]
    manifest.write_bytes(seal({**document, **changes}, None))
    said = bench.refuses("infer", bench / "artefact", "--frames", bench / "clip.avi")
    assert said.startswith(f"artefact.damaged: {bench / 'artefact'}")


@pytest.mark.parametrize("name", ["manifest.json", "engine.onnx", "calibration.json", "calibration.npz", "plan.json"])
def test_a_link_in_an_artefact_is_refused_whatever_it_leads_to(bench: Bench, name: str) -> None:
    file = bench / "artefact" / name
    file.symlink_to(file.rename(bench / f"twin of {name}"))
    said = bench.refuses("infer", bench / "artefact", "--frames", bench / "clip.avi")
    assert said.startswith(("artefact.damaged: ", "artefact.unreadable: "))
    assert str(file) in said


@pytest.mark.parametrize(
    ("name", "code"), [("nowhere", "config.missing"), (".", "artefact.missing"), ("clip.avi", "config.unreadable")]
)
def test_files_that_are_no_artefact_are_refused(bench: Bench, name: str, code: str) -> None:
    for command in (
        ["infer", bench / name, "--frames", bench / "clip.avi"],
        ["evaluate", bench / name, "--dataset", "x"],
    ):
        assert bench.refuses(*command).startswith(f"{code}: ")
