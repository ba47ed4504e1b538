"""The wire form of a histogram: exact, compact, and closed to anything else."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from calibrate.count_codec import pack
from calibrate.errors import CalibrationError
from calibrate.histogram import AbsHistogram, abs_histogram, checked, from_bytes, to_bytes

BITS = 6
REFUSED = r"histogram\.damaged"

data = hnp.arrays(np.float32, st.integers(0, 60), elements=st.floats(width=32, allow_subnormal=True))


def sample() -> AbsHistogram:
    return abs_histogram(np.random.default_rng(0).normal(size=3000).astype(np.float32))


def resealed(body: bytes) -> bytes:
    """A forger's bytes: the checksum is right."""
    return body + struct.pack("<I", zlib.crc32(body))


@given(data, st.integers(0, 63), st.integers(0, 10), st.sampled_from([2, BITS, 11, 12, 13, 16]))
@example(np.array([np.inf], np.float32), 63, 0, BITS)
def test_a_histogram_comes_back_from_its_bytes(x: NDArray[np.float32], shift: int, wider: int, bits: int) -> None:
    collected = abs_histogram(x, bits)
    collected = collected.widened(min(collected.range_exp + wider, 128))
    shift = min(shift, 63 - max(collected.total, collected.nonfinite).bit_length())  # as far as a histogram may count
    nonfinite = collected.nonfinite << shift
    histogram = AbsHistogram(
        collected.counts << shift, collected.range_exp, collected.amax, collected.zeros << shift, nonfinite
    )
    assert from_bytes(to_bytes(histogram)) == histogram
    assert from_bytes(to_bytes(histogram)).counts.dtype == np.int64


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


HEADER = struct.Struct("<4sBxhIdQQ")


def with_header(**changes: object) -> bytes:
    """The sample's bytes under another header, with the right checksum."""
    whole = to_bytes(sample())
    names = ("magic", "bits", "range_exp", "used", "amax", "zeros", "nonfinite")
    parts = dict(zip(names, HEADER.unpack_from(whole), strict=True))
    return resealed(HEADER.pack(*{**parts, **changes}.values()) + whole[HEADER.size : -4])


def test_its_own_header_is_accepted() -> None:
    assert from_bytes(with_header()) == sample()


@pytest.mark.parametrize(
    "changes",
    [
        *({"magic": b"tAH2"}, {"bits": 1}, {"bits": 17}, {"bits": 63}, {"used": 0}, {"used": 1 << 13}),
        *({"used": 3}, {"nonfinite": 2**63}, {"zeros": 2**64 - 1}, {"amax": 1e300}, {"amax": -0.5}, {"range_exp": 129}),
    ],
)
def test_hostile_headers_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(CalibrationError, match=REFUSED):
        from_bytes(with_header(**changes))


@pytest.mark.parametrize("counts", [[-1], [5, -1, 5], [2**62, 2**62], [2**63 - 1, 1]])
def test_counts_that_are_negative_or_overflow_are_refused(counts: list[int]) -> None:
    header = HEADER.pack(b"tAH3", 2, 0, len(counts), 0.25 * len(counts) - 0.125, 0, 0)
    with pytest.raises(CalibrationError, match="negative, or more than int64 holds"):
        from_bytes(resealed(header + pack(np.array(counts, np.int64))))


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"amax": 5.0}, "amax 5.0 on a range"),
        ({"amax": 0.25}, "is the last with counts"),
        ({"amax": float("nan")}, "no float32"),
        ({"amax": 0.99}, "no float32"),
        ({"range_exp": -20}, "on a range of"),
        ({"zeros": 10**6}, "zeros in a first bin"),
        ({"nonfinite": -1}, "not finite"),
        ({"counts": np.ones(64, np.uint64)}, "uint64 counts"),
        ({"counts": np.ones(64)}, "float64 counts"),
        ({"counts": np.full(64, -1)}, "negative"),
        ({"counts": np.full(64, 2**60)}, "more than int64 holds"),
        ({"counts": np.zeros(60, np.int64)}, "shape"),
        ({"counts": np.zeros((8, 8), np.int64)}, "shape"),
    ],
)
def test_parts_that_do_not_fit_each_other_are_refused(change: dict[str, object], found: str) -> None:
    parts: dict[str, Any] = {
        "counts": np.ones(64, np.int64),
        "range_exp": 0,
        "amax": float(np.float32(0.99)),
        "zeros": 0,
        "nonfinite": 0,
    }
    assert checked(AbsHistogram(**parts)).total == 64
    with pytest.raises(CalibrationError, match=f"{REFUSED}.*{found}"):
        checked(AbsHistogram(**{**parts, **change}))
