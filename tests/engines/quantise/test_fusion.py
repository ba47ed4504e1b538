from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import ModelProto
from zoo import Net, by_name, residual_net, run

from calibrate.plan import PrecisionPlan
from engines.graph.load import load_model
from engines.graph.passes import prepare
from engines.quantise.apply_plan import insert_qdq
from engines.quantise.fusion import Grouping, fusion_groups, node_macs
from engines.quantise.placement import place


def grouped(model: ModelProto) -> Grouping:
    """The groups of a model, with what holds of every grouping checked."""
    grouping = fusion_groups(model, place(model))
    nodes = [node for group in grouping.groups for node in group.nodes]
    order = {name: index for index, name in enumerate(by_name(model))}
    firsts = [order[group.name] for group in grouping.groups]
    assert len(nodes) == len(set(nodes))
    assert firsts == sorted(firsts)
    assert {layer for group in grouping.groups for layer in group.layers} == set(node_macs(model))
    assert sum(group.macs for group in grouping.groups) == sum(node_macs(model).values())
    assert all(group.name == group.layers[0] for group in grouping.groups)
    pairs = [edge[:2] for edge in grouping.edges]
    assert pairs == sorted(set(pairs))
    assert all(i < j and elements > 0 for i, j, elements in grouping.edges)
    return grouping


def layers_of(grouping: Grouping) -> list[tuple[str, ...]]:
    return [group.layers for group in grouping.groups]


def test_a_layer_its_activation_and_the_add_it_completes_are_one_group() -> None:
    grouping = grouped(residual_net())
    assert [group.nodes for group in grouping.groups] == [
        ("Conv_t0", "Relu_t1"),
        ("Conv_t2", "Relu_t3"),
        ("Conv_t4", "Add_t5", "Relu_t6"),
        ("Gemm_t9",),
    ]
    assert grouping.edges == ((0, 1, 256), (0, 2, 256), (1, 2, 256), (2, 3, 256))


def test_silu_is_fused_and_two_readers_of_one_tensor_stay_apart() -> None:
    net = Net((1, 3, 8, 8))
    stem = net.conv("image", 3, 4)
    silu = net.node("Mul", stem, net.node("Sigmoid", stem))
    grouping = grouped(net.model(net.conv(silu, 4, 4), net.conv(silu, 4, 2)))
    assert [group.nodes for group in grouping.groups] == [
        ("Conv_t0", "Sigmoid_t1", "Mul_t2"),
        ("Conv_t3",),
        ("Conv_t4",),
    ]


def test_an_add_belongs_to_the_layer_that_the_placement_lets_it_complete() -> None:
    net = Net((1, 4, 8, 8))
    early, first, second = (net.conv("image", 4, 4) for _ in range(3))
    sums = net.node("Add", net.node("Add", first, second), early)
    model = net.model(net.conv(net.node("Relu", sums), 4, 4))
    assert place(model).reads["Add_t4"] == (0,)  # `early` comes straight out of its convolution, the sum does not
    assert [group.nodes for group in grouped(model).groups][:3] == [
        ("Conv_t0", "Add_t4", "Relu_t5"),
        ("Conv_t1",),
        ("Conv_t2", "Add_t3"),
    ]


def test_an_add_whose_operands_have_other_readers_goes_with_the_later_one() -> None:
    net = Net((1, 4, 8, 8))
    first, second = net.conv("image", 4, 4), net.conv("image", 4, 4)
    block = net.node("Add", first, second)
    model = net.model(*(net.conv(tensor, 4, 4) for tensor in (first, second, block)))
    assert place(model).reads["Add_t2"] == (0, 1)
    assert grouped(model).groups[1].nodes == ("Conv_t1", "Add_t2")


def test_the_bias_of_a_matrix_product_is_fused() -> None:
    net = Net((1, 4))
    model = net.model(net.node("Relu", net.node("Add", net.node("MatMul", "image", net.weight(4, 6)), net.weight(6))))
    assert grouped(model).groups[0].nodes == ("MatMul_t0", "Add_t1", "Relu_t2")


def joined_net() -> ModelProto:
    """left -> (plain reader); left + right -> concat -> two readers."""
    net = Net((1, 4, 8, 8))
    left, right = net.node("Relu", net.conv("image", 4, 4)), net.node("Relu", net.conv("image", 4, 4))
    joined = net.node("Concat", left, right, axis=1)
    pooled = net.node("MaxPool", joined, kernel_shape=[2, 2], strides=[2, 2])
    return net.model(net.conv(left, 4, 4), net.conv(joined, 8, 2), net.conv(pooled, 8, 2))


def test_the_readers_of_a_concat_are_one_group_and_what_it_joins_is_not() -> None:
    model = joined_net()
    grouping = grouped(model)
    assert layers_of(grouping) == [("Conv_t0",), ("Conv_t2",), ("Conv_t6",), ("Conv_t7", "Conv_t8")]
    assert grouping.edges == ((0, 2, 256), (0, 3, 256), (1, 3, 256))
    assert grouping.owners["Concat_t4"] == grouping.owners["MaxPool_t5"] == (3,)
    assert grouping.readers["t1.int8"] == (2, 3)
    assert grouping.readers["t4.dequantised"] == (3,)


def test_readers_of_two_concats_under_one_scale_stay_apart() -> None:
    net = Net((1, 4, 8, 8))
    a, b, c = (net.node("Relu", net.conv("image", 4, 4)) for _ in range(3))
    first, second = net.node("Concat", a, b, axis=1), net.node("Concat", b, c, axis=1)
    model = net.model(net.conv(first, 8, 4), net.conv(second, 8, 4))
    assert len(place(model).groups[-1].taps) == 3
    assert [len(layers) for layers in layers_of(grouped(model))] == [1] * 5


def test_readers_of_a_concat_that_is_float_anyway_stay_apart() -> None:
    net = Net((1, 4, 8, 8))
    joined = net.node("Concat", net.node("Relu", "image"), net.node("Abs", "image"), axis=1)
    grouping = grouped(net.model(net.conv(joined, 8, 4), net.conv(joined, 8, 2), net.node("Sigmoid", joined)))
    assert [len(layers) for layers in layers_of(grouping)] == [1, 1]
    assert "Concat_t2" not in grouping.owners


def test_groups_that_feed_each_other_have_one_edge() -> None:
    net = Net((1, 4, 8, 8))
    a = net.node("Relu", net.conv("image", 4, 4))
    joined = net.node("Concat", a, "image", axis=1)
    inner = net.conv(net.node("Relu", net.conv(joined, 8, 4)), 4, 4)
    again = net.node("Concat", joined, inner, axis=1)
    grouping = grouped(net.model(net.conv(again, 12, 2)))
    assert layers_of(grouping) == [("Conv_t0",), ("Conv_t3", "Conv_t7"), ("Conv_t5",)]
    assert grouping.edges == ((0, 1, 256), (1, 2, 512))  # there and back


def test_groups_that_cannot_be_int8_are_fixed() -> None:
    net = Net((1, 4, 8, 8))
    scores = net.node("Reshape", net.conv("image", 4, 16), net.constant(np.array([1, 4, 16, 16])))
    bins = net.node("Transpose", net.node("Softmax", scores, axis=2), perm=[0, 2, 1, 3])
    expected = net.node("Conv", bins, net.weight(1, 16, 1, 1))
    grouping = grouped(net.model(expected, net.node("MatMul", "image", net.node("Relu", "image"))))
    assert [group.fixed for group in grouping.groups] == [
        "",
        "it reads probabilities: the expected value of a softmax is box decoding",
        "its weights are not constant, and no layer reads what it makes",
    ]


def test_nodes_without_an_int8_kernel_are_fixed() -> None:
    model = residual_net()
    grouping = fusion_groups(model, place(model, PrecisionPlan({"Conv_t4": "no INT8 kernel"})))
    assert [group.fixed for group in grouping.groups] == ["", "", "no INT8 kernel", ""]
    assert grouping.groups[2].nodes == ("Conv_t4", "Add_t5", "Relu_t6")
    assert grouping.plan([True] * 4, "planned") == {"Conv_t4": "no INT8 kernel"}


def test_the_models_own_int8_keeps_its_neighbours_apart() -> None:
    net = Net((1, 4, 8, 8))
    model = net.model(net.conv(net.conv(net.conv("image", 4, 4), 4, 4), 4, 4))
    placement = place(model, PrecisionPlan(dict.fromkeys(("Conv_t0", "Conv_t2"), "float for now")))
    own = insert_qdq(model, placement, dict.fromkeys(placement.taps, 4.0))
    grouping = fusion_groups(own, place(own))
    assert layers_of(grouping) == [("Conv_t0",), ("Conv_t2",)]
    assert grouping.edges == ()


def test_a_plan_gives_every_layer_its_groups_reason() -> None:
    grouping = grouped(joined_net())
    int8 = [True, True, True, False]
    assert grouping.plan(int8, "planned") == {"Conv_t7": "planned", "Conv_t8": "planned"}
    assert grouping.plan(int8, {"Conv_t7": "too sensitive"}) == dict.fromkeys(("Conv_t7", "Conv_t8"), "too sensitive")
    with pytest.raises(ValueError, match="shorter"):
        grouping.plan([True], "planned")


JOINED = joined_net()
GROUPING = grouped(JOINED)


@given(st.lists(st.booleans(), min_size=len(GROUPING.groups), max_size=len(GROUPING.groups)))
def test_tensors_and_nodes_of_a_group_are_int8_exactly_when_it_is(int8: list[bool]) -> None:
    placement = place(JOINED, PrecisionPlan(GROUPING.plan(int8, "planned")))
    for group, is_int8 in zip(GROUPING.groups, int8, strict=True):
        assert {layer in placement.quantised for layer in group.layers} == {is_int8}
    for moving in ("Concat_t4", "MaxPool_t5"):
        (owner,) = GROUPING.owners[moving]
        assert (moving in placement.quantised) is int8[owner]


@pytest.mark.parametrize(
    ("name", "groups", "joined"),
    [
        pytest.param("cls_resnet20_cifar10", 20, [], marks=pytest.mark.trial),
        ("det_fastestdet_352_coco80", 58, [13]),  # ShuffleNet: what splits a concat feeds the next one
        pytest.param(
            "det_yolox_nano_416_coco80", 109, [2, 2, 2, 2], marks=pytest.mark.trial
        ),  # the CSP blocks of the neck
        pytest.param("face_ultraface_rfb_320", 52, [], marks=pytest.mark.trial),
    ],
)
def test_real_models(name: str, groups: int, joined: list[int], shared_data: Path) -> None:
    grouping = grouped(prepare(load_model(shared_data / f"{name}_fp32.onnx"), run))
    assert len(grouping.groups) == groups
    assert [len(group.layers) for group in grouping.groups if len(group.layers) > 1] == joined
    assert not any(group.fixed for group in grouping.groups)
