"""The fake TensorRT's callbacks during an inference: debug listener and profiler, their rules broken on purpose."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from fake_allocations import UNWRITTEN
from fake_tensorrt import install
from numpy.typing import NDArray
from trt_flow import SHAPE, Flow, small_net

OUTPUT = (1, 4, 8, 8)
BLANK = np.frombuffer(bytes([UNWRITTEN] * 4), np.float32)[0]

_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> Flow:
    """An engine with two debug tensors, ready for one image."""
    flow = Flow(install(monkeypatch))
    flow.mark_debug = ["t1", "t0"]
    flow.bind(flow.load(flow.build(small_net())))
    flow.write(np.random.default_rng(0).normal(size=SHAPE).astype(np.float32))
    return flow


class Listening:
    """The calls of a debug listener; `act` is its reaction."""

    def __init__(self, flow: Flow, act: Callable[[str, int], None]) -> None:
        self.calls: list[tuple[Any, ...]] = []
        calls = self.calls

        class Listener(flow.trt.IDebugListener):  # type: ignore[misc, name-defined]  # known only at run time
            def process_debug_tensor(
                self, addr: Any, location: Any, type: Any, shape: Any, name: str, stream: int
            ) -> bool:
                calls.append((name, str(location), str(type), tuple(shape), stream))
                act(name, int(_pointer(addr, None) or 0))
                return False  # it is ignored

        assert flow.context.set_debug_listener(Listener())
        assert flow.context.set_all_tensors_debug_state(True)


def look(address: int) -> NDArray[np.float32]:
    return np.frombuffer(ctypes.string_at(address, 1024), np.float32).reshape(OUTPUT)


def test_debug_tensors_are_there_on_the_stream_and_only_then(bound: Flow) -> None:
    early: list[NDArray[np.float32]] = []
    seen: dict[str, NDArray[np.float32]] = {}
    addresses: dict[str, int] = {}

    def act(name: str, address: int) -> None:
        early.append(look(address))
        target = np.empty(OUTPUT, np.float32)
        bound.pycuda.driver.memcpy_dtoh_async(target, address, bound.stream)
        bound.stream.synchronize()
        seen[name], addresses[name] = target, address

    listening = Listening(bound, act)
    assert bound.run()
    bound.stream.synchronize()
    handle = bound.stream.handle
    assert listening.calls == [
        (name, "TensorLocation.DEVICE", "DataType.FLOAT", OUTPUT, handle) for name in ("t0", "t1")
    ]
    assert all((values == BLANK).all() for values in early)  # the stream was not there yet
    np.testing.assert_array_equal(seen["t1"], np.maximum(seen["t0"], 0))
    assert all((look(address) == BLANK).all() for address in addresses.values())  # the call is over
    bound.context.set_all_tensors_debug_state(False)
    assert bound.run()
    assert len(listening.calls) == 2
    bound.close()
    bound.fake.assert_order()


def test_an_error_of_a_listener_is_swallowed(bound: Flow) -> None:
    def act(_name: str, _address: int) -> None:
        raise KeyboardInterrupt

    listening = Listening(bound, act)
    assert bound.run()
    assert len(listening.calls) == 2
    bound.close()
    bound.fake.assert_order()


def test_an_error_that_a_listener_keeps_keeps_no_context(bound: Flow) -> None:
    """Its traceback holds the frames that called it; TensorRT's own are no Python frames."""
    kept: list[Exception] = []

    def act(name: str, _address: int) -> None:
        try:
            raise ValueError(name)
        except ValueError as error:
            kept.append(error)

    Listening(bound, act)
    assert bound.run()
    bound.close()
    assert len(kept) == 2
    bound.fake.assert_order()


@pytest.mark.parametrize("from_thread", [False, True])
def test_two_calls_at_a_time_are_refused(bound: Flow, from_thread: bool) -> None:
    """Not even from a callback, whose exception would be lost."""

    def call() -> None:
        bound.pycuda.push()
        with suppress(AssertionError):
            bound.context.get_tensor_shape("t2")
        bound.pycuda.driver.Context.pop()

    def act(_name: str, _address: int) -> None:
        if not from_thread:
            call()
            return
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    Listening(bound, act)
    assert bound.run()
    bound.close()
    with pytest.raises(AssertionError, match="get_tensor_shape while another call is under way"):
        bound.fake.assert_order()
