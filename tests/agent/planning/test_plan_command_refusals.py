"""`tared plan` refuses before the search what cannot work, and a plan, a calibration or a disk that does not fit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto
from plan_bench import Place
from plan_world import two_branches
from warm_start import tared
from zoo import Net

from agent.cli.plan import read_evidence
from agent.common.errors import AgentError
from calibrate.plan import PrecisionPlan


def scaled(model: ModelProto) -> ModelProto:
    """The same graph with other weights."""
    for tensor in model.graph.initializer:
        values = onnx.numpy_helper.to_array(tensor)
        tensor.CopyFrom(onnx.numpy_helper.from_array(values * np.float32(0.5), tensor.name))
    return model


def test_without_a_loss_the_plan_has_to_keep_that_of_the_task(plan_bench: Place) -> None:
    arguments = plan_bench.arguments()
    at = arguments.index("--max-loss")
    error = plan_bench.refuses(*arguments[:at], *arguments[at + 2 :])
    assert error.startswith("plan.frames: ")
    assert "for --max-loss 0.02 with 95 % confidence" in error


def test_impossible_requests_are_refused_before_the_search(plan_bench: Place) -> None:
    def refused(*changes: object) -> str:
        return plan_bench.refuses(*plan_bench.arguments(*changes))

    assert refused("--frames", plan_bench / "none.avi").startswith("camera.")
    few = refused("--max-loss", 0.001)
    assert few.startswith("plan.frames: 90 frames to measure on in ")
    assert "at least 4" in few
    assert "or accept --max-loss 0.047" in few
    assert refused("--calibration", plan_bench / "none.json").startswith("calibration.unreadable: ")
    assert refused("-o", plan_bench.folder).startswith("plan.write: ")
    assert refused("-o", plan_bench / "clip.avi/plan.json").startswith("plan.write: ")
    assert refused("--dataset", plan_bench / "none.zip").startswith("dataset.")
    (plan_bench / "empty").mkdir()
    assert refused("--frames", plan_bench / "empty").startswith("images.none: ")
    plan_bench.change_spec(precision={"keep_float": ["Cnov"]})
    assert "keep_float: Cnov, which matches no node" in refused()


def test_a_calibration_of_another_model_is_refused(plan_bench: Place) -> None:
    onnx.save(scaled(two_branches()), plan_bench / "model.onnx")
    assert plan_bench.refuses(*plan_bench.arguments()).startswith("calibration.model: ")


def test_a_plan_of_another_model_is_refused(plan_bench: Place) -> None:
    plan_bench.plan()
    given = ["--calibration", plan_bench / "calibration.json", "--plan", plan_bench / "plan.json"]
    build = ["build", plan_bench / "model.yaml", *given]
    plan = json.loads((plan_bench / "plan.json").read_text())
    plan["floats"]["Conv_t77"] = "by hand"
    (plan_bench / "plan.json").write_text(json.dumps(plan))
    assert plan_bench.refuses(*build, "-o", plan_bench / "artefact").startswith(
        "plan.node: node 'Conv_t77' in the plan"
    )
    onnx.save(scaled(two_branches()), plan_bench / "model.onnx")  # the same nodes, other weights
    assert plan_bench.refuses(*build, "-o", plan_bench / "artefact").startswith("plan.model: a plan of model ")


@pytest.mark.parametrize(
    ("evidence", "found"),
    [({}, "written by hand"), ({"schema": 1}, "another version")],
)
def test_a_plan_without_the_evidence_of_a_search_is_not_shown(
    tmp_path: Path, evidence: dict[str, object], found: str
) -> None:
    (tmp_path / "plan.json").write_text(PrecisionPlan(evidence=evidence).to_json())
    with pytest.raises(AgentError, match=found):
        read_evidence(tmp_path / "plan.json")


def test_a_full_disk_is_an_error(plan_bench: Place) -> None:
    done = tared(*plan_bench.arguments(), file_bytes=300)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: plan.journal: ")


def test_a_tensor_beyond_every_scale_is_left_to_float(plan_bench: Place) -> None:
    net = Net((1, 3, 8, 8))
    large = net.node("Mul", net.conv("image", 3, 8), net.constant(np.array(1e10, np.float32)))
    small = net.node("Mul", net.conv(large, 8, 4), net.constant(np.array(1e-10, np.float32)))
    onnx.save(net.model(small), plan_bench / "model.onnx")
    calibration = plan_bench / "calibration.json"
    calibrate = ["calibrate", plan_bench / "model.yaml", "--frames", plan_bench / "clip.avi", "-o", calibration]
    build = ["build", plan_bench / "model.yaml", "--calibration", calibration, "-o", plan_bench / "artefact"]
    assert plan_bench.refuses(*calibrate).startswith("scale.range: amax ")
    plan_bench.change_spec(precision={"keep_float": ["Conv_t2"]}, min_sqnr_db=20.0)
    plan_bench.says(*calibrate)
    assert plan_bench.plan()["certified"]
    assert {group["name"]: group["precision"] for group in plan_bench.evidence()["groups"]}["Conv_t2"] == "float"
    plan_bench.says(*build)
    plan_bench.change_spec(min_sqnr_db=20.0)
    assert plan_bench.refuses(*build).startswith("calibration.plan: a calibration without tensor ")
