"""The observer thread on TensorRT, fakes as they are: opened, short of memory, and lost, with nothing left behind."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from fake_pycuda import LogicError
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


def test_a_gpu_that_is_lost(bench: Bench, fake: FakeTensorRt) -> None:
    thread = start(bench)
    bench.feed(thread, lambda: thread.collection.counts[0] > 0)
    fake.pycuda.fail["abs_histogram"] = LogicError("cuLaunchKernel failed: an illegal memory access was encountered")
    bench.feed(thread, lambda: thread.error is not None)
    thread.join(MANY)
    assert "cuda.launch" in str(thread.error)
    assert bench.changes == []
