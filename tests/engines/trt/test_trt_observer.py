"""The reference engine with its taps, on the fake: histograms counted by the real kernels, and every doubt an error."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from fake_tensorrt import FakeTensorRt
from onnx import ModelProto
from trt_world import net
from zoo import Net, image, residual_net, run

from calibrate.histogram import AbsHistogram, abs_histogram
from engines.errors import EngineError
from engines.interface import Array, BackendOptions, BuildRequest, ShapeRange
from engines.onnxruntime_backend import OnnxRuntimeBackend
from engines.quantise.placement import place
from engines.trt.backend import TensorRtBackend
from engines.trt.builder import build_engine

pytestmark = pytest.mark.usefixtures("fake")

SIZES = ((1, 3, 8, 8), (1, 3, 9, 16), (1, 3, 24, 32), (1, 3, 17, 11), (1, 3, 40, 64))
PROFILE = ({"image": ShapeRange((1, 3, 8, 8), (1, 3, 16, 16), (4, 3, 64, 64))},)


def wide_net() -> ModelProto:
    """Open in every dimension; three taps."""
    net = Net(("n", 3, "h", "w"))
    x = net.node("Relu", net.conv("image", 3, 4))
    return net.model(net.conv(net.node("Relu", net.conv(x, 4, 4)), 4, 2))


def taps_of(model: ModelProto) -> tuple[str, ...]:
    taps = place(model).taps
    assert len(taps) > 2
    assert "image" in taps
    return taps


def near(found: Mapping[str, AbsHistogram], expected: Mapping[str, AbsHistogram]) -> bool:
    """Return whether histograms agree but for the last bits: ONNX Runtime fuses more than the fake does."""
    assert list(found) == list(expected)
    for name, histogram in expected.items():
        assert found[name].counts.sum() == histogram.counts.sum()
        assert found[name].amax == pytest.approx(histogram.amax, rel=1e-5)
        moved = np.abs(np.cumsum(found[name].counts - histogram.counts)).sum()
        assert moved <= 0.05 * histogram.counts.sum() if found[name].range_exp == histogram.range_exp else True
    return True


@pytest.mark.parametrize("spoilt", [False, True])
def test_a_histogram_is_that_of_the_values_bit_for_bit(fake: FakeTensorRt, spoilt: bool) -> None:
    """Seen by the listener, and seen as outputs."""
    model, taps = net(), taps_of(net())
    reference = OnnxRuntimeBackend().observer(BuildRequest(model), taps)
    if spoilt:
        fake.spoil = dict.fromkeys(taps, silent)
    with closing(TensorRtBackend().observer(BuildRequest(model), taps)) as observer:
        assert observer.taps == taps
        for seed in range(3):
            batch = (image(model, seed) * 10.0**seed).astype(np.float32)
            sight = cast("Any", observer)._see(batch, taps)
            assert sight.histograms == {tap: abs_histogram(sight.values[tap]) for tap in taps}
            found, expected = observer.observe(batch), reference.observe(batch)
            assert found.histograms == sight.histograms
            assert near(found.histograms, expected.histograms)
            np.testing.assert_allclose(found.outputs["t9"], expected.outputs["t9"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("spoilt", [False, True])
def test_extremes_are_those_of_onnx_runtime(fake: FakeTensorRt, spoilt: bool) -> None:
    """Beside the listener, and beside taps that are outputs; on every size."""
    model = wide_net()
    taps, layers = taps_of(model), list(place(model).weights)
    if spoilt:
        fake.spoil = dict.fromkeys(taps, silent)
    request = BuildRequest(model, profiles=PROFILE)
    reference = OnnxRuntimeBackend().observer(request, taps, layers=layers)
    rng = np.random.default_rng(0)
    with closing(TensorRtBackend().observer(request, taps, layers=layers)) as observer:
        assert [output.name for output in observer.outputs] == [output.name for output in reference.outputs]
        for shape in SIZES[:2]:
            batch = rng.normal(size=shape).astype(np.float32)
            found, expected = observer.observe(batch), reference.observe(batch)
            assert list(found.extremes) == layers
            for layer in layers:
                np.testing.assert_allclose(found.extremes[layer], expected.extremes[layer], rtol=1e-4, atol=1e-5)
            assert set(found.outputs) == set(observer.infer(batch)) == {"t4"}


def test_outputs_alone_do_not_listen(fake: FakeTensorRt) -> None:
    model, taps = net(), taps_of(net())
    with closing(TensorRtBackend().observer(BuildRequest(model), taps)) as observer:
        observer.observe(image(model))
        launched = fake.pycuda.names().count("abs_histogram")
        found = observer.infer(image(model, 1))
        assert fake.pycuda.names().count("abs_histogram") == launched
        np.testing.assert_allclose(found["t9"], run(model, image(model, 1))["t9"], rtol=1e-5, atol=1e-6)
        observer.observe(image(model))
        assert fake.pycuda.names().count("abs_histogram") > launched


# ---- doubts


def silent(_: Array) -> None:
    """A debug tensor that never arrives."""


def test_a_listener_that_lies_gives_way_to_outputs(fake: FakeTensorRt, caplog: pytest.LogCaptureFixture) -> None:
    model, taps = net(), taps_of(net())
    inner = [tap for tap in taps if tap != "image"]
    reference = OnnxRuntimeBackend().observer(BuildRequest(model), taps)
    for spoil, problem in (
        (lambda values: values * 2, "observer.mismatch"),
        (silent, "observer.taps"),
        (lambda values: values[..., :-1], "observer.taps"),
        (lambda values: values.astype(np.int32), "observer.listener"),
    ):
        fake.spoil = dict.fromkeys(inner, spoil)
        caplog.clear()
        with closing(TensorRtBackend().observer(BuildRequest(model), taps)) as observer:
            assert observer.observe(image(model)).histograms == reference.observe(image(model)).histograms
        assert problem in caplog.text
        assert "way='debug listener'" in caplog.text


def test_taps_that_fail_later_are_an_error_and_not_a_calibration(fake: FakeTensorRt) -> None:
    model, taps = net(), taps_of(net())
    with closing(TensorRtBackend().observer(BuildRequest(model), taps)) as observer:
        fake.spoil = {taps[1]: silent}
        with pytest.raises(EngineError, match=rf"observer\.taps.*0 values of tensor '{taps[1]}'"):
            observer.observe(image(model))
        fake.spoil = {taps[1]: lambda values: values[:, :1]}
        with pytest.raises(EngineError, match=r"observer\.taps.*for an input \[1, 3, 8, 8\]"):
            observer.observe(image(model))
        fake.spoil = {}
        fake.pycuda.fail["abs_histogram"] = RuntimeError("a bug of ours")
        with pytest.raises(EngineError, match=r"observer\.listener.*a bug of ours"):
            observer.observe(image(model))
        fake.pycuda.fail.clear()
        assert observer.observe(image(model)).histograms


def test_an_engine_that_computes_something_else_is_refused(fake: FakeTensorRt, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither way helps when the outputs are wrong."""
    model, taps = net(), taps_of(net())
    other = residual_net((1, 3, 8, 8))
    for tensor in other.graph.initializer:
        if tensor.raw_data:
            tensor.raw_data = (np.frombuffer(tensor.raw_data, np.float32) * np.float32(1.5)).tobytes()
    real = build_engine
    monkeypatch.setattr(
        "engines.trt.backend.build_engine", lambda release, _graph, *more, **named: real(release, other, *more, **named)
    )
    with pytest.raises(EngineError, match=r"observer\.mismatch.*dB like ONNX Runtime's"):
        TensorRtBackend().observer(BuildRequest(model), taps)
    assert fake.freed.count("engine") > 1


# ---- what is kept


def test_the_reference_is_built_and_verified_once(fake: FakeTensorRt, tmp_path: Path) -> None:
    model, taps = net(), taps_of(net())

    def open_and_close(key: bytes | None = None) -> int:
        fake.timed = ["untouched"]
        with closing(TensorRtBackend(BackendOptions(cache=tmp_path, key=key)).observer(BuildRequest(model), taps)) as o:
            assert o.observe(image(model)).histograms
        return fake.timed != ["untouched"]

    assert open_and_close()
    assert not open_and_close()
    (engine,) = (tmp_path / "references").rglob("*.engine")
    content = engine.read_bytes()
    engine.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert open_and_close()  # damaged: built again
    assert not open_and_close()
    assert open_and_close(b"k" * 32)  # unsigned: built again
    assert not open_and_close(b"k" * 32)
