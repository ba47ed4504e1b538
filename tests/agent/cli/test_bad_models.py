"""Models that cannot be read, run or quantised: one clear error each, and nothing lost."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import onnx
import pytest
from bench import Bench, build, calibrate, classifier, picture
from onnx import ModelProto, TensorProto, helper
from zoo import Net, residual_net

from fleet.cli.main import main


def test_a_missing_model_is_named(bench: Bench) -> None:
    (bench / "model.onnx").unlink()
    for command in (calibrate(bench), build(bench), ["evaluate", bench / "model.yaml", "--dataset", bench.folder]):
        assert re.match(r"model\.missing: .*/model\.onnx: No such file", bench.refuses(*command))
    assert re.match(r"config\.missing: no file .*gone\.yaml", bench.refuses(*calibrate(bench, "gone.yaml")))


def test_an_empty_model_is_named(bench: Bench) -> None:
    spec = bench.spec("empty", b"")
    for command in (calibrate(bench, spec), build(bench, spec)):
        assert re.match(r"model\.empty: .*/empty\.onnx: 0 bytes", bench.refuses(*command))


def test_a_model_cut_short_anywhere_is_refused(bench: Bench) -> None:
    whole = residual_net().SerializeToString()
    for length in [*range(1, len(whole), 97), *range(len(whole) - 24, len(whole))]:
        spec = bench.spec("cut", whole[:length])
        assert re.match(r"model\.(unreadable|invalid): .*/cut\.onnx", bench.refuses(*calibrate(bench, spec)))


@pytest.mark.parametrize("content", [b"# a model, honestly\n" * 40, b"\x89PNG\r\n\x1a\n" * 30, b"\x00" * 500])
def test_a_file_that_is_no_model_is_named(bench: Bench, content: bytes) -> None:
    spec = bench.spec("text", content)
    assert re.match(r"model\.unreadable: .*/text\.onnx", bench.refuses(*build(bench, spec)))


def test_an_error_of_the_onnx_checker_is_one_line(bench: Bench) -> None:
    model = residual_net()
    model.graph.node[1].input[0] = "nowhere"
    said = bench.refuses(*calibrate(bench, bench.spec("loose", model)))
    assert said.startswith("model.invalid")
    assert "'nowhere'" in said


def other_input(shape: list[int | str], elem_type: int = TensorProto.FLOAT, count: int = 1) -> ModelProto:
    inputs = [helper.make_tensor_value_info(f"input{i}", elem_type, shape) for i in range(count)]
    output = helper.make_tensor_value_info("output", elem_type, shape)
    graph = helper.make_graph([helper.make_node("Neg", ["input0"], ["output"])], "net", inputs, [output])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


@pytest.mark.parametrize(
    ("model", "found"),
    [
        (other_input([1, 10]), "'input0': float [1, 10]"),
        (other_input([1, 3, 8, 8], TensorProto.INT64), "int64 [1, 3, 8, 8]"),
        (other_input([1, 8, 8, 2]), "[1, 8, 8, 2]"),
        (other_input([1, 3, 8, 8], count=2), "2 inputs"),
    ],
    ids=["no picture", "integers", "two channels", "two inputs"],
)
def test_a_model_whose_input_is_no_image_is_refused(bench: Bench, model: ModelProto, found: str) -> None:
    said = bench.refuses(*calibrate(bench, bench.spec("other", model)))
    assert said.startswith("model.input: ")
    assert found in said


def test_an_unsupported_operator_is_named(bench: Bench) -> None:
    model = residual_net()
    model.graph.node[3].op_type, model.graph.node[3].domain = "Frobnicate", "acme"
    model.opset_import.append(helper.make_opsetid("acme", 1))
    for command in (calibrate(bench, spec := bench.spec("odd", model)), build(bench, spec)):
        said = bench.refuses(*command)
        assert said.startswith("model.operator: operator acme.Frobnicate in node 'Relu_t3'")


def test_an_operator_that_the_runtime_lacks_is_named(bench: Bench) -> None:
    net = Net((1, 3, 8, 8))
    wide = net.node("Cast", "image", to=TensorProto.BFLOAT16)
    model = net.model(net.node("Cast", net.node("Softsign", wide), to=TensorProto.FLOAT), opset=22, ir_version=10)
    said = bench.refuses(*calibrate(bench, bench.spec("odd", model)))
    assert said.startswith("engine.unsupported: ")
    assert "Softsign" in said


def external(model: ModelProto, location: str) -> ModelProto:
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    return model


@pytest.mark.parametrize("location", ["../weights.bin", "/etc/hostname", "a/../../weights.bin", "link.bin", "gone.bin"])
def test_external_data_outside_the_models_folder_is_not_read(bench: Bench, location: str) -> None:
    (bench.folder.parent / "weights.bin").write_bytes(bytes(10_000))
    (bench / "link.bin").symlink_to(bench.folder.parent / "weights.bin")
    spec = bench.spec("far", external(residual_net(), location))
    said = bench.refuses(*calibrate(bench, spec))
    assert said.startswith("model.external-data: ")
    assert f"'{location}'" in said
    assert "tensor 'c0'" in said


def test_external_data_cut_short_is_refused(bench: Bench) -> None:
    (bench / "short.bin").write_bytes(bytes(7))
    assert bench.refuses(*calibrate(bench, bench.spec("far", external(residual_net(), "short.bin")))).startswith(
        "model."
    )


@pytest.mark.parametrize(
    "stem",
    [lambda net: net.node("Log", "image"), lambda net: net.node("Div", "image", "image")],
    ids=["infinite", "no numbers"],
)
def test_non_finite_activations_are_counted_and_their_tensor_is_named(bench: Bench, stem: Callable[[Net], str]) -> None:
    dotted = picture()
    dotted[2, 3] = dotted[7, 7] = 0
    bench.images("dotted", picture(), dotted, dotted)
    said = bench.refuses(*calibrate(bench, bench.spec("log", classifier(stem)), "dotted"))
    assert said.startswith("calibration.nonfinite: NaN or infinite values in 1 of 1 tensors")
    assert "'t0' with 12; " in said


def test_a_weight_that_is_no_number_is_named(bench: Bench) -> None:
    model = residual_net()
    gemm = next(tensor for tensor in model.graph.initializer if list(tensor.dims) == [5, 4])
    gemm.CopyFrom(onnx.numpy_helper.from_array(np.full((5, 4), np.nan, np.float32), gemm.name))
    spec = bench.spec("nan", model)
    assert main([str(part) for part in [*calibrate(bench, spec)[:-1], bench / "nan.json"]]) == 0
    bench.captured()
    said = bench.refuses("build", spec, "--calibration", bench / "nan.json", "-o", bench / "new")
    assert said.startswith(f"scale.amax: amax nan for tensor '{gemm.name}'")


def test_a_model_quantised_in_another_way_than_ours_is_named(bench: Bench) -> None:
    net = Net((1, 3, 8, 8))
    scale, zero = net.constant(np.array(0.1, np.float32)), net.constant(np.array(128, np.uint8))
    x = net.node("DequantizeLinear", net.node("QuantizeLinear", "image", scale, zero), scale, zero)
    said = bench.refuses(*calibrate(bench, bench.spec("unsigned", net.model(net.conv(x, 3, 4)), task="raw")))
    assert said.startswith("model.quantised: QuantizeLinear 'QuantizeLinear_t0' with a zero point of type uint8; ")


def test_a_model_with_nothing_to_quantise_says_so(bench: Bench) -> None:
    net = Net((1, 3, 8, 8))
    spec = bench.spec("bare", net.model(net.node("Relu", "image")), task="raw")
    assert bench.refuses(*calibrate(bench, spec)).startswith("calibration.nothing: ")
