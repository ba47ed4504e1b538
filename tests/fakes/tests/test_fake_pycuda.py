"""The fake PyCUDA's rules: every one of them broken on purpose, so that it would be noticed elsewhere too."""

from __future__ import annotations

import ctypes
import threading

import numpy as np
import pytest
from fake_allocations import UNWRITTEN
from fake_cuda_graphs import FakeCudaGraphs
from fake_pycuda import FakePycuda
from numpy.typing import NDArray

from engines.cuda.cuda_graph import CudaGraph


@pytest.fixture
def pycuda() -> FakePycuda:
    fake = FakePycuda()
    fake.push()
    return fake


def on_device(pycuda: FakePycuda, nbytes: int) -> tuple[object, int]:
    memory = pycuda.driver.mem_alloc(nbytes)
    return memory, int(memory)


def test_queued_work_happens_at_a_wait(pycuda: FakePycuda) -> None:
    stream, event = pycuda.driver.Stream(1), pycuda.driver.Event()
    memory, address = on_device(pycuda, 16)
    source, target = np.arange(16, dtype=np.uint8), np.zeros(16, np.uint8)
    pycuda.driver.memcpy_htod_async(address, source, stream)
    event.record(stream)
    pycuda.driver.memcpy_dtoh_async(target, address, stream)
    assert not event.query()
    assert not target.any()
    event.synchronize()
    assert event.query()
    assert not target.any()  # behind the event
    source[:] = 7  # too late to be read
    stream.synchronize()
    np.testing.assert_array_equal(target, np.arange(16))
    del memory


def test_a_source_that_changes_too_early_is_copied_changed(pycuda: FakePycuda) -> None:
    stream = pycuda.driver.Stream(1)
    memory, address = on_device(pycuda, 4)
    source = np.zeros(4, np.uint8)
    pycuda.driver.memcpy_htod_async(address, source, stream)
    source[:] = 9
    stream.synchronize()
    np.testing.assert_array_equal(read(address, 4), 9)
    del memory


def test_streams_do_not_wait_for_each_other(pycuda: FakePycuda) -> None:
    first, second = pycuda.driver.Stream(1), pycuda.driver.Stream(1)
    assert first.handle != second.handle
    memory, address = on_device(pycuda, 4)
    pycuda.driver.memset_d8_async(address, 1, 4, first)
    second.synchronize()
    np.testing.assert_array_equal(read(address, 4), UNWRITTEN)
    pycuda.driver.Context.synchronize()
    np.testing.assert_array_equal(read(address, 4), 1)
    del memory


@pytest.mark.parametrize("call", ["memcpy_htod_async", "memcpy_dtoh_async", "memset_d8_async"])
def test_nothing_is_copied_beyond_the_memory_that_is_there(pycuda: FakePycuda, call: str) -> None:
    memory, address = on_device(pycuda, 4)
    arguments = {
        "memcpy_htod_async": (address, np.zeros(5, np.uint8), None),
        "memcpy_dtoh_async": (np.zeros(4, np.uint8), address + 1, None),
        "memset_d8_async": (address, 0, 5, None),
    }
    with pytest.raises(AssertionError, match="beyond the memory"):
        getattr(pycuda.driver, call)(*arguments[call])
    del memory


def test_memory_that_is_dropped_without_a_context_is_a_mistake(pycuda: FakePycuda) -> None:
    kept = [on_device(pycuda, 4), on_device(pycuda, 4), pycuda.driver.pagelocked_empty(4, np.uint8)]
    del kept[0]
    assert (pycuda.mistakes, len(pycuda.alive), len(pycuda.pagelocked)) == ([], 1, 1)
    pycuda.driver.Context.pop()
    kept.clear()
    assert pycuda.mistakes == ["memory dropped without a current context"] * 2
    assert pycuda.alive == pycuda.pagelocked == {}


def test_only_mapped_memory_has_an_address_on_the_device(pycuda: FakePycuda) -> None:
    flags = pycuda.driver.host_alloc_flags.DEVICEMAP
    mapped = pycuda.driver.pagelocked_empty((2, 3), np.float32, mem_flags=flags)
    plain = pycuda.driver.pagelocked_empty(6, np.float32)
    address = mapped.base.get_device_pointer()
    mapped[...] = 2.5
    np.testing.assert_array_equal(read(address, 24).view(np.float32), 2.5)
    assert pycuda.room(address + 4) == 20
    with pytest.raises(AssertionError, match="not mapped"):
        plain.base.get_device_pointer()
    assert pycuda.room(plain.ctypes.data) == 0


def test_a_context_is_current_on_one_thread_only(pycuda: FakePycuda) -> None:
    raised: list[AssertionError] = []

    def allocate() -> None:
        try:
            pycuda.driver.mem_alloc(4)
        except AssertionError as error:
            raised.append(error)

    thread = threading.Thread(target=allocate)
    thread.start()
    thread.join()
    assert str(raised[0]) == "mem_alloc without a current context"
    assert pycuda.depth == 1
    with pytest.raises(AssertionError, match="released while it is current"):
        pycuda.detach()


def test_waiting_and_allocating_cannot_be_captured(pycuda: FakePycuda, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = FakeCudaGraphs(pycuda)
    graphs.install(monkeypatch)
    stream = pycuda.driver.Stream(1)
    for work in (stream.synchronize, lambda: pycuda.driver.mem_alloc(4)):
        with pytest.raises(RuntimeError, match="cuStreamEndCapture: 901"):
            CudaGraph(stream, work)
        stream.synchronize()
    assert graphs.graphs == []


def read(address: int, nbytes: int) -> NDArray[np.uint8]:
    """Return the memory as it is now, past every stream."""
    return np.frombuffer(ctypes.string_at(address, nbytes), np.uint8)
