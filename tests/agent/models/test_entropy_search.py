"""Method `entropy` on the GPU of the backend chooses what the CPU chooses; a GPU that fails leaves it to the CPU."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from fake_pycuda import Error
from fake_tensorrt import FakeTensorRt, install
from fiber_executor import COMPILER
from worlds import SPEC
from zoo import residual_net

from agent.models.model import Model, calibrate
from agent.vision.spec import ModelSpec
from calibrate.histogram import AbsHistogram, abs_histogram
from calibrate.plan import ALL_INT8
from engines.interface import BackendOptions
from engines.onnxruntime_backend import OnnxRuntimeBackend
from engines.quantise.placement import place
from engines.trt.backend import TensorRtBackend

KERNEL = "entropy_search"


@pytest.fixture(scope="module")
def model() -> Model:
    master = residual_net((1, 3, 8, 8))
    return Model(ModelSpec.model_validate(SPEC), master, "m", (1, 3, 8, 8), ALL_INT8, master, place(master))


@pytest.fixture(scope="module")
def histograms(model: Model) -> dict[str, AbsHistogram]:
    """Of every shape that the search treats by itself: all zeros, few bins, far from zero, spread out, heavy tails."""
    rng = np.random.default_rng(0)
    shapes = [
        np.zeros(64),
        np.full(1000, 0.5),
        np.repeat([1.0, 1e3], [5000, 1]),
        np.maximum(rng.normal(size=20_000), 0.0),
        np.abs(rng.standard_cauchy(20_000)),
        np.abs(rng.normal(100.0, 0.1, 2000)),
    ]
    return {tap: abs_histogram(shapes[n % len(shapes)].astype(np.float32)) for n, tap in enumerate(model.needed_taps)}


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler to build kernels.cu for the CPU: install g++, or set CXX")
def test_the_gpu_chooses_as_the_cpu_does(
    fake: FakeTensorRt,
    model: Model,
    histograms: dict[str, AbsHistogram],
) -> None:
    on_gpu = calibrate(model, histograms, "entropy", 1, "test", TensorRtBackend())
    assert KERNEL in fake.pycuda.names()
    assert on_gpu.amax == calibrate(model, histograms, "entropy", 1, "test").amax


@pytest.mark.parametrize("method", ["max", "mse", "entropy+pow2", "entropy:nvidia"])
def test_other_methods_are_the_cpus(
    fake: FakeTensorRt,
    model: Model,
    histograms: dict[str, AbsHistogram],
    method: str,
) -> None:
    found = calibrate(model, histograms, method, 1, "test", TensorRtBackend())
    assert KERNEL not in fake.pycuda.names()
    assert found.amax == calibrate(model, histograms, method, 1, "test").amax


@pytest.mark.parametrize("refused", ["compile", "mem_alloc", KERNEL])
def test_where_the_gpu_fails_the_cpu_searches(
    fake: FakeTensorRt,
    model: Model,
    histograms: dict[str, AbsHistogram],
    caplog: pytest.LogCaptureFixture,
    refused: str,
) -> None:
    backend = TensorRtBackend()
    fake.pycuda.fail[refused] = Error("too bad")
    with caplog.at_level(logging.WARNING):
        found = calibrate(model, histograms, "entropy", 1, "test", backend)
    assert "entropy_search=cpu" in caplog.text
    assert found.amax == calibrate(model, histograms, "entropy", 1, "test").amax


def test_without_a_gpu_the_cpu_searches(
    monkeypatch: pytest.MonkeyPatch, model: Model, histograms: dict[str, AbsHistogram]
) -> None:
    install(monkeypatch, "1.7.0", "tensorrt_rtx")
    expected = calibrate(model, histograms, "entropy", 1, "test").amax
    for backend in (OnnxRuntimeBackend(), TensorRtBackend(BackendOptions(target="sm86"))):
        assert calibrate(model, histograms, "entropy", 1, "test", backend).amax == expected
