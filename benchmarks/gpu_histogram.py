"""Our histogram kernel beside the memory's own speed, CuPy and PyTorch; the entropy search of 200 tensors.

    python -m benchmarks.gpu_histogram [--bits 12 11 13] [--rounds 20] [--gib 8]

Needs a GPU, PyCUDA and nvcc; CuPy and PyTorch where installed. Kernel and copy take turns on the same memory, then the
peers come one by one. What is timed is the launch that DeviceHistograms and search_entropy make, recorded and made
again; its counts are compared with abs_histogram's, and after the timing once more: so many launches must have counted
everything so many times. Beside it the whole calls are timed, as their caller waits for them.
Exit code: 0 when every bar is reached, 1 when one is missed, 2 without a GPU, 3 when no bar of speed applied (they are
for 4096 bins).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from benchmarks.gpu_cases import Case, agree, cases, values
from benchmarks.gpu_device import CudaDevice, View
from benchmarks.gpu_report import BAR_BITS, Row, Search, bars, markdown, no_speed_judged
from benchmarks.gpu_timing import Contender, Speed, median_wall_ms, take_turns
from calibrate.divergence import LEVELS, kl_divergence
from calibrate.histogram import AbsHistogram, abs_histogram
from calibrate.threshold import entropy_window
from engines.cuda.gpu import Gpu
from engines.cuda.kernels import CudaExecutor, DeviceHistograms, search_entropy
from engines.errors import DeviceError

SEARCHED = 200
_IN_A_ROW = 20  # launches of a sample, of which a frame's takes some ten microseconds
REACHED, MISSED, CANNOT_START, UNJUDGED = 0, 1, 2, 3  # exit codes
_ROWS, _CHOSEN = 2, 3  # what the kernels write, by its place among their arguments


class Recorder:
    """An executor that remembers its last launch."""

    def __init__(self, executor: CudaExecutor) -> None:
        self._executor = executor
        self.last: tuple[Any, ...] = ()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def launch(self, *launch: Any) -> None:
        self.last = launch
        self._executor.launch(*launch)


@dataclass
class Frame:
    """A frame on the device, with its launch. counted: its rows after one launch."""

    histograms: list[AbsHistogram]
    launch: tuple[Any, ...]
    counted: NDArray[np.int64]
    launches: int = 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bits", type=int, nargs="+", choices=(11, 12, 13), default=[12], help="log2 of the bins")
    parser.add_argument("--rounds", type=int, default=20, help="samples of each; their median counts")
    parser.add_argument("--gib", type=float, default=8.0, help="the large tensor, at most an eighth of the free memory")
    options = parser.parse_args()
    try:
        with Gpu() as gpu, gpu.current():
            return measured(gpu, options)
    except DeviceError as error:
        return refused(error)


def measured(gpu: Gpu, options: argparse.Namespace) -> int:
    """Keeps its errors to itself: what their tracebacks hold has to be freed while the context is current."""
    try:
        return benchmark(CudaDevice(gpu), options.bits, options.rounds, int(options.gib * 2**30))
    except DeviceError as error:
        return refused(error)


def refused(error: DeviceError) -> int:
    print(f"error: {error}", file=sys.stderr)
    return CANNOT_START


def benchmark(device: CudaDevice, bits: list[int], rounds: int, large_bytes: int) -> int:
    print(device.name, flush=True)
    rows, executors = [], {width: device.executor(width) for width in bits}
    # An eighth: the tensor, the copy's target and what the peers allocate, which is several times the tensor.
    for case in cases(bits, min(large_bytes, device.free_bytes // 8)):
        rows.append(measure(case, device, executors[case.bits], rounds))
        print(rows[-1].line(), flush=True)
    search = measure_search(device, executors[BAR_BITS if BAR_BITS in bits else bits[0]], rounds)
    print(search.line(), flush=True)
    judged = list(bars(rows, search, device.data_centre))
    print("\n" + markdown(device.name, rows, search, judged))
    if any(bar.reached is False for bar in judged):
        return MISSED
    if no_speed_judged(judged):
        print(f"no bar of speed was judged: they are for {1 << BAR_BITS} bins (--bits {BAR_BITS})", file=sys.stderr)
        return UNJUDGED
    return REACHED


def measure(case: Case, device: CudaDevice, executor: CudaExecutor, rounds: int) -> Row:
    pool = values(case)
    memory = device.allocate(case.frames * case.frame_bytes)
    target = device.allocate(case.frame_bytes)
    starts = range(int(memory), int(memory) + case.frames * case.frame_bytes, case.frame_bytes)
    fill(device, int(memory), case.frames * case.frame_bytes, pool)
    frames = [collected(case, start, executor) for start in starts]
    equal = all(agree(case, number, frame.histograms, pool) for number, frame in enumerate(frames))

    def count(number: int) -> None:
        frame = frames[number % case.frames]
        executor.launch(*frame.launch)
        frame.launches += 1

    def copy(number: int) -> None:
        device.copy(int(target), starts[number % case.frames], case.frame_bytes)

    times = _IN_A_ROW if case.frames > 1 else 1
    kernel, copying = Contender(count, times), Contender(copy, times)
    take_turns(device, [kernel, copying], rounds)
    peers = peer_speeds(case, device, starts[0], frames[0].histograms[0].range_exp, rounds)
    equal = equal and all(still_agrees(frame, executor) for frame in frames)
    waited = median_wall_ms(collector(case, starts[0], executor), rounds)
    return Row(
        tensors=case.name,
        dtype=case.dtype.name,
        data=case.data,
        bits=case.bits,
        read=kernel.speed(case.frame_bytes),
        copy=copying.speed(case.frame_bytes),
        collect_ms=waited,
        collect=Speed(case.frame_bytes / waited / 1e6),
        peers=peers,
        equal=equal,
    )


def peer_speeds(case: Case, device: CudaDevice, start: int, range_exp: int, rounds: int) -> dict[str, Speed | str]:
    """On the frame at `start`, into the bins that our own histogram of it has."""
    views = [View(start + tensor * case.tensor_bytes, case.elements, case.dtype) for tensor in range(case.tensors)]
    found: dict[str, Speed | str] = {}
    for name, run in device.peers(views, 1 << case.bits, 2.0**range_exp):
        if isinstance(run, str):
            found[name] = run
            continue
        contender = Contender(run)
        take_turns(device, [contender], rounds)
        found[name] = contender.speed(case.frame_bytes)
    return found


def fill(device: CudaDevice, address: int, nbytes: int, pool: NDArray[np.generic]) -> None:
    """The pool, uploaded once and doubled there."""
    filled = min(pool.nbytes, nbytes)
    device.upload(address, pool[: filled // pool.itemsize])
    while filled < nbytes:
        step = min(filled, nbytes - filled)
        device.copy(address + filled, address, step)
        filled += step


def collector(case: Case, start: int, executor: CudaExecutor) -> Callable[[], list[AbsHistogram]]:
    """Collects the frame at `start`; a first time already, so that the guesses of its ranges hold from now on."""
    histograms = DeviceHistograms(executor, [case.elements] * case.tensors, [case.dtype] * case.tensors)
    addresses = [start + tensor * case.tensor_bytes for tensor in range(case.tensors)]
    histograms.collect(addresses)
    return lambda: histograms.collect(addresses)


def collected(case: Case, start: int, executor: CudaExecutor) -> Frame:
    recorder = Recorder(executor)
    found = collector(case, start, cast("CudaExecutor", recorder))()
    *_, arguments, stream = recorder.last
    return Frame(found, recorder.last, executor.download(arguments[_ROWS], stream))


def still_agrees(frame: Frame, executor: CudaExecutor) -> bool:
    """Whether every launch since has added the same counts again, and left amax alone."""
    *_, arguments, stream = frame.launch
    rows = executor.download(arguments[_ROWS], stream)
    counts = np.array_equal(rows[:, :-1], frame.launches * frame.counted[:, :-1])
    return counts and np.array_equal(rows[:, -1], frame.counted[:, -1])


def measure_search(device: CudaDevice, executor: CudaExecutor, rounds: int) -> Search:
    """Every candidate of every tensor competes: the longest search there is."""
    rng, bins = np.random.default_rng(1), executor.geometry.bins
    samples = [rng.standard_normal(100_000, np.float32) * np.float32(rng.uniform(0.1, 9.0)) for _ in range(SEARCHED)]
    counted = [abs_histogram(np.maximum(x, 0) if n % 2 else x, executor.geometry.bits) for n, x in enumerate(samples)]
    counts = np.stack([histogram.counts for histogram in counted])
    windows = np.tile(np.array([LEVELS, bins], np.int32), (SEARCHED, 1))
    recorder = Recorder(executor)
    chosen = search_entropy(cast("CudaExecutor", recorder), counts, windows)
    equal = all(is_best(counts[tensor], int(chosen[tensor])) for tensor in range(0, SEARCHED, SEARCHED // 5))
    kernel = Contender(lambda _: executor.launch(*recorder.last), _IN_A_ROW)
    take_turns(device, [kernel], rounds)
    *_, arguments, stream = recorder.last
    equal = equal and np.array_equal(executor.download(arguments[_CHOSEN], stream), chosen)
    return Search(
        tensors=SEARCHED,
        bits=executor.geometry.bits,
        kernel_ms=kernel.median_ms,
        call_ms=median_wall_ms(lambda: search_entropy(executor, counts, windows), rounds),
        windows_ms=median_wall_ms(lambda: [entropy_window(each) for each in counted], rounds),
        equal=equal,
    )


def is_best(counts: NDArray[np.int64], chosen: int) -> bool:
    """Whether NumPy finds no candidate better than this one, but for rounding."""
    first = np.array([counts[1]])  # NVIDIA's rule, see search_entropy
    candidates, divergence = kl_divergence(np.concatenate([first, counts[1:]]))
    return bool(divergence[candidates == chosen].min(initial=np.inf) <= np.nanmin(divergence) + 1e-12)


if __name__ == "__main__":
    sys.exit(main())
