"""The float16 form in NVIDIA's builder, by the backend's own path: every layer computes in the type written."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
from half_zoo import (
    MODELS,
    NETS,
    batches_for,
    loud_net,
    master,
    quantise,
    real_batches,
)
from onnx import ModelProto

from engines.graph.topology import COMPUTE_OPS, Topology
from engines.interface import BackendOptions, BuildRequest, Built, Profile
from engines.trt.backend import TensorRtBackend
from engines.trt.layers import LAYERS_FILE, layers_from_json

pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has wheels for x86-64 only")

TARGETS = ("sm80", "sm86", "sm89")
PRECISIONS = ("fp16", "int8")
# "kgen" layers hold what is fused around products, and very small products; the inspector does not say which.
COMPUTING = {"correlation", "deconv", "gemm", "runtime_fusion"}


def build(
    graph: ModelProto,
    precision: str,
    amax: Mapping[str, float],
    target: str = "sm86",
    profiles: tuple[Profile, ...] = (),
) -> Built:
    dims = graph.graph.input[0].type.tensor_type.shape.dim
    shape = tuple(dim.dim_value or (8 if axis else 1) for axis, dim in enumerate(dims))
    request = BuildRequest(graph, precision, input_shape=shape, profiles=profiles, amax=amax)
    return TensorRtBackend(BackendOptions(target=target)).build(request)


def assert_built_as_written(graph: ModelProto, built: Built) -> dict[str, str]:
    """The type that each convolution and matrix product found in the listing computes in, by its node's name."""
    floats, topology = built.facts["float32"], Topology(graph)
    listed = layers_from_json(built.files[LAYERS_FILE])
    layers = [layer for layer in listed if layer.kind in COMPUTING]
    softmaxes = {node.name for node in topology.nodes if node.op_type == "Softmax"}
    attention = [layer for layer in listed if layer.kind not in COMPUTING and softmaxes.intersection(layer.nodes)]
    for layer in layers:
        assert "Float" not in layer.inputs or floats.keys() & set(layer.nodes), layer
    found = {}
    for node in topology.nodes:
        if node.op_type not in COMPUTE_OPS:
            continue
        makers = [topology.producers.get(name) for name in node.input[:2]]
        quantised = all(maker is not None and maker.op_type == "DequantizeLinear" for maker in makers)
        # The builder has no INT8 kernel for a ConvTranspose: it dequantises, and computes in the float type.
        is_int8 = quantised and node.op_type != "ConvTranspose"
        expected = "Int8" if is_int8 else "Float" if node.name in floats else "Half"
        # Products of two activations may be one layer with the softmax between them.
        has_weights = any(maker is None or maker.input[0] in topology.initializers for maker in makers)
        own = [layer for layer in [*layers, *(() if has_weights else attention)] if node.name in layer.nodes]
        assert own or not quantised, node.name
        for layer in own:
            assert layer.precision == expected, (node.name, layer)
            assert is_int8 == ("Int8" in layer.inputs), (node.name, layer)
            found[node.name] = expected
    assert found
    return found


def in_turns(names: Iterable[str]) -> list[tuple[str, str, str]]:
    """Every graph in every precision, and every precision for every target; the real models have all of all."""
    cases = itertools.product(names, PRECISIONS)
    return [(*case, TARGETS[number % len(TARGETS)]) for number, case in enumerate(cases)]


@pytest.mark.parametrize(("name", "precision", "target"), in_turns(NETS))
def test_every_graph_is_built_as_written(name: str, precision: str, target: str) -> None:
    model = NETS[name]()
    quantised, amax = quantise(model, batches_for(model))
    graph = quantised if precision == "int8" else model
    found = assert_built_as_written(graph, build(graph, precision, amax, target))
    assert ("Int8" in found.values()) == (precision == "int8")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_map_beyond_float16_is_computed_in_float32(precision: str) -> None:
    model = loud_net()
    quantised, amax = quantise(model, batches_for(model))
    graph = quantised if precision == "int8" else model
    built = build(graph, precision, amax)
    assert built.facts["float32"].keys() == {"Conv_t0", "Relu_t1", "Conv_t2"}
    calm = {"Conv_t0": "Float", "Conv_t2": "Float", "Conv_t3": "Half"}
    expected = calm if precision == "fp16" else dict.fromkeys(calm, "Int8")
    assert assert_built_as_written(graph, built) == expected


@pytest.mark.trial
@pytest.mark.parametrize("model_name", MODELS)
def test_real_models_are_built_as_written(model_name: str, shared_data: Path) -> None:
    model = master(shared_data / f"{model_name}_fp32.onnx")
    quantised, amax = quantise(model, real_batches(model, model_name))
    for precision, graph in (("int8", quantised), ("fp16", model)):
        for target in TARGETS:
            found = assert_built_as_written(graph, build(graph, precision, amax, target))
            assert len(found) > 0.9 * sum(node.op_type in COMPUTE_OPS for node in model.graph.node)
