"""The fake TensorRT's engines and execution contexts: each of their rules broken on purpose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fake_allocations import UNWRITTEN
from fake_pycuda import ORIN, T4, FakePycuda
from fake_tensorrt import install
from trt_flow import BOUNDS, SHAPE, WIDE, Flow, small_net
from zoo import Net

BATCH = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
OUTPUT = (1, 4, 8, 8)
BLANK = np.frombuffer(bytes([UNWRITTEN] * 4), np.float32)[0]


@pytest.fixture
def flow(monkeypatch: pytest.MonkeyPatch) -> Flow:
    return Flow(install(monkeypatch))


@pytest.fixture
def bound(flow: Flow) -> Flow:
    """An engine of two profiles with a debug tensor, ready for one image."""
    flow.profiles, flow.mark_debug = [BOUNDS, WIDE], ["t1", "t0"]
    flow.bind(flow.load(flow.build(small_net("n"))))
    flow.write(BATCH)
    return flow


@pytest.mark.parametrize("board", [ORIN, T4])
def test_plans_that_do_not_load(monkeypatch: pytest.MonkeyPatch, board: dict[str, int]) -> None:
    flow = Flow(install(monkeypatch, pycuda=FakePycuda(board=board)))
    plan = flow.build(small_net())
    assert plan is not None
    others = {
        "Version tag does not match": Flow(install(monkeypatch, "10.13.3", pycuda=FakePycuda(board=board))),
        "incompatible device": Flow(install(monkeypatch, pycuda=FakePycuda(board=T4 if board is ORIN else ORIN))),
    }
    for error, other in others.items():
        other.pycuda.push()
        assert other.trt.Runtime(other.logger).deserialize_cuda_engine(plan) is None
        assert error in other.errors[-1]
    runtime = flow.load(plan)._runtime
    for damaged in (b"", plan[:-1], plan[1:], plan + b"\0", plan[:30]):
        assert runtime.deserialize_cuda_engine(damaged) is None
    assert len(flow.errors) == 5


CALLS: dict[str, Callable[[Any, Flow], object]] = {
    "create_execution_context": lambda context, _: context._engine.create_execution_context(),
    "create_engine_inspector": lambda context, _: context._engine.create_engine_inspector(),
    "deserialize_cuda_engine": lambda context, _: context._engine._runtime.deserialize_cuda_engine(b""),
    "Runtime()": lambda _, flow: flow.trt.Runtime(flow.logger),
    "set_optimization_profile_async": lambda context, flow: context.set_optimization_profile_async(
        0, flow.stream.handle
    ),
    "set_input_shape": lambda context, _: context.set_input_shape("image", SHAPE),
    "get_tensor_shape": lambda context, _: context.get_tensor_shape("t2"),
    "set_tensor_address": lambda context, _: context.set_tensor_address("t2", 256),
    "execute_async_v3": lambda context, flow: context.execute_async_v3(flow.stream.handle),
}


@pytest.mark.parametrize("call", CALLS)
def test_calls_that_reach_the_device_need_a_current_context(bound: Flow, call: str) -> None:
    bound.pycuda.driver.Context.pop()
    assert bound.context.set_debug_listener(bound.trt.IDebugListener())  # is only noted
    with pytest.raises(AssertionError, match="without a current CUDA context"):
        CALLS[call](bound.context, bound)
    assert bound.fake.mistakes == [f"{call} without a current CUDA context"]
    bound.pycuda.push()
    bound.close()


def test_shapes_and_profiles(bound: Flow) -> None:
    context, engine = bound.context, bound.context._engine
    assert engine.num_optimization_profiles == 2
    assert [tuple(shape) for shape in engine.get_tensor_profile_shape("image", 1)] == list(WIDE)
    assert engine.get_tensor_shape("image") == engine.get_tensor_shape("image") != SHAPE
    assert tuple(engine.get_tensor_shape("t2")) == (-1, 4, 8, 8)
    for shape in ((5, 3, 8, 8), (1, 3, 8, 9), (1, 3, 8), (0, 3, 8, 8)):
        assert not context.set_input_shape("image", shape)
    assert not context.set_input_shape("t2", OUTPUT)
    assert not context.set_optimization_profile_async(2, bound.stream.handle)
    assert len(bound.errors) == 6
    assert context.set_input_shape("image", (3, 3, 8, 8))
    assert tuple(context.get_tensor_shape("t2")) == (3, 4, 8, 8)
    assert context.set_optimization_profile_async(1, bound.stream.handle)
    assert tuple(context.get_tensor_shape("t2")) == (-1, 4, 8, 8)  # another profile: nothing is chosen
    assert not bound.run()
    assert "allInputDimensionsSpecified" in bound.errors[-1]
    assert not context.set_input_shape("image", SHAPE)
    assert context.set_input_shape("image", WIDE[0])
    bound.close()


def test_a_stream_that_is_not_there(bound: Flow) -> None:
    with pytest.raises(AssertionError, match="no stream of handle 5"):
        bound.context.execute_async_v3(5)


def test_addresses(bound: Flow) -> None:
    context, good = bound.context, int(bound.memory["t2"])
    small = bound.pycuda.driver.mem_alloc(100)
    host = np.zeros(OUTPUT, np.float32)
    for address, rule in {
        good + 4: "not aligned",
        int(small): "100 bytes of device memory for the 1024 of 't2'",
        host.ctypes.data & ~255: "0 bytes of device memory",
    }.items():
        assert context.set_tensor_address("t2", address)
        with pytest.raises(AssertionError, match=rule):
            bound.run()
    with pytest.raises(TypeError):
        context.set_tensor_address("t2", small)
    assert not context.set_tensor_address("t9", good)
    assert context.set_tensor_address("t2", 0)
    assert not bound.run()
    assert "an address is set for tensor t2" in bound.errors[-1]
    context.set_tensor_address("t2", good)
    bound.memory.pop("t2").free()
    with pytest.raises(AssertionError, match="0 bytes of device memory"):
        bound.run()
    with pytest.raises(AssertionError):
        bound.fake.assert_order()
    del small


def test_outputs_whose_size_depends_on_values(flow: Flow) -> None:
    net = Net()
    model = net.model(net.node("Cast", net.node("NonZero", net.node("Relu", "image")), to=1))
    flow.load(flow.build(model))
    assert tuple(flow.context.get_tensor_shape("t2")) == (-1, -1)
    for name in ("image", "t2"):
        flow.memory[name] = flow.pycuda.driver.mem_alloc(4096)
        flow.context.set_tensor_address(name, int(flow.memory[name]))
    with pytest.raises(AssertionError, match="no output allocator for 't2'"):
        flow.run()


def drop_everything(flow: Flow) -> None:
    flow.context = None
    flow.pycuda.driver.Context.pop()


def drop_too_late(flow: Flow) -> None:
    flow.stream.synchronize()
    flow.pycuda.driver.Context.pop()
    flow.context = None


def drop_nothing(flow: Flow) -> None:
    flow.stream.synchronize()
    flow.pycuda.driver.Context.pop()


@pytest.mark.parametrize(
    ("end", "mistake"),
    [
        (drop_everything, "context freed while its stream was not done"),
        (drop_too_late, "engine freed without a current CUDA context"),
        (drop_nothing, "were made and .* freed"),
    ],
)
def test_ends_that_break_the_order(bound: Flow, end: Callable[[Flow], None], mistake: str) -> None:
    assert bound.run()
    end(bound)
    with pytest.raises(AssertionError, match=mistake):
        bound.fake.assert_order()
