from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper, numpy_helper
from zoo import Net, by_name, residual_net

from engines.backend import EngineError
from engines.graph import load_model
from engines.half import MIN_OPSET, HalfForm, half_precision
from engines.passes import PASSES
from engines.placement import place
from engines.qdq import insert_qdq
from engines.topology import Topology, tensor_types

Arrays = dict[str, NDArray[Any]]
Batches = list[NDArray[np.float32]]
FLOAT, HALF = TensorProto.FLOAT, TensorProto.FLOAT16
MODELS = ("cls_resnet20_cifar10", "det_fastestdet_352_coco80", "det_yolox_nano_416_coco80", "face_ultraface_rfb_320")


# ---- graphs


def concat_net() -> ModelProto:
    net = Net((1, 4, 8, 8))
    parts = [net.node("Relu", net.conv("image", 4, 4)), net.node("MaxPool", "image", kernel_shape=[1, 1])]
    return net.model(net.conv(net.node("Concat", *parts, axis=1), 8, 2))


def upsampling_net() -> ModelProto:
    """ConvTranspose, nearest and linear Resize with the scales that ONNX wants in float32, grouped convolution."""
    net = Net((1, 4, 8, 8))
    up = net.node("ConvTranspose", "image", net.weight(4, 3, 2, 2), net.weight(6), strides=[2, 2], group=2)
    scales = net.constant(np.array([1, 1, 2, 2], np.float32))
    near = net.node("Resize", net.node("LeakyRelu", up), "", scales)
    grouped = net.conv(near, 6, 6, group=2)
    return net.model(net.node("Resize", grouped, "", scales, mode="linear"))


def silu_net() -> ModelProto:
    net = Net((1, 4, 8, 8))
    x = net.conv("image", 4, 8)
    x = net.node("Mul", x, net.node("Sigmoid", x))
    return net.model(net.conv(x, 8, 4))


def attention_net() -> ModelProto:
    """Two tokens' worth of a transformer: MatMul with and without weights, LayerNormalization, Softmax, Gelu by Erf."""
    net = Net((1, 4, 4, 4))
    tokens = net.node("Reshape", "image", net.constant(np.array([1, 4, 16], np.int64)))
    norm = net.node("LayerNormalization", tokens, net.weight(16), net.weight(16))
    q, k, v = (net.node("MatMul", norm, net.weight(16, 16)) for _ in range(3))
    scores = net.node("MatMul", q, net.node("Transpose", k, perm=[0, 2, 1]))
    scaled = net.node("Div", scores, net.constant(np.array(16, np.float32)))
    mixed = net.node("MatMul", net.node("Softmax", scaled), v)
    x = net.node("Add", mixed, tokens)
    half = net.node("Mul", x, net.constant(np.array(0.5, np.float32)))
    gelu = net.node("Mul", half, net.node("Erf", x))
    return net.model(net.node("MatMul", gelu, net.weight(16, 3)), opset=17)


def classifier_net() -> ModelProto:
    """Open batch and size, a stem that normalises in the graph, pooling by ReduceMean, probabilities."""
    net = Net(("n", 3, "h", "w"))
    x = net.node("Sub", "image", net.constant(np.full((1, 3, 1, 1), 0.4, np.float32)))
    x = net.node("Relu", net.norm(net.conv(x, 3, 8), 8))
    pooled = net.node("ReduceMean", x, axes=[2, 3], keepdims=0)
    return net.model(net.node("Softmax", net.node("Gemm", pooled, net.weight(8, 5), net.weight(5))))


def detector_net() -> ModelProto:
    """A convolution's feature map read as boxes and scores: grid from shapes, exp, strides, the best four."""
    net = Net((1, 3, 16, 16))
    x = net.node("Relu", net.conv("image", 3, 8))
    flat = net.constant(np.array([0, 5, -1], np.int64))
    rows = net.node("Transpose", net.node("Reshape", net.conv(x, 8, 5), flat), perm=[0, 2, 1])
    count = net.node("Gather", net.node("Shape", rows), net.constant(np.array(1, np.int64)))
    zero, one = net.constant(np.array(0, np.int64)), net.constant(np.array(1, np.int64))
    grid = net.node("Cast", net.node("Range", zero, count, one), to=FLOAT)
    grid = net.node("Unsqueeze", grid, net.constant(np.array([0, 2], np.int64)))
    xy, wh, score = net.node("Split", rows, net.constant(np.array([2, 2, 1], np.int64)), outputs=3, axis=2), "", ""
    wh, score = f"{xy}_1", f"{xy}_2"
    centre = net.node("Mul", net.node("Add", xy, grid), net.constant(np.array(8, np.float32)))
    size = net.node("Exp", net.node("Clip", wh, "", net.constant(np.array(3, np.float32))))
    best = net.node("TopK", net.node("Sigmoid", score), net.constant(np.array([4], np.int64)), axis=1, outputs=2)
    return net.model(net.node("Concat", centre, size, axis=2), best)


def branching_net() -> ModelProto:
    """An If whose bodies capture a feature map and a weight that the main graph reads too."""
    net = Net((1, 4, 8, 8))
    x = net.node("Relu", net.conv("image", 4, 4))
    weight = net.weight(4, 4, 1, 1)
    y = net.node("Conv", x, weight)
    bodies = []
    for name, operator in (("plus", "Add"), ("minus", "Sub")):
        product = helper.make_node("Conv", [x, weight], [f"{name}_c"], name=f"{name}_conv")
        mean = helper.make_node("ReduceMean", [f"{name}_c"], [f"{name}_m"], name=f"{name}_mean", axes=[1])
        node = helper.make_node(operator, [f"{name}_m", y], [name], name=f"{name}_node")
        result = helper.make_tensor_value_info(name, FLOAT, None)
        bodies.append(helper.make_graph([product, mean, node], name, [], [result]))
    total = net.node("ReduceSum", "image", keepdims=0)
    positive = net.node("Greater", total, net.constant(np.array(0, np.float32)))
    chosen = net.node("If", positive, then_branch=bodies[0], else_branch=bodies[1])
    model = net.model(net.node("Conv", chosen, net.weight(2, 4, 1, 1)))
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info(model.graph.output[0].name, FLOAT, [1, 2, 8, 8]))
    return model


NETS: dict[str, Callable[[], ModelProto]] = {
    "residual": residual_net,
    "concat": concat_net,
    "upsampling": upsampling_net,
    "silu": silu_net,
    "attention": attention_net,
    "classifier": classifier_net,
    "detector": detector_net,
    "branching": branching_net,
}


# ---- running, quantising, judging


def run(model: ModelProto, batches: Batches, *taps: str) -> Arrays:
    """Outputs and taps by name, stacked. Q/DQ runs as written; ONNX Runtime's fusions refuse float16 scales."""
    watched = stored(model)
    watched.graph.output.extend(helper.make_tensor_value_info(tap, FLOAT, None) for tap in taps)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    session = onnxruntime.InferenceSession(watched.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names, image_name = [output.name for output in model.graph.output] + list(taps), session.get_inputs()[0].name
    results = [session.run(names, {image_name: batch}) for batch in batches]
    return {name: np.stack(values) for name, values in zip(names, zip(*results, strict=True), strict=True)}


def stored(model: ModelProto) -> ModelProto:
    """The graph with every float16 tensor passed through an Identity and made an output.

    ONNX Runtime computes most operators in float32 on the CPU, and leaves out what it can of casts to float16 and
    back. Outputs it has to round.
    """
    types, copy = tensor_types(model), ModelProto()
    copy.CopyFrom(model)
    del copy.graph.node[:]
    for node in model.graph.node:
        copy.graph.node.append(node)
        written = copy.graph.node[-1]
        for index, name in enumerate(node.output):
            if name in types and types[name].elem_type == HALF:
                written.output[index] = f"{name}.computed"
                copy.graph.node.append(helper.make_node("Identity", [f"{name}.computed"], [name]))
                copy.graph.output.append(helper.make_tensor_value_info(name, HALF, None))
    return copy


def measure(model: ModelProto, batches: Batches, tensors: Sequence[str]) -> dict[str, float]:
    """The largest |x| of tensors of a graph."""
    topology = Topology(model)
    hidden = [tensor for tensor in tensors if tensor not in (*topology.outputs, *topology.inputs)]
    values = {topology.inputs[0]: np.stack(batches)} | run(model, batches, *hidden)
    return {tensor: float(np.abs(values[tensor]).max()) for tensor in tensors}


def quantise(model: ModelProto, batches: Batches) -> tuple[ModelProto, dict[str, float]]:
    """The graph with Q/DQ by the maximum, and the amax of its taps."""
    placement = place(model)
    amax = measure(model, batches, placement.taps)
    return insert_qdq(model, placement, amax), amax


def batches_for(model: ModelProto, count: int = 64) -> Batches:
    """Images in [0, 1) of the model's input shape; open sizes are 8, the batch 1."""
    dims = model.graph.input[0].type.tensor_type.shape.dim
    sizes = [dim.dim_value or (8 if axis else 1) for axis, dim in enumerate(dims)]
    return list(np.random.default_rng(1).random((count, *sizes), np.float32))


def master(path: Path) -> ModelProto:
    model = load_model(path)
    for step in PASSES:
        model = step(model)
    return model


def noise_db(reference: Arrays, found: Arrays) -> float:
    """The worst output's noise over signal, in dB."""
    assert reference.keys() == found.keys()
    worst = -np.inf
    for name, values in reference.items():
        assert found[name].dtype == values.dtype
        assert found[name].shape == values.shape
        noise = np.square(found[name].astype(np.float64) - values).sum()
        worst = max(worst, 10 * np.log10(max(noise, 1e-30) / np.square(values.astype(np.float64)).sum()))
    return float(worst)


def conv_types(form: HalfForm) -> dict[str, set[int]]:
    """Per convolution and matrix product the types of all it reads and makes."""
    types = tensor_types(form.model)
    return {
        node.name: {types[name].elem_type for name in (*node.input, *node.output)}
        for node in form.model.graph.node
        if node.op_type in ("Conv", "ConvTranspose", "Gemm", "MatMul")
    }


def assert_well_formed(form: HalfForm, graph: ModelProto) -> None:
    """What holds for every form, whatever its graph."""
    onnx.checker.check_model(form.model, full_check=True)
    assert [v.SerializeToString() for v in form.model.graph.input] == [v.SerializeToString() for v in graph.graph.input]
    assert [v.SerializeToString() for v in form.model.graph.output] == [
        v.SerializeToString() for v in graph.graph.output
    ]
    nodes = by_name(form.model)
    assert len(nodes) == len(form.model.graph.node)
    assert {node.name for node in graph.graph.node} <= nodes.keys()
    assert form.floats.keys() <= {node.name for node in graph.graph.node}
    topology, types = Topology(form.model), tensor_types(form.model)
    for name, found in conv_types(form).items():
        assert found == {FLOAT if name in form.floats else HALF}
    quantised = [node.input[0] for node in topology.nodes if node.op_type == "QuantizeLinear"]
    assert len(quantised) == len(set(quantised))
    added = [node for node in topology.nodes if node.op_type == "Cast" and node.name not in by_name(graph)]
    assert len({node.input[0] for node in added}) == len(added)  # a tensor is made in one type: cast once
    for node in added:
        maker = topology.producers.get(node.input[0])
        assert maker is None or (maker not in added and maker.op_type != "DequantizeLinear")
    for node in topology.nodes:
        if node.op_type == "DequantizeLinear":
            assert types[node.input[1]].elem_type == types[node.output[0]].elem_type
            assert not numpy_helper.to_array(topology.initializers[node.input[2]]).any()
            assert topology.initializers[node.input[2]].data_type == TensorProto.INT8


# ---- every graph, with and without Q/DQ


@pytest.mark.parametrize("name", NETS)
def test_the_float16_form_is_typed_throughout_and_agrees_with_the_float_model(name: str) -> None:
    model = NETS[name]()
    before = model.SerializeToString()
    form = half_precision(model, {})
    assert model.SerializeToString() == before
    assert half_precision(model, {}).model.SerializeToString() == form.model.SerializeToString()
    assert_well_formed(form, model)
    assert any(HALF in types for types in conv_types(form).values())
    batches = batches_for(model)
    # 11 bits: -68 dB for one rounding; a handful of layers add up, and cancellation costs some.
    assert noise_db(run(model, batches), run(form.model, batches)) < -50


@pytest.mark.parametrize("name", NETS)
def test_with_qdq_it_loses_no_more_than_int8_itself(name: str) -> None:
    model = NETS[name]()
    batches = batches_for(model)
    graph, amax = quantise(model, batches)
    form = half_precision(graph, amax)
    assert_well_formed(form, graph)
    expected = run(model, batches)
    assert noise_db(expected, run(form.model, batches)) < noise_db(expected, run(graph, batches)) + 1
    # A value near the middle of an INT8 step may fall to either side: some steps differ, most do not.
    assert noise_db(run(graph, batches), run(form.model, batches)) < -25


@pytest.mark.parametrize("model_name", MODELS)
@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_real_models(model_name: str, precision: str, shared_data: Path) -> None:
    model = master(shared_data / f"{model_name}_fp32.onnx")
    batches = real_batches(model, model_name)
    quantised, amax = quantise(model, batches)
    graph = quantised if precision == "int8" else model
    form = half_precision(graph, amax)
    assert_well_formed(form, graph)
    assert not conv_types(form).keys() & form.floats.keys()
    expected, found = run(model, batches), run(form.model, batches)
    if precision == "fp16":
        assert noise_db(expected, found) < -35  # up to 113 convolutions one after another
    else:
        assert noise_db(expected, found) < noise_db(expected, run(quantised, batches)) + 1
    assert casts(form.model) <= {"fp16": 4, "int8": 3}[precision]


def real_batches(model: ModelProto, name: str) -> Batches:
    """Random images in the range that the model's preprocessing gives: yolox takes bytes as they are."""
    return [batch * (255 if "yolox" in name else 1) for batch in batches_for(model, 16 if "cifar" in name else 2)]


def casts(model: ModelProto) -> int:
    return sum(node.op_type == "Cast" for node in model.graph.node)


# ---- what stays float32, and why


def eps_net() -> ModelProto:
    """Layer normalisation as exporters write it out, between two convolutions."""
    net = Net((1, 4, 8, 8))
    x = net.conv("image", 4, 4)
    centred = net.node("Sub", x, net.node("ReduceMean", x, axes=[1]))
    variance = net.node("ReduceMean", net.node("Mul", centred, centred), axes=[1])
    root = net.node("Sqrt", net.node("Add", variance, net.constant(np.array(1e-6, np.float32))))
    return net.model(net.conv(net.node("Div", centred, root), 4, 2))


def segmentation_net() -> ModelProto:
    """One head ends in movement and a bounded activation, the other in arithmetic on the way."""
    net = Net((1, 4, 8, 8))
    x = net.conv("image", 4, 4)
    large = net.node("Resize", x, "", net.constant(np.array([1, 1, 4, 4], np.float32)), mode="linear")
    depth = net.node("Mul", net.node("Sigmoid", x), net.constant(np.array(80, np.float32)))
    return net.model(net.node("Sigmoid", large), net.node("Transpose", depth, perm=[0, 2, 3, 1]))


def foreign_net() -> ModelProto:
    """Operators that ONNX defines for float32 only: Celu's data, the boxes and scores of NonMaxSuppression."""
    net = Net((1, 4, 4, 4))
    x = net.node("Conv", net.node("Celu", net.conv("image", 4, 4)), net.weight(4, 4, 1, 1))
    rows = net.node("Reshape", x, net.constant(np.array([1, 4, 16], np.int64)))
    boxes = net.node("Transpose", rows, perm=[0, 2, 1])
    best, overlap = net.constant(np.array([3], np.int64)), net.constant(np.array([1], np.float32))
    chosen = net.node("NonMaxSuppression", boxes, rows, best, overlap)
    return net.model(net.node("Cast", chosen, to=FLOAT))


def identity_matrix_net() -> ModelProto:
    """An operator whose result has a type of its own, whatever it reads."""
    net = Net((1, 4, 8, 8))
    x = net.node("Reshape", net.conv("image", 4, 4), net.constant(np.array([16, 16], np.int64)))
    return net.model(net.node("MatMul", net.node("Add", x, net.node("EyeLike", x)), net.weight(16, 4)))


def limits_net() -> ModelProto:
    """Clip without a real limit, a mask of -inf, a bias of nothing, and a fill value beyond float16."""
    net = Net((1, 4, 8, 8))
    bias = net.constant(np.full(4, 1e-9, np.float32))
    x = net.node("Conv", "image", net.weight(4, 4, 1, 1), bias)
    x = net.node("Clip", x, net.constant(np.array(0, np.float32)), net.constant(np.array(3.4e38, np.float32)))
    x = net.node("Max", x, net.constant(np.array(-np.inf, np.float32)))
    x = net.conv(x, 4, 4)
    x = net.node("Min", x, net.constant(np.array(1e6, np.float32)))
    return net.model(net.conv(x, 4, 2))


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (residual_net, {}),
        (silu_net, {}),
        (upsampling_net, {}),
        (
            eps_net,
            {
                "Mul_t3": "squares leave",
                "ReduceMean_t4": "between",
                "Add_t5": "constant 'c2' is 1e-06",
                "Sqrt_t6": "Sqrt loses",
            },
        ),
        (segmentation_net, {"Mul_t3": "decoding", "Transpose_t5": "decoding"}),
        (
            foreign_net,
            {"Celu_t1": "not define Celu", "NonMaxSuppression_t5": "not define", "Cast_t6": "shapes and const"},
        ),
        (identity_matrix_net, {"EyeLike_t2": "not define"}),
        (limits_net, {"Min_t4": "constant 'c7' holds 1e+06"}),
    ],
)
def test_what_stays_float32_and_why(make: Callable[[], ModelProto], expected: dict[str, str]) -> None:
    model = make()
    form = half_precision(model, {})
    assert_well_formed(form, model)
    assert list(form.floats) == list(expected)  # in graph order
    for name, reason in form.floats.items():
        assert expected[name] in reason
    batches = batches_for(model, 4)
    assert noise_db(run(model, batches), run(form.model, batches)) < -45


def test_a_limit_beyond_float16_becomes_its_largest_and_infinity_stays() -> None:
    constants = {t.name: numpy_helper.to_array(t) for t in half_precision(limits_net(), {}).model.graph.initializer}
    assert {constants[name].dtype for name in ("c3", "c4")} == {np.dtype(np.float16)}
    assert (constants["c3"], constants["c4"]) == (65504, -np.inf)


def loud_net() -> ModelProto:
    """A feature map beyond float16, a convolution that brings it back, and a quiet branch beside it."""
    net = Net((1, 4, 8, 8))
    loud = net.node("Relu", net.node("Conv", "image", net.constant(np.full((4, 4, 1, 1), 5e4, np.float32))))
    calm = net.constant((net.rng.normal(size=(4, 4, 1, 1)) / 1e3).astype(np.float32))
    return net.model(net.node("Conv", loud, calm), net.conv("image", 4, 2))


@pytest.mark.parametrize("measured", [("image",), ("t0",), ("t1",), ("image", "t0", "t1")])
def test_a_map_beyond_float16_keeps_its_layers_float32(measured: tuple[str, ...]) -> None:
    """Measured itself, or proven from a measurement before it."""
    model = loud_net()
    batches = batches_for(model)
    expected = run(model, batches)
    assert not half_precision(model, {}).floats  # no measurement, no reason
    assert not np.isfinite(run(half_precision(model, {}).model, batches)["t2"]).all()
    form = half_precision(model, measure(model, batches, measured))
    assert_well_formed(form, model)
    assert "Conv_t3" not in form.floats
    assert noise_db(expected, run(form.model, batches)) < -50
    quantised, _ = quantise(model, batches)
    int8 = half_precision(quantised, {})  # the INT8 scale tells
    assert_well_formed(int8, quantised)
    assert int8.floats.keys() == form.floats.keys() == {"Conv_t0", "Relu_t1", "Conv_t2"}
    assert noise_db(expected, run(int8.model, batches)) < -30


def test_a_tensor_and_a_weight_that_both_kinds_read_exist_in_both_types() -> None:
    net = Net((1, 4, 8, 8))
    x = net.node("Relu", "image")
    weight = net.weight(4, 4, 1, 1)
    loud = net.constant(np.full((4, 4, 1, 1), 1e5, np.float32))
    bias = net.constant(np.zeros(4, np.float32))
    outputs = [net.node("Conv", x, weight, bias), net.node("Conv", x, loud, bias), net.node("Conv", x, weight)]
    model = net.model(*outputs)
    batches = batches_for(model)
    graph, amax = quantise(model, batches)
    for master_graph, limit in ((model, -60), (graph, -30)):
        form = half_precision(master_graph, amax)
        assert_well_formed(form, master_graph)
        assert form.floats.keys() - {"Relu_t0"} == {"Conv_t2"}
        assert noise_db(run(model, batches), run(form.model, batches)) < limit
    nodes = by_name(form.model)
    assert nodes["Conv_t1"].input[0] == nodes["Conv_t3"].input[0] == "t0.dequantised"
    assert nodes["Conv_t2"].input[0] == "t0.dequantised.float"
    assert nodes["t0.int8"].input[0] == "t0"
    values = {t.name: numpy_helper.to_array(t) for t in form.model.graph.initializer}
    assert values["t0.scale"].dtype == np.float16
    assert values["t0.scale"] == values["t0.scale.float"]  # one grid, whoever reads it
    assert values["c2"].dtype == np.float16
    assert values["c2.float"].dtype == np.float32


def test_what_a_model_casts_itself_and_what_it_only_counts_needs_no_cast() -> None:
    net = Net((1, 4, 8, 8))
    x = net.node("Cast", net.node("Cast", net.conv("image", 4, 4), to=HALF), to=FLOAT)
    best = net.node("ArgMax", net.node("Softmax", x, axis=1), axis=1)
    shape = net.node("Shape", x)
    model = net.model(net.conv(x, 4, 2), net.node("Cast", best, to=FLOAT), net.node("Cast", shape, to=FLOAT))
    form = half_precision(model, {})
    assert_well_formed(form, model)
    assert [node.name for node in form.model.graph.node if node.op_type == "Cast"] == [
        "image.cast", "Cast_t1", "Cast_t2", "t2.cast", "t6.cast", "Cast_t7", "Cast_t8",
    ]  # fmt: skip
    batches = batches_for(model, 4)
    assert noise_db(run(model, batches), run(form.model, batches)) < -50


def test_names_that_are_taken_are_left_alone() -> None:
    net = Net((1, 4, 8, 8))
    x = net.conv("image", 4, 4)
    model = net.model(net.node("Relu", x), net.conv(x, 4, 2))
    model.graph.node[0].output[0] = model.graph.node[1].input[0] = model.graph.node[2].input[0] = "image.half"
    model.graph.node[1].name = "image.cast"
    form = half_precision(model, {})
    assert_well_formed(form, model)
    batches = batches_for(model, 4)
    assert noise_db(run(model, batches), run(form.model, batches)) < -60


def test_inferred_types_that_a_graph_carries_follow() -> None:
    model = onnx.shape_inference.infer_shapes(residual_net())
    form = half_precision(model, {})
    assert_well_formed(form, model)
    declared = {value.name: value.type.tensor_type.elem_type for value in form.model.graph.value_info}
    assert len(declared) == len(model.graph.value_info)
    assert set(declared.values()) == {HALF}


# ---- opsets


def test_qdq_is_raised_to_the_opset_with_float16_scales() -> None:
    model = classifier_net()  # its ReduceMean has the axes as attribute before opset 18
    graph, amax = quantise(model, batches_for(model))
    form = half_precision(graph, amax)
    assert form.model.opset_import[0].version == MIN_OPSET
    assert form.model.ir_version >= 9  # the first that may declare it
    nodes, types = by_name(form.model), tensor_types(form.model)
    assert nodes["ReduceMean_t4"].input[1:]
    # From opset 15 on ONNX gives its parameters types of their own; TensorRT folds them only in that of the data.
    assert {types[name].elem_type for name in nodes["BatchNormalization_t2"].input} == {HALF}
    assert all(node.name for node in form.model.graph.node)


def test_other_opsets_stay() -> None:
    assert half_precision(residual_net(), {}).model.opset_import[0].version == 13
    newer = residual_net()
    newer.opset_import[0].version = 21
    assert half_precision(quantise(newer, batches_for(newer))[0], {}).model.opset_import[0].version == 21


def test_refuses_qdq_that_cannot_be_raised() -> None:
    graph, _ = quantise(residual_net(), batches_for(residual_net()))
    graph.graph.node[-1].op_type = "Frobnicate"
    with pytest.raises(EngineError, match=r"model\.opset: opset 13, which onnx cannot raise.*Frobnicate"):
        half_precision(graph, {})


def test_refuses_a_graph_whose_shapes_contradict_one_another() -> None:
    model = residual_net()
    model.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 7
    with pytest.raises(EngineError, match=r"model\.half"):
        half_precision(model, {})


# ---- NVIDIA's builder


def built_layers(model: ModelProto) -> dict[str, set[str]]:
    """Per ONNX node the types in which the builder's matrix kernels read their largest operand."""
    trt = pytest.importorskip("tensorrt_rtx")

    class Log(trt.ILogger):  # type: ignore[misc]  # no type information
        def __init__(self) -> None:
            super().__init__()
            self.messages: list[str] = []

        def log(self, _severity: object, message: str) -> None:
            self.messages.append(message)

    log = Log()
    builder = trt.Builder(log)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, log)
    assert parser.parse(model.SerializeToString()), [parser.get_error(i).desc() for i in range(parser.num_errors)]
    config = builder.create_builder_config()
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.SM86, 0)
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    shape = tuple(network.get_input(0).shape)
    if -1 in shape:
        fixed = tuple(size if size > 0 else (8 if axis else 1) for axis, size in enumerate(shape))
        profile = builder.create_optimization_profile()
        profile.set_shape(network.get_input(0).name, fixed, fixed, fixed)
        config.add_optimization_profile(profile)
    assert builder.build_serialized_network(network, config) is not None, log.messages[-3:]
    listing = next(message for message in log.messages if message.startswith("Layers:"))
    found: dict[str, set[str]] = {}
    for line in listing.splitlines():
        if re.search("LayerType: (correlation|runtime_fusion|gemm|convolution|matrix)", line):
            constants = line.partition("Constants:")[2].partition("Outputs:")[0]
            operands = re.findall(r"Dimensions: \[([\d,]*)\].*?Datatype: (\w+)", constants)
            if operands:  # else a product of two activations
                weight = max(operands, key=lambda operand: np.prod([int(size) for size in operand[0].split(",")]))
                for name in re.findall(r"\[ONNX Layer: ([^\]]*)\]", line):
                    found.setdefault(name, set()).add(weight[1])
    return found


def assert_built_as_written(form: HalfForm) -> int:
    """The number of convolutions that were found in the builder's listing, each with weights of the right type."""
    layers = built_layers(form.model)
    quantised = {node.output[0] for node in form.model.graph.node if node.op_type == "DequantizeLinear"}
    judged = 0
    for node in form.model.graph.node:
        if node.op_type in ("Conv", "ConvTranspose") and node.name in layers:
            expected = "Int8" if node.input[1] in quantised else "Float" if node.name in form.floats else "Half"
            assert layers[node.name] == {expected}, node.name
            judged += 1
    return judged


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_tensorrt_builds_what_is_written(name: str, precision: str) -> None:
    model = NETS[name]()
    graph, amax = quantise(model, batches_for(model))
    layers = assert_built_as_written(half_precision(graph if precision == "int8" else model, amax))
    assert layers > 0 or name == "attention"  # which has none


def test_tensorrt_computes_in_float32_what_must_be() -> None:
    model = loud_net()
    form = half_precision(model, measure(model, batches_for(model), ("image",)))
    assert form.floats.keys() >= {"Conv_t0", "Conv_t2"}
    assert assert_built_as_written(form) == 3


@pytest.mark.parametrize("model_name", MODELS)
@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_tensorrt_builds_real_models_as_written(model_name: str, precision: str, shared_data: Path) -> None:
    model = master(shared_data / f"{model_name}_fp32.onnx")
    quantised, amax = quantise(model, real_batches(model, model_name))
    form = half_precision(quantised if precision == "int8" else model, amax)
    convolutions = sum(node.op_type == "Conv" for node in model.graph.node)
    assert assert_built_as_written(form) > 0.9 * convolutions
