"""The observer thread on TensorRT, fakes as they are: opened, short of memory, and lost, with nothing left behind."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from fake_pycuda import LogicError, MemoryError_
from fake_tensorrt import FakeTensorRt
from observer_bench import MANY, Bench

from agent.monitoring.observer import ObserverThread
from engines.trt.backend import TensorRtBackend


@pytest.fixture
def bench(tmp_path: Path, fake: FakeTensorRt) -> Bench:
    assert fake.made == []
    return Bench(tmp_path)


def start(bench: Bench) -> ObserverThread:
    reference = partial(TensorRtBackend().observer, bench.model.reference, bench.model.placement.taps)
    return bench.start(reference)


@pytest.mark.trial
def test_memory_that_is_short_for_a_while(bench: Bench, fake: FakeTensorRt) -> None:
    thread = start(bench)
    thread.wait_until_tried(MANY)

    def has_collected(count: int) -> bool:
        return thread.collection.counts[0] >= count

    bench.feed(thread, partial(has_collected, 3))
    for call in ("abs_histogram", "memcpy_htod_async"):
        more = thread.collection.counts[0] + 1
        fake.pycuda.fail[call] = MemoryError_("cuMemAlloc failed: out of memory")
        bench.feed(thread, lambda: bool(thread.states()["camera"].outage))
        assert thread.states()["camera"].outage == "cuda.memory"
        fake.pycuda.fail.clear()
        bench.feed(thread, lambda: not thread.states()["camera"].outage)
        bench.feed(thread, partial(has_collected, more))
    assert [error and error.code for error in bench.changes] == ["cuda.memory", None] * 2
    bench.end()
    assert thread.error is None


@pytest.mark.trial
def test_no_memory_for_the_reference_itself(bench: Bench, fake: FakeTensorRt) -> None:
    fake.pycuda.fail["mem_alloc"] = MemoryError_("cuMemAlloc failed: out of memory")
    fake.pycuda.fail["pagelocked_empty"] = MemoryError_("cuMemHostAlloc failed: out of memory")
    thread = start(bench)
    thread.wait_until_tried(MANY)
    assert thread.states()["camera"].outage == "cuda.memory"
    fake.pycuda.fail.clear()
    bench.feed(thread, lambda: thread.collection.counts[0] > 0)
    assert [error and error.code for error in bench.changes] == ["cuda.memory", None]
    bench.end()


def test_a_gpu_that_is_lost(bench: Bench, fake: FakeTensorRt) -> None:
    thread = start(bench)
    bench.feed(thread, lambda: thread.collection.counts[0] > 0)
    fake.pycuda.fail["abs_histogram"] = LogicError("cuLaunchKernel failed: an illegal memory access was encountered")
    bench.feed(thread, lambda: thread.error is not None)
    thread.join(MANY)
    assert "cuda.launch" in str(thread.error)
    assert bench.changes == []
