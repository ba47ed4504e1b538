"""The laws of AbsHistogram, on data chosen to break them."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from calibrate import histogram
from calibrate import native as collect
from calibrate import native as compiled
from calibrate.errors import CalibrationError
from calibrate.histogram import AbsHistogram, abs_histogram, empty_histogram, merge, merge_all, range_exp_for

BITS = 6
Floats = NDArray[np.float32]

SUBNORMAL = float(np.finfo(np.float32).tiny)
sizes = st.integers(0, 40)
any_floats = st.one_of(
    hnp.arrays(np.float32, sizes, elements=st.floats(width=32, allow_subnormal=True)),
    hnp.arrays(np.float16, sizes, elements=st.floats(width=16, allow_subnormal=True)),
    hnp.arrays(np.float32, sizes, elements=st.floats(-SUBNORMAL, SUBNORMAL, width=32)),
    hnp.arrays(np.uint32, sizes, elements=st.integers(0, 2**32 - 1)).map(lambda bits: bits.view(np.float32)),
    hnp.arrays(np.uint16, sizes, elements=st.integers(0, 2**16 - 1)).map(lambda bits: bits.view(np.float16)),
)


@pytest.fixture(params=["compiled", "numpy"], autouse=True, scope="module")
def passes(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every law holds for the compiled passes and for the NumPy ones."""
    if request.param == "compiled" and not collect.COMPILED:
        if os.environ.get("TARED_REQUIRE_COMPILED"):
            pytest.fail("calibrate/count.c was not compiled when the package was installed")
        pytest.skip("the package was installed without a C compiler")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "numpy":
            patch.setattr(histogram, "scan", collect.scan_numpy)
            patch.setattr(histogram, "count", collect.count_numpy)
        yield


def counted_by_hand(x: NDArray[np.floating], range_exp: int) -> list[int]:
    """Bin by bin in exact Python integers and fractions."""
    counts = [0] * (1 << BITS)
    for value in x[np.isfinite(x)].astype(np.float64):
        counts[int(abs(value) * 2.0 ** (BITS - range_exp))] += 1
    return counts


@given(any_floats)
def test_counts_every_finite_value_in_its_bin(x: NDArray[np.floating]) -> None:
    histogram = abs_histogram(x, BITS)
    finite = np.abs(x[np.isfinite(x)].astype(np.float64))
    assert histogram.counts.tolist() == counted_by_hand(x, histogram.range_exp)
    assert histogram.amax == finite.max(initial=0.0)
    assert histogram.zeros == (finite == 0.0).sum()
    assert histogram.nonfinite == x.size - finite.size
    assert histogram.total == finite.size


@given(st.lists(any_floats, max_size=5), st.permutations(range(5)), st.sampled_from([2, BITS, 12]))
def test_any_batching_and_order_gives_the_same_bits(parts: Sequence[Floats], order: Sequence[int], bits: int) -> None:
    with np.errstate(invalid="ignore"):  # a signalling NaN
        whole = abs_histogram(np.concatenate([p.astype(np.float32) for p in parts] or [np.zeros(0, np.float32)]), bits)
    shuffled = [parts[i] for i in order if i < len(parts)]
    assert merge_all([abs_histogram(p, bits) for p in shuffled], bits) == whole


@given(any_floats, st.integers(0, 20))
def test_widening_equals_having_started_wider(x: NDArray[np.floating], more: int) -> None:
    narrow = abs_histogram(x, BITS)
    range_exp = min(narrow.range_exp + more, 128)
    assert narrow.widened(range_exp).counts.tolist() == counted_by_hand(x, range_exp)


@pytest.mark.parametrize(
    ("amax", "expected"), [(0.0, -100), (1e-45, -100), (0.75, 0), (1.0, 1), (1.5, 1), (3.4e38, 128)]
)
def test_range_is_the_smallest_power_of_two_above_amax(amax: float, expected: int) -> None:
    assert range_exp_for(amax) == expected


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_large_array_is_collected_in_pieces(dtype: type[np.floating], monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    x = (rng.normal(size=100_003) * np.exp2(rng.uniform(-9, 9, 100_003))).astype(dtype)
    x[[7, 50_000]] = np.nan, -np.inf
    whole = abs_histogram(x)
    monkeypatch.setattr(histogram, "_PIECE", 999)
    assert abs_histogram(x) == whole
    assert abs_histogram(x[::-1]) == whole
    assert abs_histogram(x.astype(np.float32)) == whole


def test_counts_survive_what_a_float_cannot_hold() -> None:
    one = abs_histogram(np.array([0.3, 0.9, 0.0], np.float32), BITS)
    many = AbsHistogram(one.counts * 2**53, one.range_exp, one.amax, one.zeros * 2**53, 0)
    both = merge(many, abs_histogram(np.array([0.3], np.float32), BITS))
    assert both.counts.max() == 2**53 + 1
    assert both.total == 3 * 2**53 + 1
    assert merge(both, both).widened(5).counts.tolist() == (both.widened(5).counts * 2).tolist()


def test_more_than_int64_counts_is_an_error_and_not_a_negative_count() -> None:
    counts = np.zeros(1 << BITS, np.int64)
    counts[-1] = 2**62
    half = AbsHistogram(counts, 0, float(np.float32(0.999)), 0, 0)
    with pytest.raises(CalibrationError, match=r"histogram\.overflow"):
        merge(half, half)


def test_refuses_what_it_cannot_count_exactly() -> None:
    with pytest.raises(ValueError, match="float64"):
        abs_histogram(np.zeros(3))
    for bits in (1, 17, 28):
        with pytest.raises(ValueError, match="2 to 16 bits"):
            abs_histogram(np.ones(3, np.float32), bits)
    for range_exp in (-5, 129):
        with pytest.raises(ValueError, match="only widens"):
            abs_histogram(np.ones(3, np.float32)).widened(range_exp)
    with pytest.raises(CalibrationError, match=r"histogram\.bits.*64 and 4096"):
        merge(empty_histogram(BITS), empty_histogram())


FLUSHING = """
#include <xmmintrin.h>
void flush_subnormals(int on) { _mm_setcsr(on ? _mm_getcsr() | 0x8040 : _mm_getcsr() & ~0x8040); }
"""


def test_a_thread_that_flushes_subnormals_counts_the_same(tmp_path: Path) -> None:
    """Some runtimes leave their threads so."""
    compiler = shutil.which("cc")
    if compiler is None or platform.machine() != "x86_64":
        pytest.skip("needs a C compiler on x86-64")
    (tmp_path / "flushing.c").write_text(FLUSHING)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", "flushing.so", "flushing.c"], cwd=tmp_path, check=True)
    flush_subnormals = ctypes.CDLL(str(tmp_path / "flushing.so")).flush_subnormals
    x = np.array([1e-45, -1e-39, 0.0, SUBNORMAL], np.float32)
    usual = abs_histogram(x[:3]), abs_histogram(x)
    flush_subnormals(1)
    try:
        found = abs_histogram(x[:3]), abs_histogram(x)
    finally:
        flush_subnormals(0)
    assert found == usual
    assert found[0].zeros == 1


@pytest.mark.parametrize("content", [b"", b"\x7fELF and then nothing", b"text"])
def test_a_broken_build_of_the_passes_is_left_alone(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"_count{EXTENSION_SUFFIXES[0]}").write_bytes(content)
    monkeypatch.setattr(compiled, "__file__", str(tmp_path / "native.py"))
    assert compiled.load() is None


def test_another_version_of_the_passes_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_VERSION", -1)
    assert compiled.load() is None
