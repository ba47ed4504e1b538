"""Models that cannot be read, run or quantised: one clear error each, and nothing lost."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import onnx
import pytest
from bench import Bench, build, calibrate, classifier, picture
from onnx import TensorProto
from zoo import Net, residual_net

from fleet.cli.main import main


def test_a_missing_model_is_named(bench: Bench) -> None:
    (bench / "model.onnx").unlink()
    for command in (calibrate(bench), build(bench), ["evaluate", bench / "model.yaml", "--dataset", bench.folder]):
        assert re.match(r"model\.missing: .*/model\.onnx: No such file", bench.refuses(*command))
    assert re.match(r"config\.missing: no file .*gone\.yaml", bench.refuses(*calibrate(bench, "gone.yaml")))


def test_an_operator_that_the_runtime_lacks_is_named(bench: Bench) -> None:
    net = Net((1, 3, 8, 8))
    wide = net.node("Cast", "image", to=TensorProto.BFLOAT16)
    model = net.model(net.node("Cast", net.node("Softsign", wide), to=TensorProto.FLOAT), opset=22, ir_version=10)
    said = bench.refuses(*calibrate(bench, bench.spec("odd", model)))
    assert said.startswith("engine.unsupported: ")
    assert "Softsign" in said


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
