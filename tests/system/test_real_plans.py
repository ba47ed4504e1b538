"""`tared plan` on real networks and real frames: what may be INT8, what it loses, and what the certificate says."""

from __future__ import annotations

import json
from typing import Any

import onnx
import pytest
from lab import ASL, CIFAR_TEST, CIFAR_TRAIN, COCO, STREET, Lab, tared

import agent.planning.group_noise as group_noise

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def few_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """To find out which groups make the noise: a quarter of the time, and a coarser picture."""
    monkeypatch.setattr(group_noise, "_RUNS", 16)


def planned(lab: Lab, name: str, frames: str, *more: object, calibrated_on: str, count: int) -> dict[str, Any]:
    """The evidence of a plan, which is written as NAME-plan.json."""
    calibration, plan = lab.folder / f"{name}-calibration.json", lab.folder / f"{name}-plan.json"
    tared("calibrate", lab.spec(name), "--frames", lab.data / calibrated_on, "--count", count, "-o", calibration)
    search = ["--calibration", calibration, "--frames", lab.data / frames, "--costs", "macs"]
    told = tared("plan", lab.spec(name), *search, "-o", plan, *more)
    evidence: dict[str, Any] = json.loads(plan.read_text())["evidence"]
    assert told["certified"], evidence["verdict"]
    assert told["builds"] <= 13
    return evidence


@pytest.mark.trial
def test_resnet20_is_int8_as_a_whole_and_keeps_its_accuracy(lab: Lab) -> None:
    evidence = planned(lab, "resnet20", CIFAR_TRAIN, "--max-loss", 0.05, calibrated_on=CIFAR_TRAIN, count=500)
    assert all(group["precision"] == "int8" for group in evidence["groups"])
    artefact = lab.folder / "resnet20-planned"
    plan = ["--plan", lab.folder / "resnet20-plan.json"]
    tared(
        "build", lab.spec("resnet20"), "--calibration", lab.folder / "resnet20-calibration.json", *plan, "-o", artefact
    )
    scores = [
        tared("evaluate", target, "--dataset", lab.data / CIFAR_TEST)["top1"]
        for target in (lab.spec("resnet20"), artefact)
    ]
    assert scores[0] - scores[1] <= 0.004


@pytest.mark.trial
def test_ultraface_keeps_its_decoding_float_by_itself(lab: Lab) -> None:
    frames = ASL.format("walk")
    evidence = planned(lab, "ultraface", frames, "--max-loss", 0.1, calibrated_on=ASL.format("again"), count=64)
    assert any(group["precision"] == "int8" for group in evidence["groups"])
    assert evidence["candidates"][evidence["chosen"]]["trial"]["loss"] <= 0.02
    artefact = lab.folder / "ultraface-planned"
    plan = ["--plan", lab.folder / "ultraface-plan.json"]
    tared(
        "build",
        lab.spec("ultraface"),
        "--calibration",
        lab.folder / "ultraface-calibration.json",
        *plan,
        "-o",
        artefact,
    )
    graph = onnx.load(artefact / "engine.onnx").graph
    dequantised = {node.output[0] for node in graph.node if node.op_type == "DequantizeLinear"}
    readers = [node for node in graph.node if dequantised & set(node.input)]
    assert {node.op_type for node in readers} <= {"Conv", "Add", "Concat"}
    joined = {name for node in readers if node.op_type == "Concat" for name in node.output}  # of branches, not of boxes
    assert {node.op_type for node in graph.node if joined & set(node.input)} <= {"QuantizeLinear"}
    constants = {tensor.name for tensor in graph.initializer}  # decoding adds and multiplies the priors
    assert not any(constants & set(node.input) for node in readers if node.op_type == "Add")


@pytest.mark.trial
@pytest.mark.parametrize("max_loss", [0.1, pytest.param(0.05, marks=pytest.mark.soak)])
def test_yolox_nano_sees_a_street_with_int8_in_it(lab: Lab, max_loss: float) -> None:
    evidence = planned(lab, "yolox_nano", STREET, "--max-loss", max_loss, calibrated_on=COCO, count=64)
    chosen = evidence["candidates"][evidence["chosen"]]
    assert chosen["trial"]["upper"] <= max_loss
    assert chosen["int8_macs_share"] > 0.25
