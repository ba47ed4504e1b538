"""Packed counts: exact, small, and closed to foreign bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from calibrate.count_codec import pack, unpack

Counts = NDArray[np.int64]

# Of every magnitude, and alike in a row.
counts = st.lists(
    st.tuples(st.integers(0, 62).flatmap(lambda bits: st.integers(0, 1 << bits)), st.integers(1, 90)), max_size=8
).map(lambda runs: np.repeat([value for value, _ in runs], [length for _, length in runs]).astype(np.int64))


def unpacked(data: bytes, size: int) -> Counts:
    found = np.full(size, -1, np.int64)
    unpack(data, found)
    return found


@given(counts)
@example(np.array([(1 << 63) - 1, 0, (1 << 63) - 1, -1, -(1 << 63)], np.int64))
@example(np.arange(1 << 16))
@example(np.zeros(1 << 16, np.int64))
def test_packed_counts_come_back(values: Counts) -> None:
    assert np.array_equal(unpacked(pack(values), values.size), values)


@given(counts, st.data())
def test_damage_is_refused_or_read_as_so_many_counts(values: Counts, data: st.DataObject) -> None:
    """Anything but ValueError fails here: an error of another kind would end a merge."""
    packed = bytearray(pack(values))
    for _ in range(data.draw(st.integers(0, 3)) if packed else 0):
        packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    size = data.draw(st.sampled_from([0, 1, values.size, values.size + 1, 1 << 16]))
    try:
        unpacked(bytes(packed), size)
    except ValueError:
        return


@given(counts.filter(len), st.data())
def test_nothing_may_be_missing_nor_follow(values: Counts, data: st.DataObject) -> None:
    packed = pack(values)
    for other in (packed[: data.draw(st.integers(0, len(packed) - 1))], packed + b"\0", packed + packed):
        with pytest.raises(ValueError, match=r"pco|behind"):
            unpacked(other, values.size)
