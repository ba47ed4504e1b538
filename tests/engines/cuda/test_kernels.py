"""kernels.cu against the CPU's numbers, to the last bit, on two executors: fibers on the CPU, and a GPU.

The GPU's half is skipped without one; REQUIRE_GPU=1 makes its absence a failure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np
import pytest
from counted import counted
from fiber_executor import COMPILER, FiberExecutor
from kernel_reference import divergences, fixed_log, histograms, tensors
from numpy.typing import NDArray
from opened_gpu import opened_gpu

from calibrate.divergence import LEVELS
from calibrate.histogram import AbsHistogram, abs_histogram
from calibrate.threshold import entropy_window, histogram_amax
from engines.cuda.kernels import Argument, CudaExecutor, DeviceHistograms, KernelGeometry, search_entropy
from engines.errors import DeviceError

Array = NDArray[Any]
ExecutorFor = Callable[[KernelGeometry], CudaExecutor]
GEOMETRIES = [
    KernelGeometry(),
    KernelGeometry(11, 4, 128),
    KernelGeometry(13),
    KernelGeometry(13, 0, 256),
    KernelGeometry(12, 1, 1024),
]
SMALL = KernelGeometry(11, 2, 128)
# The kernels are compiled for each geometry. They share one source, so by default two are tried.
OTHERS = [pytest.param(each, marks=pytest.mark.trial) for each in GEOMETRIES[1:]]


@pytest.fixture(scope="session", params=["fibers", pytest.param("gpu", marks=pytest.mark.gpu)])
def executor_for(request: pytest.FixtureRequest) -> Iterator[ExecutorFor]:
    """Opens the executor of a geometry, once each."""
    opened: dict[KernelGeometry, Any] = {}
    if request.param == "fibers":
        if COMPILER is None:
            pytest.skip("no C++ compiler to build kernels.cu for the CPU: install g++, or set CXX")
        yield lambda geometry: opened.setdefault(geometry, FiberExecutor(geometry))
        return
    with opened_gpu() as gpu, gpu.current():
        yield lambda geometry: opened.get(geometry) or opened.setdefault(geometry, CudaExecutor(gpu, geometry))
        for executor in opened.values():
            executor.close()
        opened.clear()


def able(executor: CudaExecutor, kernel: str) -> CudaExecutor:
    """The executor, unless its device is too small for this kernel."""
    if executor.resident_blocks(kernel) == 0:
        need = executor.geometry.shared_bytes()[kernel]
        pytest.skip(f"a block of {kernel} needs {need} bytes of shared memory, more than this GPU has")
    return executor


class Counting:
    """The executor, with its launches counted and, if given, another number of blocks that run at once."""

    def __init__(self, executor: CudaExecutor, resident: int | None = None) -> None:
        self.geometry = executor.geometry
        self.upload, self.download = executor.upload, executor.download
        self.empty, self.zeros = executor.empty, executor.zeros
        self.launches: list[int] = []  # blocks of each
        self._executor, self._resident = executor, resident

    def resident_blocks(self, kernel: str) -> int:
        return self._resident or self._executor.resident_blocks(kernel)

    def launch(self, kernel: str, blocks: int, arguments: Sequence[Argument], stream: object | None) -> None:
        self.launches.append(blocks)
        self._executor.launch(kernel, blocks, arguments, stream)


class Tap:
    """DeviceHistograms over arrays instead of addresses."""

    def __init__(self, executor: Counting, arrays: Sequence[Array]) -> None:
        self._executor = executor
        self._histograms = DeviceHistograms(
            cast("CudaExecutor", executor), [x.size for x in arrays], [x.dtype for x in arrays]
        )

    def collect(self, arrays: Sequence[Array]) -> list[AbsHistogram]:
        buffers = [self._executor.upload(x, None) for x in arrays]
        return self._histograms.collect([buffer.address for buffer in buffers])


def assert_equal(found: AbsHistogram, x: Array, case: object) -> None:
    expected = abs_histogram(x, found.bits)
    assert found.counts.dtype == np.int64, case
    np.testing.assert_array_equal(found.counts, expected.counts, str(case))
    fields = ("range_exp", "amax", "zeros", "nonfinite")
    assert [getattr(found, f) for f in fields] == [getattr(expected, f) for f in fields], case


@pytest.mark.parametrize("geometry", [GEOMETRIES[0], *OTHERS], ids=str)
def test_equals_the_histogram_of_the_cpu(executor_for: ExecutorFor, geometry: KernelGeometry) -> None:
    """Tensors of every kind that fit into one block, and two that are spread over all of them."""
    rng = np.random.default_rng(1)
    with np.errstate(over="ignore"):  # some halves become infinite
        arrays = {
            (kind, size, dtype): values.astype(dtype)
            for size in (0, 1, 5, 1024)
            for kind, values in tensors(rng, size).items()
            for dtype in ("float32", "float16")
        }
        large = tensors(rng, 20_011)
        arrays["wide", 20_011, "float32"], arrays["broken", 20_011, "float16"] = (
            large["wide"],
            large["broken"].astype(np.float16),
        )
    resident = 3 if GEOMETRIES.index(geometry) % 2 else 15
    executor = Counting(able(executor_for(geometry), "abs_histogram"), resident)
    tap = Tap(executor, list(arrays.values()))
    for launches in (2, 1):  # most first guesses are wrong; then they hold
        for (case, x), found in zip(arrays.items(), tap.collect(list(arrays.values())), strict=True):
            assert_equal(found, x, case)
        assert len(executor.launches) == launches
        executor.launches.clear()


def test_every_half_in_every_range(executor_for: ExecutorFor) -> None:
    codes = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    for exponent in (-24, -14, -1, 7, 16):
        halves = np.where(np.abs(codes.astype(np.float32)) < 2.0**exponent, codes, np.float16(0.0))
        tap = Tap(Counting(executor_for(SMALL)), [halves])
        for x in (halves, codes, halves):  # by its own range, by one too low, and by one too high
            assert_equal(tap.collect([x])[0], x, exponent)


@pytest.mark.parametrize(
    "range_exp", [-100, *(pytest.param(each, marks=pytest.mark.trial) for each in (-99, -30, 3, 100, 127)), 0, 128]
)
@pytest.mark.parametrize("octaves", [-2, -1, 0, 1, 2])
def test_float_edges(executor_for: ExecutorFor, range_exp: int, octaves: int) -> None:
    """Every bin's edge and its neighbours on both sides, on a range that the guess knew so many octaves lower."""
    executor = Counting(executor_for(SMALL))
    with np.errstate(over="ignore"):  # of the topmost floats' neighbours
        edges = (np.arange(SMALL.bins + 1) * np.ldexp(1.0, range_exp - SMALL.bits)).astype(np.float32)
        x = np.concatenate((edges, np.nextafter(edges, np.float32(0)), -np.nextafter(edges, np.float32(np.inf))))
        x = np.append(x[np.abs(x.astype(np.float64)) < 2.0**range_exp], np.array([1e-45, -1e-38], np.float32))
        moved = x * np.float32(2.0**octaves)
    tap = Tap(executor, [x])
    assert_equal(tap.collect([x])[0], x, "first")
    executor.launches.clear()
    assert_equal(tap.collect([moved])[0], moved, "moved")
    if -98 <= range_exp <= 126:
        assert len(executor.launches) == (1 if abs(octaves) <= SMALL.tail // 2 else 2)


def test_a_range_that_jumps_costs_a_second_launch_of_that_tensor_alone(executor_for: ExecutorFor) -> None:
    rng = np.random.default_rng(3)
    steady, jumping = rng.normal(0.0, 1.0, 6_000).astype(np.float32), rng.normal(0.0, 1e-3, 3000).astype(np.float32)
    executor = Counting(executor_for(SMALL), resident=48)
    tap = Tap(executor, [steady, jumping])
    tap.collect([steady, jumping])
    for factor, launches in (
        (1.0, 1),
        (2.0, 1),
        (0.5, 1),
        (4.0, 2),
        (4.0, 1),
        (2.0, 1),
        (1e-6, 2),
        (0.0, 1),
        (1e-6, 1),
    ):
        executor.launches.clear()
        frame = [steady, jumping * np.float32(factor)]
        for x, found in zip(frame, tap.collect(frame), strict=True):
            assert_equal(found, x, factor)
        assert len(executor.launches) == launches, factor
        assert executor.launches[1:] == [6] * (launches - 1)  # 750 vectors, one for each of 128 threads


def test_small_tensors_share_blocks_and_large_ones_are_split(executor_for: ExecutorFor) -> None:
    rng = np.random.default_rng(4)
    sizes = [*rng.integers(0, 40, 60), 50_000, 0, *rng.integers(0, 9, 20), 0]
    arrays = [rng.normal(size=size).astype(rng.choice(["float32", "float16"])) for size in sizes]
    for resident in (12, 84):
        tap = Tap(Counting(executor_for(SMALL), resident), arrays)
        for index, (x, found) in enumerate(zip(arrays, tap.collect(arrays), strict=True)):
            assert_equal(found, x, index)


def test_nothing_to_count_is_no_launch(executor_for: ExecutorFor) -> None:
    executor = Counting(executor_for(SMALL))
    assert Tap(executor, []).collect([]) == []
    empty = np.zeros((3, 0), np.float16)
    for found in Tap(executor, [empty, empty]).collect([empty, empty]):
        assert_equal(found, empty, "empty")
    assert executor.launches == []


def test_no_block_meets_more_values_than_it_can_count(executor_for: ExecutorFor) -> None:
    class Unlaunched(Counting):
        def launch(self, _: str, blocks: int, *__: object) -> None:
            self.launches.append(blocks)

    executor = Unlaunched(executor_for(SMALL), resident=12)
    for elements, dtype, blocks in ((1 << 20, np.float32, 12), (1 << 40, np.float32, 1024), (1 << 40, np.float16, 512)):
        DeviceHistograms(cast("CudaExecutor", executor), [elements], [np.dtype(dtype)]).collect([256])
        assert executor.launches.pop() == blocks
        assert elements / blocks < 1 << 32


def test_refuses_what_it_cannot_count(executor_for: ExecutorFor) -> None:
    executor = executor_for(SMALL)
    buffer = executor.upload(np.zeros(64, np.float32), None)
    half = DeviceHistograms(executor, [8], [np.dtype(np.float16)])
    with pytest.raises(DeviceError, match=r"kernels\.alignment.*tensor 0 at address 0x.*16-byte") as refused:
        half.collect([buffer.address + 8])
    assert refused.value.code == "kernels.alignment"
    with pytest.raises(DeviceError, match=r"kernels\.alignment.*tensor 0 at address 0x0"):
        half.collect([0])
    for counts, windows in (((1, 4096), (1, 2)), ((2, SMALL.bins), (1, 2)), ((0, SMALL.bins), (1, 2))):
        with pytest.raises(ValueError, match=rf"\(tensors, {SMALL.bins}\)"):
            search_entropy(executor, np.zeros(counts, np.int64), np.zeros(windows, np.int32))


def test_the_fixed_order_logarithm_is_a_logarithm() -> None:
    x = np.concatenate((np.arange(1.0, 5000.0), np.geomspace(1.0, 2.0**63, 20_000)))
    assert np.abs(fixed_log(x) - np.log(x)).max() <= 2 * np.spacing(44.0)
    np.testing.assert_allclose(fixed_log(x[1:]), np.log(x[1:]), rtol=5e-16)


@pytest.mark.parametrize("geometry", [SMALL, GEOMETRIES[0], *OTHERS], ids=str)
def test_entropy_is_that_of_numpy_to_the_last_bit(executor_for: ExecutorFor, geometry: KernelGeometry) -> None:
    rows = np.stack(list(histograms(np.random.default_rng(5), geometry.bins).values()))
    if geometry != SMALL:  # there every shape; the others differ in nothing but how they share the work
        rows = rows[::4]
    windows = np.array([[0, geometry.bins + 9], [LEVELS, geometry.bins]] * len(rows), np.int32)[: len(rows)]
    windows[1::5] = [geometry.bins // 3, geometry.bins // 2]
    curves = np.zeros((len(rows), geometry.bins + 1))
    chosen = search_entropy(able(executor_for(geometry), "entropy_search"), rows, windows, None, curves)
    for row, window, curve, bins in zip(rows, windows, curves, chosen, strict=True):
        expected = divergences(row, (int(window[0]), int(window[1])), geometry.threads)
        np.testing.assert_array_equal(curve.view(np.uint64), expected.view(np.uint64))
        near = np.flatnonzero((expected <= expected.min() + 1e-13) & np.isfinite(expected))
        assert bins == (near[-1] if near.size else min(window[1], geometry.bins))


def test_entropy_chooses_as_the_cpu_does(executor_for: ExecutorFor) -> None:
    rng = np.random.default_rng(6)
    rows = np.stack([row for _ in range(3) for row in histograms(rng, SMALL.bins).values()])
    assert_same_choices(executor_for(SMALL), rows)


def assert_same_choices(executor: CudaExecutor, rows: NDArray[np.int64]) -> None:
    """The bins that method `entropy` keeps on the CPU, over every row with enough of them to search."""
    rows = rows[np.flatnonzero(rows[:, LEVELS:].any(axis=1))]
    seen = [counted(row) for row in rows]
    chosen = search_entropy(executor, rows, np.array([entropy_window(each) for each in seen], np.int32))
    np.testing.assert_array_equal(chosen, [histogram_amax(each, "entropy") for each in seen])


def test_entropy_of_nothing(executor_for: ExecutorFor) -> None:
    executor = executor_for(SMALL)
    assert search_entropy(executor, np.zeros((0, SMALL.bins), np.int64), np.zeros((0, 2), np.int32)).shape == (0,)
    rows = np.zeros((4, SMALL.bins), np.int64)
    rows[1, 0] = 5  # bin 0 is taken as bin 1
    rows[2:, 1:] = 3
    windows = np.array([[0, SMALL.bins], [0, SMALL.bins], [300, 200], [-7, -1]], np.int32)
    assert search_entropy(executor, rows, windows).tolist() == [SMALL.bins, SMALL.bins, 200, 0]
