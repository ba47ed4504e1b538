"""The wire form of a histogram: exact, compact, and closed to anything else."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from calibrate.errors import CalibrationError
from calibrate.histogram import AbsHistogram, abs_histogram, checked, empty_histogram, from_bytes, to_bytes

BITS = 6
REFUSED = r"histogram\.damaged"

data = hnp.arrays(np.float32, st.integers(0, 60), elements=st.floats(width=32, allow_subnormal=True))


def same(a: AbsHistogram, b: AbsHistogram) -> bool:
    parts = [(h.counts.tolist(), h.counts.dtype, h.range_exp, h.amax, h.zeros, h.nonfinite) for h in (a, b)]
    return parts[0] == parts[1]


def sample() -> AbsHistogram:
    return abs_histogram(np.random.default_rng(0).normal(size=3000).astype(np.float32))


def resealed(body: bytes) -> bytes:
    """A forger's bytes: the checksum is right."""
    return body + struct.pack("<I", zlib.crc32(body))


@given(data, st.integers(0, 63), st.integers(0, 10))
def test_what_was_counted_comes_back(x: NDArray[np.float32], shift: int, wider: int) -> None:
    collected = abs_histogram(x, BITS)
    collected = collected.widened(min(collected.range_exp + wider, 128))
    grown = collected.counts << min(shift, 63 - int(collected.total).bit_length())
    histogram = AbsHistogram(grown, collected.range_exp, collected.amax, collected.zeros, collected.nonfinite << shift)
    assert same(from_bytes(to_bytes(histogram)), histogram)


@pytest.mark.parametrize("bits", [0, 1, 11, 12, 13])
def test_any_number_of_bins(bits: int) -> None:
    x = np.random.default_rng(0).normal(size=3000).astype(np.float32)
    for histogram in (abs_histogram(x, bits), empty_histogram(bits)):
        assert same(from_bytes(to_bytes(histogram)), histogram)


@pytest.mark.parametrize("values", [10**4, 10**6, 10**8])
def test_a_hundred_tensors_fit_400_kib(values: int) -> None:
    """Normal, Laplace and rectified data, 4096 bins: as a network's, from one frame's values to a thousand's."""
    rng = np.random.default_rng(0)
    size = 0
    for number in range(30):
        x = [rng.normal, rng.laplace][number % 2](size=min(values, 10**6))
        x = np.maximum(x, 0.0) if number % 3 == 0 else x
        histogram = abs_histogram((x * rng.uniform(0.5, 1.0)).astype(np.float32))
        counts = rng.poisson(histogram.counts * (values / x.size)) if values > x.size else histogram.counts
        counts[histogram.counts == 0] = 0
        counts[np.flatnonzero(histogram.counts)[-1]] += 1
        size += len(to_bytes(AbsHistogram(counts, histogram.range_exp, histogram.amax, 0, 0)))
    assert size / 30 * 100 <= 400 * 1024


@given(st.binary(max_size=300))
def test_foreign_bytes_are_refused(content: bytes) -> None:
    for foreign in (content, resealed(content), resealed(to_bytes(sample())[:40] + content)):
        with pytest.raises(CalibrationError, match=REFUSED):
            from_bytes(foreign)


@given(st.data())
def test_every_damage_is_refused(data: st.DataObject) -> None:
    whole = to_bytes(sample())
    at = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(CalibrationError, match=REFUSED):
        from_bytes(whole[:at])
    changed = bytearray(whole)
    changed[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CalibrationError, match=REFUSED):
        from_bytes(bytes(changed))
    with pytest.raises(CalibrationError, match=REFUSED):
        from_bytes(whole + whole[: at + 1])


def test_a_bomb_is_not_unpacked() -> None:
    """A header that claims 2**24 bins of 8 bytes, over a few bytes of data."""
    header = struct.pack("<4sBBhIdQQ", b"tAH1", 24, 8, 0, 1 << 24, 0.5, 0, 0)
    with pytest.raises(CalibrationError, match=r"counts of .* bytes where the header says"):
        from_bytes(resealed(header + to_bytes(sample())[len(header) : -4]))


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"amax": 5.0}, "amax 5.0 on a range"),
        ({"amax": 0.25}, "is the last with counts"),
        ({"amax": -1.0}, "amax -1.0"),
        ({"amax": float("nan")}, "amax nan"),
        ({"amax": 0.1 + 1e-12}, "amax"),
        ({"range_exp": -20}, "on a range of"),
        ({"range_exp": 200}, "on a range of"),
        ({"zeros": 10**6}, "zeros in a first bin"),
        ({"nonfinite": -1}, "not finite"),
        ({"counts": np.full(64, -1)}, "negative"),
        ({"counts": np.full(64, 2**60)}, "more than int64 holds"),
        ({"counts": np.zeros(60, np.int64)}, "shape"),
        ({"counts": np.zeros((8, 8), np.int64)}, "shape"),
    ],
)
def test_parts_that_do_not_fit_each_other_are_refused(change: dict[str, object], found: str) -> None:
    parts = {
        "counts": np.ones(64, np.int64),
        "range_exp": 0,
        "amax": float(np.float32(0.99)),
        "zeros": 0,
        "nonfinite": 0,
    }
    assert checked(AbsHistogram(**parts)).total == 64
    with pytest.raises(CalibrationError, match=f"{REFUSED}.*{found}"):
        checked(AbsHistogram(**{**parts, **change}))
