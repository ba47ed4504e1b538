"""`tared build --backend tensorrt --target sm86 --offline` and `tared inspect`, on the sample and on real models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lab import CIFAR_TRAIN, COCO, FACES, Lab
from worlds import make_world

from engines.store.artefact import read_artefact
from fleet.cli.main import main

pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has wheels for x86-64 only")

OFFLINE = ("--backend", "tensorrt", "--target", "sm86", "--offline")
FRAMES = {"resnet20": CIFAR_TRAIN, "fastestdet": COCO, "ultraface": FACES, "yolox_nano": COCO}


def command(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, object]:
    assert main([*map(str, arguments), "--json"]) == 0
    printed: dict[str, object] = json.loads(capsys.readouterr().out)
    return printed


@pytest.mark.trial
@pytest.mark.parametrize("name", FRAMES)
def test_real_models_build(
    name: str, lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    spec, calibration = lab.spec(name), tmp_path / "calibration.json"
    command(capsys, "calibrate", spec, "--frames", lab.data / FRAMES[name], "--count", 4, "-o", calibration)
    built = command(capsys, "build", spec, *OFFLINE, "--calibration", calibration, "-o", tmp_path / "int8")
    assert built["precision"] == "int8"
    assert built["int8_macs_share"] == 1.0
    printed = command(capsys, "inspect", tmp_path / "int8", "--layers")
    layers = printed["built_layers"]
    assert isinstance(layers, list)
    computing = [layer for layer in layers if layer["kind"] in ("correlation", "gemm") and layer["nodes"]]
    assert computing
    assert all("Int8" in (*layer["inputs"], *layer["constants"]) for layer in computing)


def test_an_engine_is_built_for_the_named_target(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a calibration in the runtime's fastest float, and then into a folder named for it."""
    monkeypatch.chdir(tmp_path)
    make_world(tmp_path, lambda _: 0.5, 1.0)
    assert command(capsys, "build", "model.yaml", *OFFLINE)["artefact"] == str(tmp_path / "model-fp16")
    manifest = read_artefact(tmp_path / "model-fp16").manifest
    assert manifest["verification_only"] is True
    assert manifest["inputs"]["backend"]["target"] == "sm86"


def test_an_offline_engine_is_never_served(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_world(tmp_path, lambda _: 0.5, 1.0)
    command(capsys, "build", "model.yaml", *OFFLINE, "-o", "engine")
    for arguments in (["infer", "engine", "--frames", "clip.avi"], ["evaluate", "engine", "--dataset", "clip.avi"]):
        assert main(arguments) == 2
        assert "error: artefact.verification: " in capsys.readouterr().err


def test_the_int8_of_an_offline_engine_is_checked_by_simulation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_world(tmp_path, lambda _: 0.5, 1.0)
    command(capsys, "calibrate", "model.yaml", "--frames", "clip.avi", "-o", "calibration.json")
    assert main(["build", "model.yaml", *OFFLINE, "--calibration", "calibration.json", "-o", "engine"]) == 0
    assert " frames, simulated; worst tensor" in capsys.readouterr().err


def test_options_that_exclude_each_other_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_world(tmp_path, lambda _: 0.5, 1.0)
    for given in (["--offline"], ["--target", "sm86"]):
        assert main(["build", str(tmp_path / "model.yaml"), "--backend", "tensorrt", *given]) == 2
        assert "error: cli.arguments: " in capsys.readouterr().err
    elsewhere = ["--backend", "onnxruntime", "--offline", "--target", "sm86"]
    assert main(["build", str(tmp_path / "model.yaml"), *elsewhere]) == 2
    assert "error: backend.option: --target with backend onnxruntime" in capsys.readouterr().err


def test_inspect_says_what_was_made_of_what(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_world(tmp_path, lambda _: 0.5, 1.0)
    command(capsys, "build", "model.yaml", *OFFLINE, "-o", "engine")
    assert main(["inspect", "engine", "--layers"]) == 0
    shown = capsys.readouterr().out
    assert "verification_only  True" in shown
    assert "correlation" in shown
    command(capsys, "build", "model.yaml", "--backend", "onnxruntime", "-o", "plain")
    assert command(capsys, "inspect", "plain")["precision"] == "fp32"
    assert main(["inspect", "plain", "--layers"]) == 2
    assert "error: inspect.layers: an engine of onnxruntime" in capsys.readouterr().err
