"""The float16 form of a graph: typed throughout, and as near to the float model as float16 allows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from half_zoo import (
    HALF,
    NETS,
    assert_well_formed,
    batches_for,
    classifier_net,
    conv_types,
    master,
    noise_db,
    quantise,
    real_batches,
    real_models,
    run,
)
from zoo import Net, by_name, residual_net

from benchmarks.half import added_casts
from engines.errors import EngineError
from engines.graph.topology import tensor_types
from engines.half.convert import MIN_OPSET, half_precision


def test_every_float16_tensor_is_rounded_when_the_form_runs() -> None:
    """Or else ONNX Runtime would compute a chain of operators in float32, and the losses below would mean nothing."""
    net = Net((1, 4, 8, 8))
    large = net.constant(np.array(2048, np.float32))  # from here on float16 has even numbers only
    x = net.node("Sub", net.node("Add", "image", large), large)
    model = net.model(net.node("Conv", x, net.constant(np.eye(4, dtype=np.float32).reshape(4, 4, 1, 1))))
    (batch,) = batches_for(model, 1)
    found = run(half_precision(model, {}).model, [2 * batch])
    np.testing.assert_array_equal(found["t2"][0], 2 * np.round(batch))


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


@pytest.mark.parametrize("model_name", real_models("cls_resnet20_cifar10"))
def test_real_models(model_name: str, shared_data: Path) -> None:
    model = master(shared_data / f"{model_name}_fp32.onnx")
    batches = real_batches(model, model_name)
    quantised, amax = quantise(model, batches)
    expected = run(model, batches)
    for graph, most_db, most_casts in (
        (model, -35.0, 4),  # up to 113 convolutions one after another
        (quantised, noise_db(expected, run(quantised, batches)) + 1.0, 3),
    ):
        form = half_precision(graph, amax)
        assert_well_formed(form, graph)
        assert not conv_types(form).keys() & form.float32.keys()
        assert noise_db(expected, run(form.model, batches)) < most_db
        assert added_casts(form, graph) <= most_casts


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
    with pytest.raises(EngineError, match=r"model\.opset: opset 13, which onnx cannot raise.*Frobnicate") as caught:
        half_precision(graph, {})
    assert caught.value.expected == "opset 19 or later"
    assert "or build it in fp32" in caught.value.remedy


def test_refuses_a_graph_whose_shapes_contradict_one_another() -> None:
    model = residual_net()
    model.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 7
    with pytest.raises(EngineError, match=r"model\.half"):
        half_precision(model, {})
