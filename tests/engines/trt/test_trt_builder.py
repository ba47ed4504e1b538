"""The builder half of the TensorRT backend, with NVIDIA's own builder, which needs no GPU to build for one."""

from __future__ import annotations

import gc
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper
from trt_world import int8
from zoo import Net, residual_net

from engines.errors import EngineError
from engines.interface import BackendOptions, BuildRequest, Built, ShapeRange
from engines.quantise.placement import place
from engines.registry import open_backend
from engines.trt.backend import TensorRtBackend
from engines.trt.builder import BuilderOptions, build_engine
from engines.trt.layers import LAYERS_FILE, Layer, layers_from_json
from engines.trt.release import open_release

pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has wheels for x86-64 only")

OPEN = ("n", 3, "h", "w")


def backend(target: str = "sm86", **options: object) -> TensorRtBackend:
    opened = open_backend("tensorrt", BackendOptions(target=target, **options))  # type: ignore[arg-type]  # of BackendOptions
    assert isinstance(opened, TensorRtBackend)
    return opened


def code_of(call: Callable[[], object]) -> EngineError:
    with pytest.raises(EngineError) as caught:
        call()
    assert all((caught.value.found, caught.value.expected, caught.value.remedy))
    return caught.value


def layers_of(built: Built) -> list[Layer]:
    return layers_from_json(built.files[LAYERS_FILE])


def test_a_dynamic_model_with_two_profiles() -> None:
    near = {"image": ShapeRange((1, 3, 32, 32), (1, 3, 64, 64), (2, 3, 64, 96))}
    far = {"image": ShapeRange((1, 3, 128, 128), (4, 3, 128, 128), (4, 3, 256, 256))}
    request = int8(residual_net(OPEN))
    one = backend().build(BuildRequest(request.graph, "int8", profiles=(near,)))
    two = backend().build(BuildRequest(request.graph, "int8", profiles=(near, far)))
    assert len(layers_of(two)) > len(layers_of(one))  # every profile has kernels of its own


def test_progress_only_ever_grows_and_ends_whole() -> None:
    reported: list[float] = []
    backend().build(int8(residual_net()), lambda fraction, _doing: reported.append(fraction))
    assert reported == sorted(reported)
    assert len(set(reported)) > 10
    assert (reported[0] < 0.1, reported[-1]) == (True, 1.0)


def test_an_error_of_progress_stops_the_builder() -> None:
    reported: list[float] = []

    def impatient(fraction: float, _doing: str) -> None:
        reported.append(fraction)
        if fraction > 0.3:
            raise TimeoutError("enough")

    with pytest.raises(TimeoutError, match="enough"):
        backend().build(int8(residual_net()), impatient)
    assert reported[-1] < 1.0
    assert len([fraction for fraction in reported if fraction > 0.3]) == 1  # it was not asked again


@pytest.mark.parametrize("delay_s", [0.0, 0.02, 0.05, 0.1])
def test_an_interrupt_stops_the_builder(delay_s: float) -> None:
    """The signal arrives at any time while C++ runs, and comes out as Python's own interrupt."""
    net = Net((1, 16, 32, 32))
    x = "image"
    for _ in range(60):
        x = net.node("Relu", net.conv(x, 16, 16))
    request, opened = int8(net.model(x)), backend()

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    def build() -> None:
        signal.setitimer(signal.ITIMER_REAL, delay_s or 1e-6)
        opened.build(request)

    before = signal.signal(signal.SIGALRM, interrupt)
    gc.disable()  # what is raised in a callback of the collector, as hypothesis has one, Python only prints
    try:
        with pytest.raises(KeyboardInterrupt):
            build()
    finally:
        gc.enable()
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(
    ("profile", "found"),
    [
        ({"photo": ShapeRange((1, 3, 8, 8), (1, 3, 8, 8), (1, 3, 8, 8))}, "'photo'"),
        ({}, "no input"),
        ({"image": ShapeRange((1, 3, 8), (1, 3, 8), (1, 3, 8))}, "[1, 3, 8]"),
        ({"image": ShapeRange((1, 4, 8, 8), (1, 4, 8, 8), (1, 4, 8, 8))}, "[1, 4, 8, 8]"),
        ({"image": ShapeRange((1, 3, 0, 8), (1, 3, 8, 8), (1, 3, 8, 8))}, "[1, 3, 0, 8]"),
        ({"image": ShapeRange((2, 3, 8, 8), (1, 3, 8, 8), (2, 3, 8, 8))}, "(2, 3, 8, 8)"),
    ],
)
def test_profiles_that_do_not_fit(profile: dict[str, ShapeRange], found: str) -> None:
    error = code_of(lambda: backend().build(BuildRequest(residual_net(OPEN), profiles=(profile,))))
    assert error.code == "engine.profile"
    assert found in error.found


def test_an_operator_it_does_not_have_is_named_with_its_node() -> None:
    net = Net()
    unique = net.node("Unique", net.node("Relu", "image"))
    error = code_of(lambda: backend().build(BuildRequest(net.model(unique))))
    assert error.code == "engine.unsupported"
    assert "operator Unique in node 'Unique_t1', number 1 of the graph" in error.found


def test_an_operator_that_only_the_builder_refuses() -> None:
    """NonMaxSuppression parses, and fails later: the builder's silence has to become its log's words."""
    net = Net((1, 3, 10, 4))
    boxes = net.node("Squeeze", net.node("ReduceMax", "image", axes=[1]), net.constant(np.array([1])))
    scores = net.node("Transpose", net.node("ReduceMax", boxes, axes=[2]), perm=[0, 2, 1])
    limits = net.constant(np.array([5])), net.constant(np.array([0.5], np.float32))
    model = net.model(net.node("NonMaxSuppression", boxes, scores, *limits))
    model.graph.output[0].type.tensor_type.elem_type = TensorProto.INT64
    error = code_of(lambda: backend().build(BuildRequest(model)))
    assert error.code in ("engine.build", "engine.unsupported")
    assert "NonMaxSuppression" in error.found or "NMS" in error.found


def test_double_precision_is_refused() -> None:
    net = Net()
    model = net.model(net.node("Relu", "image"))
    for value in (model.graph.input[0], model.graph.output[0]):
        value.type.tensor_type.elem_type = TensorProto.DOUBLE
    assert code_of(lambda: backend().build(BuildRequest(model))).code == "engine.double"


def test_types_that_do_not_meet_are_named_with_their_node() -> None:
    net = Net()
    model = net.model(net.conv("image", 3, 4))
    model.graph.initializer[0].CopyFrom(
        helper.make_tensor(model.graph.initializer[0].name, TensorProto.FLOAT16, (4, 3, 3, 3), np.ones(108, np.float16))
    )
    error = code_of(lambda: backend().build(BuildRequest(model)))
    assert error.code == "engine.graph"
    assert "operator Conv in node 'Conv_t0'" in error.found
    assert "must be of same type" in error.found


def test_targets_and_accelerators() -> None:
    error = code_of(lambda: backend("sm12").build(BuildRequest(residual_net())))
    assert (error.code, "sm86" in error.expected) == ("engine.target", True)
    error = code_of(lambda: backend(dla=0).build(BuildRequest(residual_net(), "fp16")))
    assert (error.code, "DLA core 0 with tensorrt_rtx 1.7" in error.found) == ("engine.dla", True)


def test_a_builder_alone_loads_nothing(tmp_path: Path) -> None:
    alone = backend(cache=tmp_path)
    built = alone.build(BuildRequest(residual_net()))
    assert code_of(lambda: alone.load(built.engine)).code == "engine.target"
    assert code_of(lambda: alone.observer(BuildRequest(residual_net()), ())).code == "engine.target"
    assert alone.describe() == {"runtime": "tensorrt_rtx", "version": alone.describe()["version"], "target": "sm86"}
    assert (alone.flags(), backend(best=True).flags()) == ({}, {"best": "True"})


def test_taps_are_marked_where_they_are_made() -> None:
    """As the reference engine marks them: a debug tensor, or a further output, for every tap."""
    model = residual_net()
    taps = [tap for tap in place(model).taps if tap != "image"]
    release, options = open_release(crossing=True), BuilderOptions("sm86")
    plain = build_engine(release, model, (), options, lambda *_: None)
    debug = build_engine(release, model, (), options, lambda *_: None, debug=taps)
    outputs = build_engine(release, model, (), options, lambda *_: None, outputs=taps)
    assert len(debug.content) < 1.1 * len(plain.content)  # as many outputs would be more
    assert {kind for layer in outputs.layers for kind in layer.outputs} == {"Float"}
    error = code_of(lambda: build_engine(release, model, (), options, lambda *_: None, debug=["nowhere"]))
    assert error.code == "engine.tensor"
