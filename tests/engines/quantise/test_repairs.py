"""Repairs are carried out as planned: in the INT8 graph, in its float16 form, and in NVIDIA's engine."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import pytest
from half_zoo import noise_db
from half_zoo import run as run_all
from numpy.typing import NDArray
from onnx import ModelProto, numpy_helper
from repair_flow import CLIPPING, calibrated, frames_for, observed, proposed, uneven_net
from zoo import Net, by_name

from calibrate.plan import PrecisionPlan, Repairs
from calibrate.repair import divided_ends
from calibrate.scale import QMAX, quantise, weight_scales
from engines.calibration import Calibration
from engines.errors import EngineError
from engines.graph.topology import Topology
from engines.interface import BackendOptions, BuildRequest
from engines.quantise.apply_plan import known_amax, observed_graph, quantised_graph, with_ranges
from engines.quantise.placement import place
from engines.quantise.repairs import propose_repairs
from engines.trt.layers import LAYERS_FILE, layers_from_json


def planned_net() -> tuple[ModelProto, Repairs]:
    """Three layers, and one repair of each kind: divided and centred, divided for free, clipped, shifted."""
    net = Net((1, 4, 8, 8))
    first = net.node("Sigmoid", net.conv("image", 4, 4))
    second = net.node("Relu", net.node("Conv", first, net.weight(4, 4, 3, 3), net.weight(4)))
    model = net.model(net.node("Conv", second, net.weight(6, 4, 1, 1)))
    # Sigmoid gives (0, 1): centred on 64 steps, and divided so that all channels reach as far.
    divisors, step = (0.5, 0.25, 1.0, 0.5), 1.0 / QMAX
    repairs = Repairs(
        divisors={"Conv_t2": divisors, "Conv_t4": (1.0, 0.5, 0.25, 0.125)},
        offsets={"Conv_t2": tuple(64 * step * divisor for divisor in divisors)},
        ranges={"Conv_t2.equalised": QMAX * step, "Conv_t4.equalised": 40.0},
        clips={"Conv_t0": (0.9, 1.0, 0.8, 1.0)},
        shifts={"Conv_t2": (0.01, -0.02, 0.03, 0.0), "Conv_t4": (0.01,) * 6},
    )
    return model, repairs


def test_the_graph_reads_what_was_planned() -> None:
    model, repairs = planned_net()
    calibration = replace(calibrated(model, frames_for(model)), extremes={})
    graph = quantised_graph(model, PrecisionPlan({}, repairs), calibration).graph
    onnx.checker.check_model(graph, full_check=True)
    nodes, constants = (
        by_name(graph),
        {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.graph.initializer},
    )
    before, producers = Topology(model).initializers, Topology(graph).producers
    for layer, fractions in (
        ("Conv_t2", np.ones(4)),
        ("Conv_t4", np.ones(6)),
        ("Conv_t0", np.array(repairs.clips["Conv_t0"])),
    ):
        weight: NDArray[np.float32] = numpy_helper.to_array(before[by_name(model)[layer].input[1]])
        weight = weight * np.array(repairs.divisors.get(layer, [1.0] * 4), np.float32).reshape(1, 4, 1, 1)
        if layer == "Conv_t2":  # which divides for the next one
            weight = weight / np.array(repairs.divisors["Conv_t4"], np.float32).reshape(4, 1, 1, 1)
        integers, scales, _ = producers[nodes[layer].input[1]].input
        expected = weight_scales(weight, 0, "w") * fractions.astype(np.float32)
        np.testing.assert_array_equal(constants[scales], expected)
        np.testing.assert_array_equal(constants[integers], quantise(weight, expected, 0))
    for layer in ("Conv_t2", "Conv_t4"):
        dequantise = producers[nodes[layer].input[0]]
        assert constants[dequantise.input[1]] == np.float32(repairs.ranges[f"{layer}.equalised"] / QMAX)
    np.testing.assert_allclose(constants[nodes["Conv_t4"].input[2]], [-0.01] * 6, rtol=1e-6)


def test_layers_that_end_up_float_keep_nothing_of_their_repairs() -> None:
    model, repairs = planned_net()
    calibration = calibrated(model, frames_for(model))
    floats = dict.fromkeys(("Conv_t0", "Conv_t2", "Conv_t4"), "no INT8 kernel")
    graph = quantised_graph(model, PrecisionPlan(floats, repairs), calibration).graph
    assert (
        graph.SerializeToString()
        == quantised_graph(model, PrecisionPlan(floats), calibration).graph.SerializeToString()
    )
    partly = quantised_graph(model, PrecisionPlan({"Conv_t2": "no INT8 kernel"}, repairs), calibration).graph
    assert not [node for node in partly.graph.node if "Conv_t2." in node.name]
    assert [node.name for node in partly.graph.node if node.name.startswith("Conv_t4.equalised")]


@pytest.mark.parametrize(
    "repairs",
    [
        Repairs(divisors={"Conv_t2": (1.0,) * 3}),
        Repairs(shifts={"Conv_t4": (1.0,) * 5}),
        Repairs(clips={"Conv_t9": (1.0,) * 4}),
        Repairs(clips={"Conv_t4": (1.0,) * 5}),
        Repairs(clips={"Conv_t4": (1.0,)}),
    ],
)
def test_refuses_a_plan_of_another_model(repairs: Repairs) -> None:
    model, _ = planned_net()
    calibration = calibrated(model, frames_for(model, 1))
    with pytest.raises(EngineError) as caught:
        quantised_graph(model, PrecisionPlan({}, repairs), calibration)
    assert caught.value.code == "plan.node"


def test_a_divided_tensor_has_the_range_that_the_calibration_shows_best() -> None:
    """Its own histogram, then the extremes of what is divided, then what the plan has of another calibration."""
    model, repairs = planned_net()
    tensor = "Conv_t4.equalised"
    plan = PrecisionPlan({}, replace(repairs, reach={tensor: 0.5}))
    divided, frames = observed_graph(model, plan), frames_for(model)
    extremes = calibrated(model, frames).extremes
    own = replace(calibrated(divided, frames, "percentile:99"), extremes=extremes)
    other = PrecisionPlan({}, replace(plan.repairs, divisors={**repairs.divisors, "Conv_t4": (1.0,) * 4}))
    expected = {
        "its own": own.amax[tensor],
        "extremes": 0.5 * divided_ends(extremes["Conv_t4"], repairs.divisors["Conv_t4"], 0.0)[1],
        "divided otherwise": 0.5 * divided_ends(extremes["Conv_t4"], (1.0,) * 4, 0.0)[1],
        "the plan's": 40.0,
    }
    assert len(set(expected.values())) == 4
    of_model = calibrated(model, frames)
    cases = {
        "its own": (plan, own),
        "extremes": (plan, of_model),
        "divided otherwise": (other, own),
        "the plan's": (plan, replace(of_model, extremes={})),
    }
    for name, (planned, calibration) in cases.items():
        graph = quantised_graph(model, planned, calibration).graph
        constants = {each.name: each for each in graph.graph.initializer}
        scale = numpy_helper.to_array(constants[f"{tensor}.scale"]).item()
        assert scale == pytest.approx(expected[name] / QMAX, rel=1e-6), name
        assert with_ranges(planned, calibration).repairs.ranges[tensor] == pytest.approx(expected[name], rel=1e-6)


def test_the_whole_calibration_gives_the_range_and_a_few_frames_what_it_keeps() -> None:
    """Dark frames propose, and the calibration has seen bright ones too, which are not clipped."""
    model = uneven_net("SiLU", pad=0)
    dark = frames_for(model)
    bright = [(frame * 8.0).astype(np.float32) for frame in dark]
    whole, of_dark = calibrated(model, [*dark, *bright]), calibrated(model, dark)
    proposal, narrow = (
        propose_repairs(model, place(model), each, observed(model, dark), ("divisors",)) for each in (whole, of_dark)
    )
    assert narrow.repairs.ranges["Conv_t3.equalised"] < 0.5 * proposal.repairs.ranges["Conv_t3.equalised"]

    def noise(repairs: Repairs, calibration: Calibration) -> float:
        graph = quantised_graph(model, PrecisionPlan({}, repairs), calibration).graph
        return noise_db(run_all(model, bright), run_all(graph, bright))

    assert noise(proposal.repairs, whole) < -26.0  # with headroom
    assert noise(narrow.repairs, whole) < -25.0  # the same plan, built of a calibration that has seen more
    assert noise(narrow.repairs, replace(whole, extremes={})) > -15.0  # its own ranges would clip


@pytest.mark.parametrize(("activation", "pad"), [("Relu", 0), ("SiLU", 0), ("Relu", 1)])
def test_a_range_grows_as_the_extremes_do(activation: str, pad: int) -> None:
    """One-sided inputs too, whose largest value lies in the middle of a range with headroom."""
    model = uneven_net(activation, pad)
    frames = frames_for(model)
    calibration, repairs = calibrated(model, frames), proposed(model, frames, ("divisors",)).repairs
    assert repairs.ranges
    for growth in (1.0, 1.01, 1.5, 2.0):
        extremes = {layer: np.float32(growth) * seen for layer, seen in calibration.extremes.items()}
        amax = known_amax(repairs, replace(calibration, extremes=extremes))
        for tensor, planned in repairs.ranges.items():
            assert 0.99 * planned <= amax[tensor] <= 1.01 * (2.0 * growth - 1.0) * planned, (tensor, growth)


def test_a_centred_tensor_is_never_clipped_at_its_low_end() -> None:
    """A darker calibration brings the high end down, while the offset stays that of the plan."""
    model = uneven_net("SiLU", pad=0)
    frames = frames_for(model)
    repairs = proposed(model, frames, ("divisors",)).repairs
    assert repairs.offsets["Conv_t3"]
    repairs = replace(repairs, reach={"Conv_t3.equalised": 0.5})
    dark = calibrated(model, [(frame / 64.0).astype(np.float32) for frame in frames])
    low, high = divided_ends(dark.extremes["Conv_t3"], repairs.divisors["Conv_t3"], repairs.offsets["Conv_t3"])
    assert high < 0.0
    assert known_amax(repairs, dark)["Conv_t3.equalised"] == -low


def test_without_extremes_no_input_is_divided() -> None:
    model = uneven_net()
    frames = frames_for(model)
    merged = replace(calibrated(model, frames), extremes={})
    assert not propose_repairs(model, place(model), merged, observed(model, frames), ("divisors",)).repairs


def test_scales_of_another_tool_without_histograms_keep_their_thresholds() -> None:
    model = uneven_net()
    frames = frames_for(model)
    bare = replace(calibrated(model, frames, CLIPPING), histograms={})
    assert proposed(model, frames, ("methods",), CLIPPING).repairs.methods
    assert not propose_repairs(model, place(model), bare, observed(model, frames), ("methods",)).repairs


def test_a_planned_threshold_is_chosen_from_the_calibration() -> None:
    model, _ = planned_net()
    frames = frames_for(model)
    plan = PrecisionPlan({}, Repairs(methods={"t3": CLIPPING}))
    graph = quantised_graph(model, plan, calibrated(model, frames)).graph
    scale = next(numpy_helper.to_array(tensor) for tensor in graph.graph.initializer if tensor.name == "t3.scale")
    assert scale == np.float32(calibrated(model, frames, CLIPPING).amax["t3"] / QMAX)
    assert scale < np.float32(calibrated(model, frames).amax["t3"] / QMAX)


def test_nvidias_builder_computes_every_repaired_layer_in_int8() -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has wheels for x86-64 only")
    from engines.trt.backend import TensorRtBackend

    model, repairs = planned_net()
    graph = quantised_graph(model, PrecisionPlan({}, repairs), calibrated(model, frames_for(model))).graph
    built = TensorRtBackend(BackendOptions(target="sm86")).build(BuildRequest(graph, "int8", input_shape=(1, 4, 8, 8)))
    assert not built.without_int8
    layers = layers_from_json(built.files[LAYERS_FILE])
    for name in place(model).weights:
        (own,) = (layer for layer in layers if name in layer.nodes and "Int8" in layer.inputs)
        assert own.precision == "Int8"
