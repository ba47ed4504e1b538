"""Sums of histograms in place: what `merge_all` says, to the bit, in any order and any grouping."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from calibrate.errors import CalibrationError
from calibrate.histogram import AbsHistogram, HistogramSum, abs_histogram, merge_all

BITS = 6
parts = st.lists(
    hnp.arrays(np.float32, st.integers(0, 30), elements=st.floats(width=32, allow_subnormal=True)).map(
        lambda x: abs_histogram(x, BITS)
    ),
    max_size=6,
)


def added(histograms: list[AbsHistogram]) -> HistogramSum:
    found = HistogramSum(BITS)
    for histogram in histograms:
        found.add(histogram)
    return found


@given(parts, st.randoms(), st.integers(0, 6))
def test_any_order_and_any_grouping_give_the_bits_of_merge(
    histograms: list[AbsHistogram], random: object, cut: int
) -> None:
    expected = merge_all(histograms, BITS)
    shuffled = list(histograms)
    random.shuffle(shuffled)  # type: ignore[attr-defined]  # hypothesis types it as object
    assert added(shuffled).result() == expected
    partial = [added(shuffled[:cut]).result(), added(shuffled[cut:]).result()]
    assert added(partial).result() == expected


def test_the_summed_histograms_stay_as_they_were() -> None:
    first, second = abs_histogram(np.full(5, 0.5, np.float32)), abs_histogram(np.full(5, 8.5, np.float32))
    total = HistogramSum(first.bits)
    total.add(first)
    early = total.result()
    total.add(second)
    assert early == first
    assert first == abs_histogram(np.full(5, 0.5, np.float32))


def test_a_refused_addition_changes_nothing() -> None:
    total = HistogramSum(BITS)
    huge = AbsHistogram(np.full(1 << BITS, 1 << 56), 0, float(np.float32(0.999)), 0, 0)
    total.add(huge)
    with pytest.raises(CalibrationError, match=r"histogram\.overflow"):
        total.add(huge)
    with pytest.raises(CalibrationError, match=r"histogram\.bits"):
        total.add(abs_histogram(np.ones(3, np.float32), BITS + 1))
    assert total.result() == huge
