"""benchmarks/gpu_histogram.py on the CPU: its times mean nothing here, its checks of the counts do."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import pytest
from fiber_executor import COMPILER, FiberExecutor
from numpy.typing import NDArray

from benchmarks import gpu_cases, gpu_histogram
from benchmarks.gpu_cases import Case, cases, periodic_histogram
from benchmarks.gpu_device import CudaDevice
from benchmarks.gpu_histogram import MISSED, UNJUDGED, benchmark, is_best, measure, measure_search
from benchmarks.gpu_report import Row, Search, bars, markdown, no_speed_judged
from benchmarks.gpu_timing import Run, Speed
from calibrate.divergence import kl_divergence
from calibrate.histogram import abs_histogram
from engines.cuda.kernels import CudaExecutor, KernelGeometry

GEOMETRY = KernelGeometry(11, 2, 128)
ROW = Row(
    tensors="100 of 1.5 MB",
    dtype="float32",
    data="ReLU",
    bits=12,
    read=Speed(3900.0),
    copy=Speed(4000.0),
    collect_ms=0.2,
    collect=Speed(750.0),
    peers={"CuPy": Speed(51.04, ahead=False), "PyTorch": "not installed"},
    equal=True,
)
SEARCH = Search(200, 12, 0.4, 0.9, 12.0, True)


@dataclass(frozen=True)
class Memory:
    content: NDArray[np.uint8]

    def __int__(self) -> int:
        return self.content.ctypes.data


class HostDevice:
    """The host's memory in the place of a GPU's."""

    name, free_bytes, data_centre = "host", 1 << 20, True

    def executor(self, bits: int) -> FiberExecutor:
        return FiberExecutor(KernelGeometry(bits, 2, 128))

    def allocate(self, nbytes: int) -> Memory:
        whole = np.empty(nbytes + 256, np.uint8)
        return Memory(whole[-whole.ctypes.data % 256 :][:nbytes])

    def upload(self, address: int, values: NDArray[np.generic]) -> None:
        ctypes.memmove(address, values.ctypes.data, values.nbytes)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        ctypes.memmove(target, source, nbytes)

    def milliseconds(self, run: Run, times: int, gate: int) -> tuple[float, bool]:
        for number in range(times):
            run(number)
        return 1.0, gate > 0  # by a clock a slow machine would end the rounds before their time

    def peers(self, views: list[Any], bins: int, top: float) -> Iterator[tuple[str, Run | str]]:
        def count(_: int) -> None:
            for view in views:
                kind = ctypes.c_float if view.dtype == np.float32 else ctypes.c_uint16
                array = np.ctypeslib.as_array((kind * view.elements).from_address(view.address)).view(view.dtype)
                counted = np.histogram(np.abs(array), bins, (0.0, top))[0]
                assert counted.sum() == view.elements

        yield "NumPy", count
        yield "other", "not installed"


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    if COMPILER is None:
        pytest.skip("no C++ compiler to build kernels.cu for the CPU: install g++, or set CXX")
    monkeypatch.setattr(gpu_cases, "POOL", 1 << 12)
    monkeypatch.setattr(gpu_histogram, "SEARCHED", 5)
    monkeypatch.setattr(gpu_histogram, "_IN_A_ROW", 3)


class Wrong(FiberExecutor):
    """From launch number `first` on, a counter of what the kernel wrote is one too high."""

    def __init__(self, first: int, argument: int) -> None:
        super().__init__(GEOMETRY)
        self._first, self._argument = first, argument

    def launch(
        self,
        kernel: str,
        blocks: int,
        arguments: Any,
        stream: object | None = None,
        shared_bytes: int | None = None,
    ) -> None:
        super().launch(kernel, blocks, arguments, stream, shared_bytes)
        if self.launches >= self._first:
            written = arguments[self._argument]
            np.ctypeslib.as_array((ctypes.c_int32 * 1).from_address(written.address))[0] += 1


# In the place of the classes that talk to a GPU.
DEVICE = cast(CudaDevice, HostDevice())


def executor() -> CudaExecutor:
    return cast(CudaExecutor, FiberExecutor(GEOMETRY))


def wrong(first: int, argument: int) -> CudaExecutor:
    return cast(CudaExecutor, Wrong(first, argument))


def case(dtype: str, data: str) -> Case:
    return Case("3 of 5000", 2, 3, 5000, np.dtype(dtype), data, 11)


@pytest.mark.trial
@pytest.mark.parametrize("data", ["normal", "ReLU"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_every_launch_that_was_timed_counted_right(dtype: str, data: str) -> None:
    row = measure(case(dtype, data), DEVICE, executor(), rounds=2)
    assert row.equal
    numpy_speed = row.peers["NumPy"]
    assert isinstance(numpy_speed, Speed)
    assert min(row.read.gbps, row.copy.gbps, row.collect_ms, numpy_speed.gbps) > 0
    assert row.collect.gbps == pytest.approx(case(dtype, data).frame_bytes / row.collect_ms / 1e6)
    assert row.peers["other"] == "not installed"


@pytest.mark.parametrize("first", [1, 9], ids=["from the start", "only while it is timed"])
def test_a_wrong_count_is_found(first: int) -> None:
    assert not measure(case("float32", "ReLU"), DEVICE, wrong(first, argument=2), rounds=2).equal


@pytest.mark.trial
def test_the_search_is_measured_and_its_choices_compared() -> None:
    search = measure_search(DEVICE, executor(), rounds=1)
    assert search.equal
    assert search.bits == GEOMETRY.bits
    assert min(search.kernel_ms, search.call_ms, search.windows_ms) > 0
    assert not measure_search(DEVICE, wrong(1, argument=3), rounds=1).equal
    assert not measure_search(DEVICE, wrong(2, argument=3), rounds=1).equal


def test_only_the_least_divergence_is_the_best() -> None:
    counts = abs_histogram(np.random.default_rng(0).standard_normal(50_000, np.float32), 11).counts
    counts[0] = counts[1]
    candidates, divergence = kl_divergence(counts)
    order = candidates[np.argsort(divergence)]
    assert is_best(counts, int(order[0]))
    assert not any(is_best(counts, int(chosen)) for chosen in (*order[1:4], order[-1], 0))


@pytest.mark.parametrize("offset", [0, 3, 90])
@pytest.mark.parametrize("elements", [5, 64, 500])
def test_the_histogram_of_repeated_values(offset: int, elements: int) -> None:
    pool = np.random.default_rng(0).standard_normal(64, np.float32)
    expected = abs_histogram(pool[np.arange(offset, offset + elements) % 64], 11)
    found = periodic_histogram(pool, offset, elements, 11)
    np.testing.assert_array_equal(found.counts, expected.counts)
    assert (found.range_exp, found.amax, found.zeros) == (expected.range_exp, expected.amax, expected.zeros)


def test_every_bin_count_type_and_kind_of_data_is_a_case() -> None:
    found = list(cases([11, 12], 1 << 30))
    assert len({(c.name, c.dtype.name, c.data, c.bits) for c in found}) == len(found) == 16
    assert {c.frame_bytes for c in found} == {150_000_000, 1 << 30}
    assert all(c.tensor_bytes % 16 == 0 for c in found), "the kernel's alignment"


def test_the_bars() -> None:
    slow, paced = replace(ROW, read=Speed(3399.0)), replace(ROW, read=Speed(3999.0, ahead=False))
    half, fine = replace(slow, dtype="float16"), replace(slow, bits=13)
    rows = [ROW, slow, paced, half, fine]
    assert [bar.reached for bar in bars(rows, SEARCH, True)] == [True, False, None, True, True, True]
    long_call, long_kernel = replace(SEARCH, call_ms=1.1), replace(SEARCH, kernel_ms=1.1, call_ms=1.2)
    assert [bar.reached for bar in bars([], long_call, True)] == [True, False, True]
    assert [bar.reached for bar in bars([], long_kernel, True)] == [False, False, True]
    assert [bar.reached for bar in bars([], long_kernel, False)] == [None, None, True]
    assert [bar.reached for bar in bars([], replace(long_kernel, bits=11), True)] == [None, None, True]
    assert [bar.reached for bar in bars([replace(ROW, equal=False)], SEARCH, True)][-1] is False


def test_other_bins_leave_nothing_to_judge() -> None:
    other, small = replace(ROW, bits=11), replace(SEARCH, bits=11)
    assert no_speed_judged(list(bars([other], small, True)))
    assert not no_speed_judged(list(bars([ROW], small, False)))
    assert not no_speed_judged(list(bars([other], SEARCH, True)))


@pytest.mark.parametrize(("bits", "code"), [(11, UNJUDGED), (12, MISSED)])
def test_the_exit_code_differs_for_unjudged_and_missed(
    bits: int, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_histogram, "cases", lambda bits, _: [replace(case("float32", "ReLU"), bits=bits[0])])
    assert benchmark(DEVICE, [bits], 1, 1 << 20) == code, "fibers are slower than any bar"
    assert ("no bar of speed was judged" in capsys.readouterr().err) is (code == UNJUDGED)


def test_the_block_for_the_results() -> None:
    text = markdown("GPU X", [ROW], SEARCH, list(bars([ROW], SEARCH, True)))
    assert "GPU X" in text
    cells = "| 100 of 1.5 MB | float32 | ReLU | 4096 | 3900 | 98% of 4000 | 51.0* | not installed | 750 | 0.200 | yes |"
    assert cells in text.splitlines()
    widths = {line.count("|") for line in text.splitlines() if line.startswith("|")}
    assert len(widths) == 1
    assert text.count("pass") == 4
    for figure in ("0.400 ms the kernel alone", "0.900 ms the whole call", "12.0 ms for the windows"):
        assert figure in text
