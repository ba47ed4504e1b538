"""Graphs for the tests of the float16 form, and what those tests share: running, quantising, comparing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper, numpy_helper
from transformer_nets import decoder_head, deformable_piece, position_sensitive_attention, vit_block
from zoo import Net, Shape, by_name, residual_net, rounds_half

from benchmarks.half import run as run_batches
from calibrate.noise import worst_sqnr_db
from engines.graph.load import load_model
from engines.graph.passes import PASSES
from engines.graph.taps import expose
from engines.graph.topology import Topology, tensor_types
from engines.half.convert import HalfForm
from engines.quantise.apply_plan import insert_qdq
from engines.quantise.placement import place

Arrays = dict[str, NDArray[Any]]
Batches = list[NDArray[np.float32]]
FLOAT, HALF = TensorProto.FLOAT, TensorProto.FLOAT16
MODELS = ("cls_resnet20_cifar10", "det_fastestdet_352_coco80", "det_yolox_nano_416_coco80", "face_ultraface_rfb_320")


def real_models(tried: str) -> list[object]:
    """The real models as parameters: the default suite tries one, the trials the others."""
    return [pytest.param(name, marks=[] if name == tried else pytest.mark.trial) for name in MODELS]


# ---- graphs


def concat_net(shape: Shape = (1, 4, 8, 8)) -> ModelProto:
    net = Net(shape)
    parts = [net.node("Relu", net.conv("image", 4, 4)), net.node("MaxPool", "image", kernel_shape=[1, 1])]
    return net.model(net.conv(net.node("Concat", *parts, axis=1), 8, 2))


def upsampling_net(shape: Shape = (1, 4, 8, 8)) -> ModelProto:
    """ConvTranspose, nearest and linear Resize with the scales that ONNX wants in float32, grouped convolution."""
    net = Net(shape)
    up = net.node("ConvTranspose", "image", net.weight(4, 3, 2, 2), net.weight(6), strides=[2, 2], group=2)
    scales = net.constant(np.array([1, 1, 2, 2], np.float32))
    near = net.node("Resize", net.node("LeakyRelu", up), "", scales)
    grouped = net.conv(near, 6, 6, group=2)
    return net.model(net.node("Resize", grouped, "", scales, mode="linear"))


def silu_net(shape: Shape = (1, 4, 8, 8)) -> ModelProto:
    net = Net(shape)
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
    xy = net.node("Split", rows, net.constant(np.array([2, 2, 1], np.int64)), outputs=3, axis=2)
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


def loud_net() -> ModelProto:
    """A feature map beyond float16, a convolution that brings it back, and a quiet branch beside it."""
    net = Net((1, 4, 8, 8))
    loud = net.node("Relu", net.node("Conv", "image", net.constant(np.full((4, 4, 1, 1), 5e4, np.float32))))
    calm = net.constant((net.rng.normal(size=(4, 4, 1, 1)) / 1e3).astype(np.float32))
    return net.model(net.node("Conv", loud, calm), net.conv("image", 4, 2))


NETS: dict[str, Callable[[], ModelProto]] = {
    "residual": residual_net,
    "concat": concat_net,
    "upsampling": upsampling_net,
    "silu": silu_net,
    "attention": attention_net,
    "classifier": classifier_net,
    "detector": detector_net,
    "branching": branching_net,
    "vit": vit_block,
    "yolo11": position_sensitive_attention,
    "deformable": deformable_piece,
    "decoder": decoder_head,
}


# ---- running, quantising, comparing


def run(model: ModelProto, batches: Batches, *taps: str) -> Arrays:
    """Outputs and taps by name, stacked; every float16 tensor is rounded as it is made.

    Skips the test where ONNX Runtime cannot say: 1.23, the last for Python 3.10, truncates where it should round.
    """
    types = tensor_types(model)
    quantised = [node.input[0] for node in model.graph.node if node.op_type == "QuantizeLinear"]
    if any(types[name].elem_type == HALF for name in quantised) and not rounds_half():
        pytest.skip(f"ONNX Runtime {ort.__version__} truncates in QuantizeLinear of float16")
    results = run_batches(expose(model, taps), batches)
    return {name: np.stack([result[name] for result in results]) for name in results[0]}


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


def real_batches(model: ModelProto, name: str) -> Batches:
    """Random images in the range that the model's preprocessing gives: yolox takes bytes as they are."""
    return [batch * (255 if "yolox" in name else 1) for batch in batches_for(model, 16 if "cifar" in name else 2)]


def noise_db(reference: Arrays, found: Arrays) -> float:
    """The worst output's noise over signal, in dB; infinite where a value is not finite."""
    assert {name: (values.dtype, values.shape) for name, values in found.items()} == {
        name: (values.dtype, values.shape) for name, values in reference.items()
    }
    return -worst_sqnr_db(reference, found)


def conv_types(form: HalfForm) -> dict[str, set[int]]:
    """Per convolution and matrix product the types of all it reads and makes."""
    types = tensor_types(form.model)
    return {
        node.name: {types[name].elem_type for name in (*node.input, *node.output)}
        for node in form.model.graph.node
        if node.op_type in ("Conv", "ConvTranspose", "Gemm", "MatMul")
    }


def assert_well_formed(form: HalfForm, graph: ModelProto) -> None:
    """Check the rules of every form."""
    onnx.checker.check_model(form.model, full_check=True)
    assert [v.SerializeToString() for v in form.model.graph.input] == [v.SerializeToString() for v in graph.graph.input]
    assert [v.SerializeToString() for v in form.model.graph.output] == [
        v.SerializeToString() for v in graph.graph.output
    ]
    nodes = by_name(form.model)
    assert len(nodes) == len(form.model.graph.node)
    assert {node.name for node in graph.graph.node} <= nodes.keys()
    assert form.float32.keys() <= {node.name for node in graph.graph.node}
    topology, types = Topology(form.model), tensor_types(form.model)
    for name, found in conv_types(form).items():
        assert found == {FLOAT if name in form.float32 else HALF}
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
