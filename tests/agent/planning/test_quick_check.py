"""A glance at a plan on a few frames: its fidelity, and the tensor that ruins it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto
from plan_world import LOUD, RAW, two_branches
from repair_flow import calibrated, frames_for
from zoo import Net

from agent.models.model import open_model
from agent.planning.quick_check import QuickCheck, quick_check
from agent.vision.spec import ModelSpec
from calibrate.plan import PrecisionPlan
from engines.interface import silent
from engines.registry import open_backend


def checked(folder: Path, graph: ModelProto, plan: PrecisionPlan | None = None, **spec: object) -> QuickCheck:
    onnx.save(graph, folder / "model.onnx")
    model = open_model(ModelSpec.model_validate({**RAW, "path": folder / "model.onnx", **spec}))
    frames = frames_for(model.master, 6)
    calibration = calibrated(model.master, frames, "entropy")
    simulator = open_backend("onnxruntime")
    return quick_check(model.with_plan(plan or model.plan), calibration, frames, simulator, silent)


def test_a_plan_is_low_that_loses_what_its_layers_lose_in_int8(tmp_path: Path) -> None:
    int8, mixed = checked(tmp_path, two_branches()), checked(tmp_path, two_branches(), PrecisionPlan({LOUD: ""}))
    assert (int8.frames, int8.informative, int8.fidelity, int8.is_low(0.1)) == (6, 6, 0.0, True)
    assert (mixed.fidelity, mixed.is_low(0.1)) == (1.0, False)
    assert mixed.worst_layer != LOUD  # which is float


def uneven() -> ModelProto:
    """Its second convolution reads channels of ranges apart by a million, and its weights bring them back together."""
    net = Net((1, 3, 8, 8))
    ranges = np.array([1e3, 1.0, 1e-3], np.float32)
    spread = net.node("Conv", "image", net.constant(np.diag(ranges)[..., np.newaxis, np.newaxis]))
    joined = net.constant((np.ones((4, 3, 1, 1)) / ranges.reshape(1, 3, 1, 1)).astype(np.float32))
    return net.model(net.node("Conv", net.node("Relu", spread), joined))


def test_the_worst_tensor_is_the_one_whose_noise_its_reader_amplifies(tmp_path: Path) -> None:
    check = checked(tmp_path, uneven(), min_sqnr_db=0.0)
    assert check.worst_layer == "Conv_t2"
    assert check.worst_tensor == "t1"
    assert check.worst_db is not None
    assert check.worst_db < 0.0
    assert check.is_low(0.1)
    assert f"worst output {check.worst_output}, {check.output_db:.1f} dB" in check.text
    assert f"worst tensor 't1', {check.worst_db:.1f} dB behind 'Conv_t2'" in check.text


def test_a_network_without_int8_has_no_worst_tensor(tmp_path: Path) -> None:
    floats = {node.name: "" for node in two_branches().graph.node if node.op_type == "Conv"}
    check = checked(tmp_path, two_branches(), PrecisionPlan(floats))
    assert (check.fidelity, check.worst_tensor, check.worst_layer, check.worst_db) == (1.0, "", "", None)
    assert check.text == "fidelity to float 1.000, 6 frames, simulated"


def test_frames_that_show_nothing_say_nothing_of_fidelity(tmp_path: Path) -> None:
    net = Net((1, 3, 8, 8))
    faint = net.node("Mul", net.conv("image", 3, 6), net.constant(np.array(1e-3, np.float32)))
    rows = net.node("Reshape", faint, net.constant(np.array([1, 64, 6])))
    check = checked(tmp_path, net.model(rows), task="detect", decoder="end2end", labels=["a"], score_threshold=1.0)
    assert (check.fidelity, check.is_low(0.1)) == (None, False)
    assert check.text.startswith("fidelity to float unknown, none of 6 frames shows anything; worst tensor 'image'")
