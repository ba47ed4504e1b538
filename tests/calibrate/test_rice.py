"""Packed counts: exact, the same from either pass, and closed to what nobody packed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from calibrate import count_codec as rice

Counts = NDArray[np.int64]

sizes = st.integers(0, 200)
# Of every magnitude, and alike in a row: blocks without a difference have a form of their own.
counts = st.lists(
    st.tuples(st.integers(0, 62).flatmap(lambda bits: st.integers(0, 1 << bits)), st.integers(1, 90)), max_size=8
).map(lambda runs: np.repeat([value for value, _ in runs], [length for _, length in runs]).astype(np.int64))


def by_numpy(data: bytes, size: int) -> Counts:
    return rice.unpack_numpy(data, size)


def compiled(data: bytes, size: int) -> Counts:
    if rice.LIBRARY is None:
        pytest.skip("no compiler when it was installed")
    found = np.zeros(size, np.int64)
    rice.unpack(data, found)
    return found


@given(counts)
@example(np.array([(1 << 63) - 1], np.int64))
@example(np.zeros(4096, np.int64))
@example(np.array([0, (1 << 62) - 1, 0, 1 << 62], np.int64))
def test_what_was_packed_comes_back_from_both_passes(values: Counts) -> None:
    if rice.exact_sum(values) >= 1 << 63:
        for unpack in (by_numpy, compiled):
            with pytest.raises(ValueError, match="too many"):
                unpack(rice.pack(values), values.size)
        return
    for unpack in (by_numpy, compiled):
        assert np.array_equal(unpack(rice.pack(values), values.size), values)


@given(counts, sizes, st.data())
def test_both_passes_take_and_refuse_the_same(values: Counts, size: int, data: st.DataObject) -> None:
    packed = bytearray(rice.pack(values))
    for _ in range(data.draw(st.integers(0, 3))):
        packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    packed = packed[: data.draw(st.integers(0, len(packed)))] if data.draw(st.booleans()) else packed
    size = data.draw(st.sampled_from([values.size, size]))
    one, other = (answer(unpack, bytes(packed), size) for unpack in (by_numpy, compiled))
    assert (one is None) == (other is None)
    assert one is None or other is None or np.array_equal(one, other)


def answer(unpack: Callable[[bytes, int], Counts], packed: bytes, size: int) -> Counts | None:
    """None where it is refused."""
    try:
        return unpack(packed, size)
    except ValueError:
        return None


def test_noise_takes_little_more_than_it_holds() -> None:
    """Poisson counts of mean 100: a difference has about log2(sqrt(2 * 2 pi e * 100)) = 5.9 bits."""
    values = np.random.default_rng(0).poisson(100, 4096).astype(np.int64)
    assert len(rice.pack(values)) * 8 / values.size < 6.3


def test_sums_are_exact_beyond_int64() -> None:
    assert rice.exact_sum(np.full(4, 1 << 62, np.int64)) == 1 << 64
    assert rice.exact_sum(np.full(4, -(1 << 62), np.int64)) == -(1 << 64)
    assert rice.exact_sum(np.arange(4)) == 6
