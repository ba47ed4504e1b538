"""The fake TensorRT's builder and parser: each of their rules broken on purpose."""

from __future__ import annotations

from typing import Any

import pytest
from fake_tensorrt import install
from trt_bindings import protocols
from trt_flow import BOUNDS, Bounds, Flow, Monitor, small_net, tensor

from engines.trt import api

MODULES = [("10.3.0", "tensorrt"), ("11.4.0.106", "tensorrt"), ("1.7.1.116", "tensorrt_rtx")]
CROSS_ONLY = {"ComputeCapability", "CrossConfig", "CrossTensorRt"}


@pytest.fixture
def flow(monkeypatch: pytest.MonkeyPatch) -> Flow:
    return Flow(install(monkeypatch))


@pytest.mark.parametrize(("version", "module"), MODULES)
def test_the_fake_has_all_names_of_the_interface(monkeypatch: pytest.MonkeyPatch, version: str, module: str) -> None:
    flow = Flow(install(monkeypatch, version, module))
    flow.profiles = [BOUNDS]
    engine = flow.load(flow.build(small_net("n")))
    builder, (network, parser) = flow.trt.Builder(flow.logger), flow.network(small_net())
    config = builder.create_builder_config()
    inspector, runtime = engine.create_engine_inspector(), flow.trt.Runtime(flow.logger)
    error = flow.trt.OnnxParser(network, flow.logger)
    error.parse(b"no model")
    things = [*(engine, flow.context, inspector, runtime, builder, network, parser, config), error.get_error(0)]
    things += [network.get_layer(0), network.get_input(0), builder.create_optimization_profile()]
    things += [config.create_timing_cache(b""), config.create_timing_cache(b"").serialize()]
    made: dict[str, Any] = {type(thing).__name__: thing for thing in things}
    made |= {"TensorRt": flow.trt, "CrossTensorRt": flow.trt, "IBuilderConfig": config, "CrossConfig": config}
    lacking = [
        f"{name}.{member.name}"
        for name, members in protocols(api).items()
        for member in members
        if not hasattr(made.get(name) or getattr(flow.trt, name, None), member.name)
    ]
    absent = [f"{name}.{member.name}" for name in CROSS_ONLY for member in protocols(api)[name]]
    assert sorted(lacking) == ([] if module == "tensorrt_rtx" else sorted(absent))


def test_networks_are_strongly_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    old = Flow(install(monkeypatch, "10.3.0"))
    with pytest.raises(AssertionError, match="not strongly typed"):
        old.trt.Builder(old.logger).create_network(0)
    new = Flow(install(monkeypatch, "11.4.0"))
    assert new.trt.Builder(new.logger).create_network(0).num_layers == 0


def test_a_parser_lives_as_long_as_its_network(flow: Flow) -> None:
    network, parser = flow.network(small_net())
    del parser
    with pytest.raises(AssertionError, match="after its parser was freed"):
        network.mark_debug(tensor(network, "t0"))


def test_only_tensors_of_the_network_can_be_marked(flow: Flow) -> None:
    network, parser = flow.network(small_net())
    other, other_parser = flow.network(small_net())
    with pytest.raises(AssertionError, match="tensor 't0' of another network"):
        network.mark_debug(tensor(other, "t0"))
    for name in ("image", "t2", "t1", "t1"):
        network.mark_output(tensor(network, name))
    assert network.outputs == ["t1"]
    assert ["input" in error for error in flow.errors] == [True, False, False]
    flow.mark_debug = ["image"]
    assert flow.build(small_net()) is None
    assert "debug output for image has no runners" in flow.errors[-1]
    del parser, other_parser


@pytest.mark.parametrize(
    ("batch", "profiles", "error"),
    [
        ("n", [], "Network has dynamic or shape inputs, but no optimization profile has been defined"),
        ("n", [((1, 3, 8),) * 3], "image has 4 dimensions but profile 0 has 3"),
        ("n", [BOUNDS, ((1, 3, 4, 8), (1, 3, 8, 8), (1, 3, 8, 8))], "image and profile 1. At dimension axis 2"),
        ("n", [BOUNDS[::-1]], "ensure that the optimization profiles satisfy MIN<=OPT<=MAX"),
        (1, [BOUNDS], "image and profile 0. At dimension axis 0"),
        (1, [], ""),
        ("n", [BOUNDS], ""),
    ],
)
def test_profiles(flow: Flow, batch: int | str, profiles: list[Bounds], error: str) -> None:
    flow.profiles = profiles
    assert (flow.build(small_net(batch)) is None) == bool(error)
    assert error in (flow.errors or [""])[0]


@pytest.mark.parametrize("answer", [False, None, ValueError("a bug")])
def test_a_step_that_is_not_let_pass_stops_the_build(flow: Flow, answer: object) -> None:
    watch = Monitor(flow.fake, {("step", "Optimizing graph"): answer})
    flow.monitor = watch.monitor
    assert flow.build(small_net()) is None
    assert "Build canceled by user" in flow.errors[-1]
    assert [call for call, *_ in watch.seen[-4:]] == ["step", "finish", "finish", "finish"]


def test_other_exceptions_of_a_monitor_are_swallowed(flow: Flow) -> None:
    flow.monitor = Monitor(flow.fake, {("start", "Optimizing graph"): ValueError("a bug")}).monitor
    assert flow.build(small_net())
    config = flow.trt.Builder(flow.logger).create_builder_config()
    with pytest.raises(TypeError):
        config.progress_monitor = object()
    with pytest.raises(AttributeError):
        config.progres_monitor = None


def test_the_first_logger_gets_everything(flow: Flow) -> None:
    flow.trt.Builder(flow.logger)
    later: list[tuple[str, str]] = []
    builder = flow.trt.Builder(flow.new_logger(later))
    assert "differs from one already registered" in flow.messages[-1][1]
    builder.build_serialized_network(builder.create_network(2), builder.create_builder_config())
    assert "at least one output" in flow.errors[-1]
    assert later == []
    with pytest.raises(TypeError):
        flow.trt.Builder(object())
