"""Build, observe, infer and swap on the TensorRT of this machine, against ONNX Runtime: what `make gpu-check` runs.

The same tests run on the fake without a GPU, and on the fake with a GPU that no installed TensorRT supports.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from fake_cuda_graphs import FakeCudaGraphs
from fake_pycuda import FakePycuda
from fake_tensorrt import install
from fake_tensorrt_on_gpu import installed_on_gpu
from numpy.typing import NDArray
from onnx import ModelProto
from opened_gpu import opened_gpu
from zoo import Net, image, rounds_half, run

import engines.trt.backend as tensorrt_backend
from calibrate.histogram import AbsHistogram
from calibrate.noise import sqnr_db
from engines.cuda import cuda_graph
from engines.interface import BackendOptions, BuildRequest, ShapeRange
from engines.onnxruntime_backend import OnnxRuntimeBackend
from engines.preprocessing import ImageTransform
from engines.quantise.apply_plan import insert_qdq
from engines.quantise.placement import place
from engines.trt.backend import TensorRtBackend
from engines.trt.layers import layers_from_json

PROFILE = ({"image": ShapeRange((1, 16, 16, 16), (1, 16, 32, 32), (2, 16, 40, 48))},)
LEAST_DB = {"fp32": 40.0, "fp16": 35.0, "int8": 30.0}  # like ONNX Runtime on the same graph; INT8 in FP16 accumulates


@pytest.fixture(params=["fake", *(pytest.param(name, marks=pytest.mark.gpu) for name in ("fake_on_gpu", "real"))])
def backend(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[TensorRtBackend]:
    tensorrt_backend._gpu.cache_clear()
    if request.param == "fake":
        fake = install(monkeypatch, pycuda=FakePycuda())
        FakeCudaGraphs(fake.pycuda).install(monkeypatch)
        yield TensorRtBackend(BackendOptions(cache=tmp_path))
        fake.assert_order()
        tensorrt_backend._gpu.cache_clear()
        return
    if request.param == "fake_on_gpu":
        opened_gpu().close()
        with installed_on_gpu(monkeypatch) as fake:
            yield TensorRtBackend(BackendOptions(cache=tmp_path))
            fake.assert_order()
            tensorrt_backend._gpu.cache_clear()
        return
    missing = [name for name in ("pycuda",) if importlib.util.find_spec(name) is None]
    if missing or not any(map(importlib.util.find_spec, ("tensorrt", "tensorrt_rtx"))):
        pytest.skip(f"no {' and no '.join(missing) or 'tensorrt and no tensorrt_rtx'}")
    opened = TensorRtBackend(BackendOptions(cache=tmp_path))
    print(dict(opened.describe()))
    yield opened


def model() -> ModelProto:
    """Wide enough for INT8 kernels: two convolutions around a residual sum, a depthwise one, SiLU, a classifier."""
    net = Net((1, 16, 32, 32))
    x = net.node("Relu", net.conv("image", 16, 32))
    x = net.node("Relu", net.node("Add", net.conv(x, 32, 32), x))
    x = net.conv(x, 32, 32, group=32)
    x = net.node("Mul", x, net.node("Sigmoid", x))
    pooled = net.node("Flatten", net.node("GlobalAveragePool", net.conv(x, 32, 32)))
    return net.model(net.node("Gemm", pooled, net.weight(10, 32), net.weight(10), transB=1))


def wide_model() -> ModelProto:
    net = Net(("n", 16, "h", "w"))
    return net.model(net.conv(net.node("Relu", net.conv("image", 16, 32)), 32, 16))


def quantised(source: ModelProto) -> BuildRequest:
    placement = place(source)
    histograms = OnnxRuntimeBackend().observer(BuildRequest(source), placement.taps).observe(image(source)).histograms
    amax = {tap: histogram.amax for tap, histogram in histograms.items()}
    return BuildRequest(insert_qdq(source, placement, amax), "int8", amax=amax)


@pytest.mark.parametrize("precision", LEAST_DB)
def test_engines_compute_what_their_graphs_say(
    backend: TensorRtBackend, precision: str, request: pytest.FixtureRequest
) -> None:
    if precision == "int8" and "fake" in request.node.name and not rounds_half():
        pytest.skip("the fake computes with this ONNX Runtime, which truncates in QuantizeLinear of float16")
    wanted = quantised(model()) if precision == "int8" else BuildRequest(model(), precision)
    built = backend.build(wanted)
    print(precision, len(built.engine), "bytes", dict(built.without_int8))
    assert layers_from_json(built.files["layers.json"])
    with closing(backend.load(built.engine)) as engine:
        for seed in range(3):
            batch = image(model(), seed)
            (expected,), (found,) = run(wanted.graph, batch).values(), engine.infer(batch).values()
            print(precision, f"{sqnr_db(expected, found):.1f} dB like ONNX Runtime")
            assert sqnr_db(expected, found) > LEAST_DB[precision]


def test_every_shape_of_a_profile(backend: TensorRtBackend) -> None:
    request = BuildRequest(wide_model(), profiles=PROFILE)
    rng = np.random.default_rng(0)
    with closing(backend.load(backend.build(request).engine)) as engine:
        for shape in ((1, 16, 16, 16), (2, 16, 40, 48), (1, 16, 17, 33), (1, 16, 32, 32)):
            batch = rng.normal(size=shape).astype(np.float32)
            (expected,), (found,) = run(wide_model(), batch).values(), engine.infer(batch).values()
            assert sqnr_db(expected, found) > LEAST_DB["fp32"]


def test_frames_are_preprocessed_on_the_device(backend: TensorRtBackend) -> None:
    net = Net((1, 3, 24, 32))
    source = net.model(net.node("Identity", "image"))
    frame: NDArray[np.uint8] = np.random.default_rng(0).integers(0, 256, (24, 32, 3), dtype=np.uint8)
    transform = ImageTransform(24, 32, 24, 32, 0, 0, 24, 32, 114, "rgb", (1.0,) * 3, (0.0,) * 3)
    with closing(backend.load(backend.build(BuildRequest(source)).engine)) as engine:
        (found,) = engine.finish(engine.start_image(frame, transform)).values()
        assert np.array_equal(found[0], frame.transpose(2, 0, 1)[::-1].astype(np.float32))


def test_taps_are_counted_at_any_size(backend: TensorRtBackend) -> None:
    request = BuildRequest(wide_model(), profiles=PROFILE)
    taps = place(wide_model()).taps
    reference = OnnxRuntimeBackend().observer(request, taps)
    rng = np.random.default_rng(0)
    with closing(backend.observer(request, taps)) as observer:
        for shape in ((1, 16, 16, 16), (1, 16, 40, 48), (1, 16, 17, 33)):
            batch = rng.normal(size=shape).astype(np.float32)
            check_alike(observer.observe(batch).histograms, reference.observe(batch).histograms)
            (expected,), (found,) = run(wide_model(), batch).values(), observer.infer(batch).values()
            assert sqnr_db(expected, found) > LEAST_DB["fp32"]


def check_alike(found: dict[str, AbsHistogram], expected: dict[str, AbsHistogram]) -> None:
    assert list(found) == list(expected)
    for name, histogram in expected.items():
        assert found[name].counts.sum() == histogram.counts.sum()
        assert found[name].nonfinite == histogram.nonfinite == 0
        assert found[name].amax == pytest.approx(histogram.amax, rel=1e-2)


def test_a_swap_keeps_both_engines_alive_until_the_old_one_is_closed(backend: TensorRtBackend) -> None:
    batch = image(model())
    old = backend.load(backend.build(BuildRequest(model())).engine)
    new = backend.load(backend.build(quantised(model())).engine)
    before = next(iter(old.infer(batch).values()))
    after = next(iter(new.infer(batch).values()))
    assert np.array_equal(next(iter(old.infer(batch).values())), before)
    old.close()
    for _ in range(50):
        assert np.array_equal(next(iter(new.infer(batch).values())), after)
    new.close()


def test_a_captured_engine_computes_what_it_did_before(
    backend: TensorRtBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        pytest.skip("no cuda-bindings")
    built = backend.build(BuildRequest(model())).engine
    batches = [image(model(), seed) for seed in range(6)]
    monkeypatch.setattr(cuda_graph, "_WORTH", 0.0)
    with closing(backend.load(built)) as plain:
        expected = [next(iter(plain.infer(batch).values())) for batch in batches]
    monkeypatch.setattr(cuda_graph, "_WORTH", float("inf"))
    with closing(backend.load(built)) as captured:
        assert all(slot.graph is not None for slot in captured._slots)
        tickets = [captured.start(batch) for batch in batches[:2]]  # both slots are under way at once
        found = [next(iter(captured.finish(ticket).values())) for ticket in tickets]
        found += [next(iter(captured.infer(batch).values())) for batch in batches[2:]]
    assert all(np.array_equal(*pair) for pair in zip(found, expected, strict=True))


def test_layers_are_timed(backend: TensorRtBackend) -> None:
    built = backend.build(quantised(model()))
    with closing(backend.load(built.engine)) as engine:
        times = engine.layer_times_ms(image(model()))
    for name, time_ms in sorted(times.items(), key=lambda item: -item[1])[:10]:
        print(f"{time_ms:8.4f} ms  {name}")
    assert sum(times.values()) > 0.0
