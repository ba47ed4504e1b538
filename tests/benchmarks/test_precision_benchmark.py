"""The precision benchmark: what counts as INT8 in anybody's graph, whom the frames belong to, and the bars."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto
from zoo import Net, by_name, residual_net, run

from agent.camera.images import ImageFiles
from benchmarks.peers import WORKERS
from benchmarks.precision import Comparison, bars, section
from benchmarks.precision_contest import COCO, Result, splits
from benchmarks.precision_peers import FP32, PLANNED, Int8Part, Made, int8_part
from calibrate.plan import PrecisionPlan
from engines.quantise.apply_plan import insert_qdq
from engines.quantise.fusion import int8_macs_share
from engines.quantise.placement import place


def part(model: ModelProto) -> Int8Part:
    return int8_part(model.SerializeToString())


def int8(net: Net, x: str) -> str:
    """Quantised and dequantised, with a zero point that is not 0, as other tools choose it."""
    scale, zero = net.constant(np.array(0.03, np.float32)), net.constant(np.array(5, np.int8))
    return net.node("DequantizeLinear", net.node("QuantizeLinear", x, scale, zero), scale, zero)


def test_our_own_graphs_count_as_we_say() -> None:
    master = residual_net()
    second = next(node.name for node in reversed(master.graph.node) if node.op_type == "Conv")
    for plan in (PrecisionPlan(), PrecisionPlan({second: "by hand"})):
        placement = place(master, plan)
        graph = insert_qdq(master, placement, dict.fromkeys(placement.taps, 4.0))
        assert part(graph).macs_share == pytest.approx(int8_macs_share(master, placement))
        assert part(graph).decode_quantisers == 0
    assert 0.0 < part(graph).macs_share < 1.0
    assert part(master) == Int8Part(0.0, 0)


@pytest.mark.parametrize("names", ["", "same"])
def test_nodes_may_be_called_anything(names: str) -> None:
    net = Net((1, 4, 8, 8))
    weight = int8(net, net.weight(4, 4, 3, 3))
    first = net.node("Conv", int8(net, "image"), weight, pads=[1, 1, 1, 1])
    model = net.model(net.conv(first, 4, 4))
    for node in model.graph.node:
        node.name = names
    assert part(model) == Int8Part(0.5, 0)


def test_int8_is_what_reads_two_int8_operands() -> None:
    net = Net((1, 4, 8, 8))
    weights_only = net.node("Conv", "image", int8(net, net.weight(4, 4, 3, 3)), pads=[1, 1, 1, 1])
    input_only = net.conv(int8(net, weights_only), 4, 4)
    assert part(net.model(input_only)) == Int8Part(0.0, 0)


def test_finds_quantised_decoding() -> None:
    net = Net((1, 4, 8, 8))
    boxes = net.conv(int8(net, "image"), 4, 4)
    side = net.node("Exp", int8(net, boxes))
    product = net.node("Mul", int8(net, side), int8(net, boxes))
    assert part(net.model(product)).decode_quantisers == 3


@pytest.mark.parametrize("tool", ["default", "minmax", "entropy"])
def test_the_worker_quantises_older_opsets_with_constants_among_the_inputs(tmp_path: Path, tool: str) -> None:
    net = Net((1, 4, 8, 8))
    model = net.model(net.norm(net.conv("image", 4, 4), 4), opset=11)
    listed = [onnx.helper.make_tensor_value_info(c.name, c.data_type, c.dims) for c in model.graph.initializer]
    model.graph.input.extend(listed)
    source, tensors, output = tmp_path / "model.onnx", tmp_path / "tensors.npy", tmp_path / "int8.onnx"
    onnx.save(model, source)
    images = np.random.default_rng(0).normal(size=(4, 4, 8, 8)).astype(np.float32)
    np.save(tensors, images)
    command: list[str | Path] = [sys.executable, WORKERS / "quantise.py", tool, source, tensors, output]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    quantised = onnx.load(output)
    assert part(quantised).macs_share == 1.0
    zero_points = {
        name: onnx.numpy_helper.to_array(c) for c in quantised.graph.initializer if "zero" in (name := c.name)
    }
    asymmetric = any(values.any() for name, values in zero_points.items() if "bias" not in name)
    assert asymmetric == (tool == "default")
    assert "BatchNormalization" not in {node.op_type for node in by_name(quantised).values()}
    found, expected = (next(iter(run(graph, images[:1]).values())).astype(np.float64) for graph in (quantised, model))
    assert np.abs(found - expected).max() < 0.05 * np.abs(expected).max()


def test_the_scored_images_are_apart_from_the_calibrating_ones(shared_data: Path, tmp_path: Path) -> None:
    first, second = splits("yolox_nano", tmp_path)
    assert (first.calibrate, first.plan, first.score) == (second.score, second.score, second.calibrate)
    even, odd = (set(ImageFiles(path).names) for path in (first.calibrate, first.score))
    assert even | odd == set(ImageFiles(shared_data / COCO).names)
    assert (len(even), len(odd), even & odd) == (64, 64, set())
    with zipfile.ZipFile(first.score) as archive:
        assert sum(name.endswith(".txt") for name in archive.namelist()) == 64 + 1
    for split in splits("ultraface", tmp_path):
        assert len({split.calibrate, split.plan, split.score}) == 3


RESULT = Result(Made(b"", 1.0, 2.0), Int8Part(0.9, 0), 0.302, 0.99, (1.5, 2.0))


def comparison(name: str, *planned: Result) -> Comparison:
    reference = replace(RESULT, score=0.31, agreement=1.0)
    return Comparison(name, {FP32: [reference] * len(planned), PLANNED: list(planned)})


def test_bars_compare_the_mean_over_the_splits() -> None:
    one, other = RESULT, replace(RESULT, score=0.296, int8=Int8Part(0.7, 0))
    lost, share = bars(comparison("yolox_nano", one, other))
    assert (lost.found, lost.passed) == ("1.1 points", False)
    assert (share.found, share.passed) == ("80 %", False)
    assert [bar.passed for bar in bars(comparison("yolox_nano", one))] == [True, True]
    assert [bar.passed for bar in bars(comparison("fastestdet", one))] == [False]


def test_bars_see_a_layer_left_float_and_a_quantised_decoding() -> None:
    left = replace(RESULT, score=0.312, made=Made(b"", 1.0, 2.0, floats=1))
    assert [bar.passed for bar in bars(comparison("resnet20", left))] == [True, False]
    face = replace(RESULT, score=None)
    decoding = replace(face, agreement=0.9, int8=Int8Part(1.0, 2))
    assert [bar.passed for bar in bars(comparison("ultraface", face))] == [True, True]
    assert [bar.passed for bar in bars(comparison("ultraface", decoding))] == [False, False]


def test_a_contender_that_is_missing_has_a_row_with_its_reason() -> None:
    found = comparison("fastestdet", RESULT)
    found.missing["modelopt.onnx"] = "not installed: no network"
    table = section(found)
    assert {len(row) for row in table.rows} == {len(table.columns)}
    assert table.rows[-1][:2] == ("modelopt.onnx", "not installed: no network")
    assert table.rows[1][:4] == (PLANNED, "30.20", "-0.80", "-0.80")
