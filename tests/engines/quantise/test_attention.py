"""Where Q/DQ go in transformers and dense heads, that the numbers are those of plain arithmetic, and what they cost."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import ModelProto, numpy_helper
from repair_flow import calibrated
from runtime_under_test import backend_class
from transformer_nets import (
    HEADS,
    TOKENS,
    WIDTH,
    decoder_head,
    deformable_piece,
    ints,
    position_sensitive_attention,
    vit_block,
)
from zoo import Net, by_name, run

from calibrate.plan import PrecisionPlan
from engines.graph.passes import prepare
from engines.graph.taps import expose
from engines.interface import Array
from engines.quantise.apply_plan import insert_qdq
from engines.quantise.fusion import fusion_groups, int8_macs_share, node_macs
from engines.quantise.placement import Placement, place
from engines.quantise.repairs import observe_channels, propose_repairs

LOGITS, MIXED = "MatMul_t13", "MatMul_t15"  # the two products of `vit_block`


def float_ops(model: ModelProto, placement: Placement) -> set[str]:
    nodes = by_name(model)
    return {nodes[name].op_type for name in placement.floats}


def images(count: int = 8) -> list[Array]:
    return list(np.random.default_rng(3).normal(size=(count, 1, 3, 16, 16)).astype(np.float32))


@pytest.mark.parametrize("decomposed", [False, True])
def test_attention_reads_int8_and_what_normalises_it_is_float(decomposed: bool) -> None:
    model = prepare(vit_block(decomposed), run)
    placement, nodes = place(model), by_name(model)
    products = [nodes[name] for name in placement.products]
    assert [placement.reads[node.name] for node in products] == [(0, 1), (0, 1)]
    assert int8_macs_share(model, placement) == 1.0
    normalisation = {"Sub", "Pow", "Sqrt", "Div"} if decomposed else {"LayerNormalization"}
    assert float_ops(model, placement) >= {"Softmax", "Erf", *normalisation}
    # The logits that a softmax reads have no Q/DQ, and neither has the sum that a normalisation reads.
    logits, mixed = (node.output[0] for node in products)
    scaled = {tensor for group in placement.groups for tensor in group.tensors}
    assert logits not in scaled
    assert mixed in scaled
    assert "a normalisation reads its sum" in placement.floats.values()


def test_query_key_and_value_of_one_matrix_have_scales_of_their_own() -> None:
    placement = place(vit_block())
    parts = [group.taps for group in placement.groups if {"t9", "t10", "t11"}.intersection(group.tensors)]
    assert parts == [("t9",), ("t10",), ("t11",)]
    assert placement.floats["Gather_t10"].startswith("it cuts a tensor into parts")


def test_a_value_that_a_convolution_reads_too_has_one_scale() -> None:
    model = position_sensitive_attention()
    placement, nodes = place(model), by_name(model)
    logits, mixed = (nodes[name] for name in placement.products)
    assert int8_macs_share(model, placement) == 1.0
    value = mixed.input[0]
    (group,) = (group for group in placement.groups if value in group.tensors)
    assert group.taps == (value,)
    (depthwise,) = (node for node in nodes.values() if node.op_type == "Conv" and node.input[0] in group.tensors)
    assert depthwise.name in placement.weights
    assert logits.output[0] not in {tensor for each in placement.groups for tensor in each.tensors}


def test_a_split_that_feeds_no_attention_shares_one_scale() -> None:
    net = Net((1, 4, 8, 8))
    halves = [net.node("Split", net.conv("image", 4, 4), outputs=2, axis=1)]
    halves.append(f"{halves[0]}_1")
    placement = place(net.model(*(net.conv(half, 2, 2) for half in halves)))
    assert "Split_t1" in placement.reads


def test_a_product_that_no_layer_reads_stays_float() -> None:
    net = Net((1, 4, 8, 8))
    factors = net.node("Reshape", net.conv("image", 4, 4), ints(net, 1, 64, 4))
    prototypes = net.node("Reshape", net.conv("image", 4, 4), ints(net, 1, 4, 64))
    placement = place(net.model(net.node("Sigmoid", net.node("MatMul", factors, prototypes))))
    assert placement.products == ()
    assert placement.floats["MatMul_t4"].endswith("no layer reads what it makes")


def test_weights_that_the_graph_transposes_are_no_activation() -> None:
    net = Net((1, 4, 8, 8))
    turned = net.node("Transpose", net.weight(8, 8))
    placement = place(net.model(net.conv(net.node("MatMul", "image", turned), 4, 4)))
    assert placement.products == ()
    assert "MatMul_t1" in placement.floats


def test_places_that_are_sampled_stay_float() -> None:
    model = deformable_piece()
    placement = place(model)
    assert int8_macs_share(model, placement) == 1.0
    assert float_ops(model, placement) >= {"GridSample", "Softmax", "Tanh", "ReduceSum"}
    scaled = {tensor for group in placement.groups for tensor in group.tensors}
    sampler = by_name(model)["GridSample_t11"]
    assert not scaled.intersection(sampler.input)


def test_a_decoder_head_is_int8_but_where_it_interpolates() -> None:
    placement = place(decoder_head())
    assert placement.weights["ConvTranspose_t4"].axis == 1
    assert {"Concat_t6", "Resize_t7"} <= placement.reads.keys()
    assert placement.floats["Resize_t9"].startswith("it interpolates")


def test_a_plan_keeps_one_product_float_and_the_other_in_int8() -> None:
    model = vit_block()
    placement = place(model, PrecisionPlan({MIXED: "too loud"}))
    assert placement.products == (LOGITS,)
    assert placement.floats[MIXED] == "too loud"
    assert set(placement.taps) < set(place(model).taps)
    assert {group.name for group in fusion_groups(model, place(model)).groups if not group.fixed} >= {LOGITS, MIXED}


def rounded(values: Array, amax: float, steps: int = 127) -> Array:
    scale = amax / steps
    return np.asarray(np.clip(np.rint(values / scale), -128, steps) * scale, np.float32)


def test_attention_in_int8_is_what_plain_arithmetic_says() -> None:
    model = vit_block()
    placement, image = place(model), images(1)[0]
    amax = dict.fromkeys(placement.taps, 3.0) | {"t14": 1.0}
    seen = run(expose(insert_qdq(model, placement, amax), ("t9", "t10", "t11", "t13", "t14", "t15")), image)
    query, key, value = (rounded(seen[name], 3.0) for name in ("t11", "t9", "t10"))
    np.testing.assert_allclose(seen["t13"], query @ key.swapaxes(-1, -2), atol=1e-4)
    np.testing.assert_allclose(seen["t15"], rounded(seen["t14"], 1.0) @ value, atol=1e-4)
    assert not np.allclose(seen["t15"], seen["t14"] @ seen["t10"], atol=1e-4)


def test_where_products_saturate_the_second_operand_has_seven_bits() -> None:
    model = vit_block()
    placement = place(model)
    graph = insert_qdq(model, placement, dict.fromkeys(placement.taps, 3.0), weight_bits=7)
    scales = {
        tensor.name: numpy_helper.to_array(tensor).item()
        for tensor in graph.graph.initializer
        if tensor.name in ("t9.scale", "t10.scale", "t11.scale")
    }
    assert scales == pytest.approx({"t9.scale": 6.0 / 127, "t10.scale": 6.0 / 127, "t11.scale": 3.0 / 127})


def test_the_predicted_noise_of_a_product_is_what_it_makes() -> None:
    model, frames = vit_block(), images()
    calibration, placement = calibrated(model, frames, "max"), place(model)
    products = [by_name(model)[name] for name in placement.products]
    statistics = observe_channels(model, products, frames, backend_class()())
    predicted = propose_repairs(model, placement, calibration, statistics, families=()).before
    others = dict.fromkeys(placement.layers, "float here")
    for node in products:
        alone = {name: why for name, why in others.items() if name != node.name}
        int8 = place(model, PrecisionPlan(alone))
        served = expose(insert_qdq(model, int8, calibration.amax), node.output)
        made = [(run(expose(model, node.output), x)[node.output[0]], run(served, x)[node.output[0]]) for x in frames]
        reference, quantised = (np.stack(each) for each in zip(*made, strict=True))
        noise = float(np.square(quantised - reference).mean() / reference.var())
        assert predicted[node.name] == pytest.approx(noise, rel=0.5)


# ---- multiply-accumulates, counted by hand


def test_the_macs_of_a_transformer() -> None:
    macs = node_macs(vit_block())
    assert macs["Conv_t0"] == TOKENS * WIDTH * 3 * 4 * 4
    assert macs["MatMul_t4"] == TOKENS * WIDTH * 3 * WIDTH
    assert macs[LOGITS] == macs[MIXED] == HEADS * TOKENS * TOKENS * (WIDTH // HEADS)
    assert macs["MatMul_t22"] == macs["MatMul_t29"] == TOKENS * WIDTH * 4 * WIDTH


def test_the_macs_of_windows_that_lie_on_the_batch_axis() -> None:
    net = Net((2, 4, 8, 8))  # two images of four windows with 16 tokens
    windows = net.node("Reshape", "image", ints(net, 8, 16, 4))
    macs = node_macs(net.model(net.node("MatMul", windows, net.weight(4, 6))))
    assert macs == {"MatMul_t1": 4 * 16 * 4 * 6}


def test_the_macs_of_a_grouped_transposed_convolution_of_open_size() -> None:
    macs = node_macs(decoder_head(("n", 3, "h", "w")))
    assert macs["ConvTranspose_t4"] == 64 * 64 * 8 * 4 * 2 * 2  # for 256 x 256 pixels, at a quarter of the sides
    assert macs["Conv_t8"] == 256 * 256 * 4 * 16 * 3 * 3


@pytest.mark.parametrize(
    ("equation", "left", "right", "macs"),
    [
        ("bhqd,bhkd->bhqk", (1, 2, 5, 3), (1, 2, 7, 3), 2 * 5 * 7 * 3),
        ("bchw,cd->bdhw", (1, 4, 3, 3), (4, 6), 3 * 3 * 4 * 6),
        ("...qd,...kd->...qk", (1, 2, 5, 3), (1, 2, 7, 3), 2 * 5 * 7 * 3),
        ("ij,jk", (4, 3), (3, 5), 4 * 3 * 5),
    ],
)
def test_the_macs_of_an_einsum(equation: str, left: tuple[int, ...], right: tuple[int, ...], macs: int) -> None:
    net = Net((1, 1, 1, 1))
    ones = [
        net.node(
            "Add", net.constant(np.ones(shape, np.float32)), net.node("Reshape", "image", ints(net, *[1] * len(shape)))
        )
        for shape in (left, right)
    ]
    model = net.model(net.node("Einsum", *ones, equation=equation))
    assert node_macs(model) == {"Einsum_t4": macs}
    placement = place(model)
    assert "Einsum" in placement.floats["Einsum_t4"]
    assert fusion_groups(model, placement).groups[0].fixed == placement.floats["Einsum_t4"]


def test_the_macs_of_a_fused_attention() -> None:
    net = Net((1, 2, 5, 4))
    model = net.model(net.node("Attention", "image", net.node("Relu", "image"), "image"), opset=23)
    assert node_macs(model) == {"Attention_t1": 2 * (2 * 5 * 5 * 4)}
