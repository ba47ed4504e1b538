"""Failures of TensorRT, on the fake: each has its code and remedy, and leaks nothing."""

from __future__ import annotations

import gc
from contextlib import closing
from pathlib import Path

import onnx
import pytest
from engine_bench import built
from fake_pycuda import H200, CompileError, FakePycuda, MemoryError_
from fake_tensorrt import FakeTensorRt, install
from fake_tensorrt_network import INetworkDefinition
from trt_world import int8, net
from worlds import SPEC
from zoo import image

from agent.models.engine_service import EngineService
from agent.models.model import open_model
from agent.vision.spec import ModelSpec
from calibrate.errors import TaredError
from engines.errors import DeviceError, EngineError
from engines.interface import BackendOptions, BuildRequest
from engines.quantise.placement import place
from engines.registry import choose_backend
from engines.store.artefact import Store
from engines.trt.backend import TensorRtBackend
from engines.trt.session import TensorRtEngine

pytestmark = pytest.mark.usefixtures("fake")


def code_of(error: EngineError | DeviceError) -> str:
    assert all((error.found, error.expected, error.remedy))
    return error.code


# ---- engines


@pytest.mark.parametrize(
    ("step", "said", "code"),
    [
        ("deserialize", "Version tag does not match", "engine.unreadable"),
        ("context", "Error Code 2: OutOfMemory", "engine.memory"),
    ],
)
def test_loading_that_fails_says_why(fake: FakeTensorRt, step: str, said: str, code: str) -> None:
    backend = TensorRtBackend()
    engine = backend.build(BuildRequest(net())).engine
    fake.fail[step] = said
    with pytest.raises(EngineError) as caught:
        backend.load(engine)
    assert code_of(caught.value) == code
    assert said in caught.value.found


def test_an_inference_that_fails_is_an_error_and_no_hang(fake: FakeTensorRt) -> None:
    with closing(built(TensorRtBackend(), net())) as engine:
        fake.fail["execute"] = "Cuda Runtime (an illegal memory access was encountered)"
        with pytest.raises(EngineError, match=r"engine\.run.*illegal memory access.*restart the process"):
            engine.infer(image(net()))


def test_an_engine_that_cannot_run_at_all_gives_its_memory_back(fake: FakeTensorRt) -> None:
    backend = TensorRtBackend()
    engine = backend.build(BuildRequest(net())).engine
    fake.fail["execute"] = "Cuda Runtime (out of memory)"
    with pytest.raises(EngineError, match=r"engine\.run"):
        backend.load(engine)


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ("Error Code 2: OutOfMemory (Requested size was 8589934592 bytes.)", "engine.memory"),
        ("Error Code 10: Internal Error (Could not find any implementation for node Softmax_3.)", "engine.kernel"),
        ("Error Code 9: Internal Error (something else)", "engine.build"),
    ],
)
def test_a_build_that_fails_says_why(fake: FakeTensorRt, said: str, code: str) -> None:
    fake.fail["build"] = said
    with pytest.raises(EngineError) as caught:
        TensorRtBackend().build(BuildRequest(net()))
    assert code_of(caught.value) == code
    assert said.split("(")[0].strip() in caught.value.found


def test_a_gpu_that_tensorrt_rtx_does_not_support_is_known_before_a_model_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its builder knows nothing of it; an H200 was seen to build and then to refuse every engine."""
    fake = install(monkeypatch, "1.7.1", "tensorrt_rtx", FakePycuda(board=H200))
    with pytest.raises(EngineError, match="compute capability 9") as caught:
        TensorRtBackend()
    assert code_of(caught.value) == "backend.gpu"
    chosen = choose_backend("auto")
    assert "compute capability 9.0" in chosen.not_taken["tensorrt"]
    assert chosen.backend.name != "tensorrt"
    del caught
    gc.collect()
    fake.assert_order()


def test_without_a_compiler_nothing_is_left_behind(fake: FakeTensorRt) -> None:
    backend = TensorRtBackend()
    engine = backend.build(BuildRequest(net())).engine
    fake.pycuda.fail["compile"] = CompileError("nvcc not found")
    for attempt in (lambda: backend.load(engine), lambda: backend.observer(BuildRequest(net()), place(net()).taps)):
        with pytest.raises(DeviceError, match=r"cuda\.compiler.*nvcc"):
            attempt()


# ---- INT8 that the runtime does not have


def test_nodes_without_int8_kernels_are_named(fake: FakeTensorRt) -> None:
    backend, request = TensorRtBackend(), int8(net())
    convs = [node.name for node in request.graph.graph.node if node.op_type == "Conv"]
    assert backend.build(request).without_int8 == {}
    fake.without_int8 = {convs[1]}
    assert set(backend.build(request).without_int8) == {convs[1]}
    fake.without_kernel, fake.without_int8 = {convs[2]}, set()
    built = backend.build(request)
    assert (set(built.without_int8), built.engine) == ({convs[2]}, b"")


def test_a_nodes_name_inside_anothers_is_not_that_node(fake: FakeTensorRt) -> None:
    """Layers are named after their nodes, and "Conv_t1" is part of "Conv_t11"."""
    backend, request = TensorRtBackend(), int8(net())
    for node in request.graph.graph.node:
        if node.op_type == "Conv":
            node.name = {"Conv_t0": "c", "Conv_t2": "c_1", "Conv_t4": "stage/c"}[node.name]
    fake.fail["build"] = "Error Code 10: Internal Error (Could not find any implementation for node c_1 + Relu_t3.)"
    assert set(backend.build(request).without_int8) == {"c_1"}


@pytest.mark.parametrize("as_warning", [True, False])
def test_memory_that_is_short_is_no_missing_int8_kernel(
    fake: FakeTensorRt, monkeypatch: pytest.MonkeyPatch, as_warning: bool
) -> None:
    """A board's builder skips what does not fit, with a warning, and then finds no kernel."""
    missing = "Error Code 10: Internal Error (Could not find any implementation for node Conv_t2{}.)"
    skipped = "Skipping tactic 0x3e8 due to insuficient memory on requested size of 1024 detected for tactic 0x3e8."
    fake.fail["build"] = missing.format("" if as_warning else " due to insufficient workspace. See verbose log")
    if as_warning:
        real = fake.error

        def warn_first(message: str) -> None:
            fake.log(fake.module.ILogger.Severity.WARNING, skipped)
            real(message)

        monkeypatch.setattr(fake, "error", warn_first)
    with pytest.raises(EngineError, match=r"engine\.memory.*add swap"):
        TensorRtBackend().build(int8(net()))


# ---- observers


def test_an_interrupt_while_taps_are_counted_is_an_interrupt(fake: FakeTensorRt) -> None:
    model, taps = net(), place(net()).taps
    with closing(TensorRtBackend().observer(BuildRequest(model), taps)) as observer:
        fake.pycuda.fail["abs_histogram"] = KeyboardInterrupt()  # type: ignore[assignment]  # any exception does
        with pytest.raises(KeyboardInterrupt):
            observer.observe(image(model))
        fake.pycuda.fail["abs_histogram"] = MemoryError_("cuMemAlloc failed: out of memory")
        with pytest.raises(DeviceError, match=r"cuda\.memory"):
            observer.observe(image(model))
        fake.pycuda.fail.clear()
        gc.collect()  # the errors' frames, and with them the buffers of the counts that failed
        assert observer.observe(image(model)).histograms


def test_a_kept_reference_that_another_libnvinfer_refuses_is_built_anew(fake: FakeTensorRt, tmp_path: Path) -> None:
    """The bindings' version is the same, and the library's is not: its engines look right until they are loaded."""
    model, taps = net(), place(net()).taps
    options = BackendOptions(cache=tmp_path)
    TensorRtBackend(options).observer(BuildRequest(model), taps).close()
    (engine,) = (tmp_path / "references").rglob("*.engine")
    before = engine.stat().st_mtime_ns
    real = TensorRtBackend._build
    built: list[bool] = []

    def build(self: TensorRtBackend, *more: object, **named: object) -> object:
        fake.fail.pop("deserialize", None)
        built.append(True)
        return real(self, *more, **named)  # type: ignore[arg-type]  # as they came

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TensorRtBackend, "_build", build)
        fake.fail["deserialize"] = "Serialization assertion stdVersionRead == serializationVersion failed."
        TensorRtBackend(options).observer(BuildRequest(model), taps).close()
    assert built == [True]
    assert engine.stat().st_mtime_ns > before


def test_a_builder_that_refuses_debug_tensors_is_given_outputs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, taps = net(), place(net()).taps
    monkeypatch.setattr(INetworkDefinition, "mark_debug", lambda *_: False)
    with closing(TensorRtBackend().observer(BuildRequest(model), taps)) as observer:
        assert list(observer.observe(image(model)).histograms) == list(taps)
    assert "engine.tensor" in caplog.text


# ---- the daemon's engines


def test_a_reference_artefact_that_another_libnvinfer_refuses_is_built_anew(
    fake: FakeTensorRt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    onnx.save(net(), tmp_path / "model.onnx")
    model = open_model(ModelSpec.model_validate({**SPEC, "path": tmp_path / "model.onnx"}))
    errors: list[TaredError] = []

    def start() -> EngineService:
        service = EngineService(model, TensorRtBackend(), Store(tmp_path / "state"))
        with closing(service.start(errors.append)) as engine:
            assert engine.infer(image(net()))["t9"].shape == (1, 5)
        return service

    first = start()
    assert errors == []
    real, refusals = TensorRtBackend.load, [EngineError("engine.unreadable", "another version", "this one", "build it")]

    def load(self: TensorRtBackend, engine: bytes) -> TensorRtEngine:
        if refusals:
            raise refusals.pop()
        return real(self, engine)

    monkeypatch.setattr(TensorRtBackend, "load", load)
    again = start()
    assert [error.code for error in errors] == ["engine.unreadable"]
    assert again.serving.id == first.serving.id
    assert fake.made.count("engine") > 2
