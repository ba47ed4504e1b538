"""Models quantised elsewhere, on the whole way: kept to the bit, not calibrated, and INT8 to NVIDIA's builder."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from bench import Bench, calibrate, picture
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
from quantised_zoo import net, qat_net, quantised
from zoo import assert_same_bits, image, residual_net, run

from calibrate.noise import sqnr_db
from engines.graph.load import load_model
from engines.graph.passes import prepare
from engines.graph.topology import COMPUTE_OPS, Topology
from engines.half.convert import half_precision
from engines.interface import BackendOptions, BuildRequest
from engines.quantise.apply_plan import insert_qdq
from engines.quantise.placement import place
from engines.trt.backend import TensorRtBackend
from engines.trt.layers import LAYERS_FILE, layers_from_json
from fleet.cli.main import main

# ---- what other tools write


class Images(CalibrationDataReader):  # type: ignore[misc]  # onnxruntime has no types
    def __init__(self, model: ModelProto) -> None:
        name = model.graph.input[0].name
        self.images: Iterator[dict[str, NDArray[np.float32]]] = iter([{name: image(model, seed)} for seed in range(4)])

    def get_next(self) -> dict[str, NDArray[np.float32]] | None:
        return next(self.images, None)


def by_onnxruntime(model: ModelProto, folder: Path, per_channel: bool, floats: tuple[str, ...]) -> Path:
    """Write the model as ONNX Runtime's static quantisation leaves it."""
    onnx.save(model, folder / "float.onnx")
    quantize_static(
        folder / "float.onnx",
        folder / "model.onnx",
        Images(model),
        quant_format=QuantFormat.QDQ,
        activation_type=QuantType.QInt8,
        weight_type=QuantType.QInt8,
        per_channel=per_channel,
        nodes_to_exclude=list(floats),
        extra_options={"ActivationSymmetric": True, "WeightSymmetric": True},
    )
    return folder / "model.onnx"


def check_kept(model: ModelProto, master: ModelProto) -> None:
    """The same results to the bit, from the same graph without the DQs of int32 biases."""
    assert_same_bits(model, master)
    integers = {tensor.name for tensor in model.graph.initializer if tensor.data_type == TensorProto.INT32}
    biases = sum(node.op_type == "DequantizeLinear" and node.input[0] in integers for node in model.graph.node)
    before, after = (Counter(node.op_type for node in m.graph.node) for m in (model, master))
    assert before - after == ({"DequantizeLinear": biases} if biases else {})
    assert not after - before


@pytest.mark.parametrize("floats", [(), ("Conv_t2", "Gemm_t9")])
@pytest.mark.parametrize("per_channel", [True, False])
def test_a_model_quantised_by_onnxruntime_keeps_its_results(
    per_channel: bool, floats: tuple[str, ...], tmp_path: Path
) -> None:
    model = load_model(by_onnxruntime(residual_net(), tmp_path, per_channel, floats))
    master = prepare(model, run)
    check_kept(model, master)
    placement = place(master)
    assert (placement.quantised, placement.taps) == (floats, ())  # what those read is dequantised already
    assert set(placement.own) == {"Conv_t0", "Conv_t2", "Conv_t4", "Gemm_t9"} - set(floats)
    graph = insert_qdq(master, placement, {})
    assert (graph == master) == (not floats)
    assert sqnr_db(run(residual_net(), image(model, 9))["t9"], run(graph, image(model, 9))["t9"]) > 20


# ---- the whole way


def precisions(graph: ModelProto) -> dict[str, str]:
    """The type that NVIDIA's builder has each convolution and matrix product compute in."""
    shape = tuple(dim.dim_value for dim in graph.graph.input[0].type.tensor_type.shape.dim)
    built = TensorRtBackend(BackendOptions(target="sm86")).build(BuildRequest(graph, "int8", shape))
    layers = [layer for layer in layers_from_json(built.files[LAYERS_FILE]) if layer.kind in ("correlation", "gemm")]
    names = [node.name for node in graph.graph.node if node.op_type in COMPUTE_OPS]
    return {name: layer.precision for layer in layers for name in names if name in layer.nodes}


def test_nvidias_builder_takes_both_kinds_of_q_dq_as_int8() -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has wheels for x86-64 only")
    assert precisions(quantised(prepare(qat_net(), run))) == dict.fromkeys(("Conv_t3", "Conv_t9", "Conv_t11"), "Int8")


def test_a_quantised_model_is_built_at_once(bench: Bench) -> None:
    by_onnxruntime(residual_net(), bench.folder, per_channel=True, floats=())
    bench.images("some", picture())
    said = bench.refuses(*calibrate(bench, bench.spec("own", onnx.load(bench / "model.onnx")), "some"))
    assert said.startswith("calibration.nothing: a model that is quantised already")
    assert "build it directly" in said
    for precision in ("int8", "fp32"):
        out = bench / precision
        assert main(["build", str(bench / "own.yaml"), "--precision", precision, "-o", str(out)]) == 0
        assert json.loads((out / "manifest.json").read_text())["int8_macs_share"] == 1.0


def test_nvidias_builder_takes_what_onnxruntime_quantised(tmp_path: Path) -> None:
    """Its outputs are dequantised: nothing reads them."""
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has wheels for x86-64 only")
    graph = quantised(prepare(load_model(by_onnxruntime(residual_net(), tmp_path, True, ("Conv_t2",))), run))
    assert set(precisions(graph)) == {"Conv_t0", "Conv_t2", "Conv_t4", "Gemm_t9"}
    assert set(precisions(graph).values()) == {"Int8"}


def test_nvidias_builder_takes_transposed_weights() -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has wheels for x86-64 only")
    n = net(8)
    graph = n.model(n.node("MatMul", n.int8("image"), n.node("Transpose", n.stored((6, 8)), perm=[1, 0])))
    assert precisions(graph) == {"MatMul_t4": "Int8"}


def test_q_and_dq_with_constants_of_their_own_agree_in_float16() -> None:
    n = net()
    form = half_precision(n.model(n.node("Exp", n.int8(n.node("Relu", "image"), 0.0123))), {}).model
    topology = Topology(form)
    compared = []
    for node in topology.nodes:
        if node.op_type == "QuantizeLinear":
            scales = [node.input[1], *(reader.input[1] for reader, _ in topology.readers(node.output[0]))]
            first, *others = (onnx.numpy_helper.to_array(topology.initializers[name]) for name in scales)
            compared.append([np.array_equal(first.astype(np.float32), other.astype(np.float32)) for other in others])
    assert compared == [[True]]
