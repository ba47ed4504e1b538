"""Merged over boards: the bits that one machine would have counted, in any order, by any number of mergers."""

from __future__ import annotations

import random
import tracemalloc

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from merge_bench import FACTS, counted, frames_of
from numpy.typing import NDArray

from agent.contract.histograms import read_upload, write_upload
from calibrate.histogram import abs_histogram
from fleet.merge.calibration import Merger

BITS = 6
board = hnp.arrays(np.float32, st.integers(1, 30), elements=st.floats(width=32, allow_subnormal=True))


@given(st.lists(board, min_size=1, max_size=8), st.integers(0, 8), st.integers(0, 1000))
def test_any_order_and_any_number_of_mergers_count_what_one_machine_would(
    boards: list[NDArray[np.float32]], cut: int, seed: int
) -> None:
    uploads = [write_upload(FACTS, {"t": abs_histogram(x, BITS), f"u{len(x) % 2}": abs_histogram(x)}) for x in boards]
    random.Random(seed).shuffle(uploads)
    parts = [Merger(), Merger()]
    for number, upload in enumerate(uploads):
        parts[number < cut].add(read_upload(upload))
    whole = Merger()
    for part in parts:
        whole.add(part.histograms.items())
    expected = {"t": abs_histogram(np.concatenate(boards), BITS)}
    for parity in {len(x) % 2 for x in boards}:
        expected[f"u{parity}"] = abs_histogram(np.concatenate([x for x in boards if len(x) % 2 == parity]))
    assert whole.histograms == expected


def test_memory_does_not_grow_with_the_boards() -> None:
    uploads = [write_upload(FACTS, counted(frames_of(seed, values=2000))) for seed in range(4)]
    merger = Merger()
    peaks = []
    tracemalloc.start()
    for _ in range(3):
        tracemalloc.reset_peak()
        for number in range(100):
            merger.add(read_upload(uploads[number % 4]))
        peaks.append(tracemalloc.get_traced_memory()[1])
    tracemalloc.stop()
    assert peaks[2] <= peaks[0] + 10_000
