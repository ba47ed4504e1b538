from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from engine_bench import built, code_of
from onnx import ModelProto, TensorProto
from zoo import Net, image, residual_net

from calibrate.histogram import abs_histogram
from engines.interface import Backend, BuildRequest, Observer
from engines.onnxruntime_backend import OnnxRuntimeBackend

OPEN = ("batch", 3, 8, 8)


@pytest.fixture
def backend() -> Backend:
    return OnnxRuntimeBackend()


def test_no_telemetry_leaves_the_machine(tmp_path: Path) -> None:
    """Its telemetry would begin with a database in the user's cache, at the import."""
    spoken_for = ("CI", "ORT_DISABLE_TELEMETRY", "ORT_RUNNING_UNIT_TESTS", "XDG_CACHE_HOME")  # each keeps it silent
    own = {name: value for name, value in os.environ.items() if name not in spoken_for}
    command = [sys.executable, "-c", "import engines.onnxruntime_backend"]
    subprocess.run(command, env={**own, "HOME": str(tmp_path)}, check=True)
    assert list(tmp_path.rglob("*")) == []


# ---- observing


def observer(model: ModelProto, *taps: str) -> Observer:
    return OnnxRuntimeBackend().observer(BuildRequest(model), taps)


def test_observes_inputs_outputs_and_what_lies_between() -> None:
    batch = image(residual_net())
    observation = observer(residual_net(OPEN), "image", "t1", "t9").observe(batch)
    assert list(observation.outputs) == ["t9"]
    assert observation.outputs["t9"].shape == (1, 5)
    assert observation.histograms["image"] == abs_histogram(batch)
    assert observation.histograms["t9"] == abs_histogram(observation.outputs["t9"])
    stem = observation.histograms["t1"]
    assert stem.total == 4 * 8 * 8
    assert 0 < stem.zeros < stem.total  # a ReLU's


def test_outputs_without_a_batch_axis_are_observed() -> None:
    net = Net(OPEN)
    watching = observer(net.model(net.node("ReduceMax", "image", keepdims=0)), "image")
    assert watching.observe(image(residual_net())).outputs["t0"].shape == ()


def test_refuses_taps_that_are_no_float_tensors() -> None:
    net = Net()
    model = net.model(net.node("Reshape", "image", net.node("Shape", "image")))
    assert code_of(lambda: observer(model, "t0")) == "observer.tap"
    assert code_of(lambda: observer(model, "nowhere")) == "observer.tap"


def test_q_dq_runs_as_written(backend: Backend) -> None:
    """Neither clipping nor rounding nor the float bias may move, whatever the processor's INT8 units do."""
    net = Net((1, 1, 1, 4))
    scale, zero = net.constant(np.array(0.5, np.float32)), net.constant(np.array(0, np.int8))
    dequantised = net.node("DequantizeLinear", net.node("QuantizeLinear", "image", scale, zero), scale, zero)
    weight = net.node("DequantizeLinear", net.constant(np.full((1, 1, 1, 2), 127, np.int8)), scale, zero)
    bias = net.constant(np.array([0.1], np.float32))
    conv = net.node("Conv", dequantised, weight, bias)
    model = net.model(net.node("DequantizeLinear", net.node("QuantizeLinear", conv, scale, zero), scale, zero), conv)
    batch = np.array([[[[1000.0, 1000.0, 0.25, 0.75]]]], np.float32)
    outputs = built(backend, model).infer(batch)
    grid = np.clip(np.rint(batch[0, 0, 0] / 0.5), -128, 127) * 0.5
    expected = (grid[:-1] + grid[1:]) * 63.5 + np.float32(0.1)
    np.testing.assert_allclose(outputs[conv][0, 0, 0], expected, rtol=1e-6)
    np.testing.assert_array_equal(outputs["t5"][0, 0, 0], np.clip(np.rint(expected / 0.5), -128, 127) * 0.5)
    assert onnx.helper.tensor_dtype_to_np_dtype(TensorProto.FLOAT) == outputs[conv].dtype
