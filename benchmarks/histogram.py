"""Collecting a histogram of |x| beside what else counts: wall time over 64 MiB of float32, everybody in turn.

    python -m benchmarks.histogram [--rounds 15] [--markdown | --json]

One thread each, and two for ours. The contenders do not do the same work. Ours finds the range itself and returns the
exact amax, the number of zeros and the number of non-finite values along with the counts, in two passes. The others
are given the range, and count only: in one pass where they take |x| inside the loop, after a pass of np.abs where they
cannot. fast-histogram is measured both with np.abs and, on data that has no sign, without it: that is the fastest that
it can be, and what the bar compares with.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

from benchmarks.peers import COUNTERS, HERE, TARED, Peer, PeerError, Worker
from benchmarks.report import Bar, Section, add_output_option, at_least, bars_section, publish, times

SIZE = 1 << 24  # 64 MiB
BITS = 12
OURS = "tared, one thread"
RIVAL = "fast-histogram 0.14 on the data as it is"
COLUMNS = ("contender", "wall time", "time / ours", "fastest round", "GB/s", "fastest / ours", "counted wrong")
RIVAL_ABS = "fast-histogram 0.14 after np.abs"


@dataclass(frozen=True)
class Contender:
    """A function of a worker; `signed`: whether it also counts what is below zero."""

    name: str
    peer: Peer
    script: str
    function: str
    signed: bool = True


CONTENDERS = (
    Contender(OURS, TARED, "histogram_tared", "one_thread"),
    Contender("tared, two threads", TARED, "histogram_tared", "two_threads"),
    Contender(RIVAL, COUNTERS, "histogram_counters", "fast_histogram_direct", signed=False),
    Contender(RIVAL_ABS, COUNTERS, "histogram_counters", "fast_histogram"),
    Contender("numba 0.68.1, the plain loop", COUNTERS, "histogram_counters", "numba_loop"),
    Contender("torch.histc 2.13.0 after torch.abs", COUNTERS, "histogram_counters", "torch_histc"),
    Contender("cv2.calcHist after np.abs", HERE, "histogram_here", "opencv"),
    Contender("np.bincount by chunks", HERE, "histogram_here", "numpy_bincount"),
    Contender("np.histogram after np.abs", HERE, "histogram_here", "numpy_histogram"),
    Contender("a copy of the data, for scale", HERE, "histogram_here", "memory_copy"),
)


@dataclass
class Results:
    """Seconds per round by contender, and how many counts differ from ours; or why somebody takes no part."""

    title: str
    wall_s: dict[str, list[float]]
    wrong: dict[str, int]
    missing: dict[str, str]

    def ratio(self, name: str) -> float | None:
        """Its time as a multiple of ours, the median over rounds."""
        pairs = zip(self.wall_s.get(name, ()), self.wall_s[OURS], strict=False)
        ratios = [theirs / ours for theirs, ours in pairs]
        return median(ratios) if ratios else None


def compare(title: str, x: NDArray[np.float32], workers: dict[tuple[str, str], Worker | str], rounds: int) -> Results:
    """Everybody counts the same data, in turn; the first round warms up and is checked, not timed."""
    results = Results(title, {}, {}, {})
    limit = float(2.0 ** np.frexp(np.abs(x).max())[1])
    expected = np.bincount((np.abs(x) * (2.0**BITS / limit)).astype(np.int64), minlength=1 << BITS)
    for worker in workers.values():
        if isinstance(worker, Worker):
            worker.call("load", x)
    for number in range(rounds + 1):
        for contender in CONTENDERS:
            worker = workers[contender.peer.name, contender.script]
            if isinstance(worker, str) or contender.name in results.missing:
                results.missing.setdefault(contender.name, str(worker))
            elif contender.signed or x.min() >= 0.0:
                _take_turn(results, contender, worker, limit, expected, timed=number > 0)
    return results


def _take_turn(
    results: Results, contender: Contender, worker: Worker, limit: float, expected: NDArray[np.int64], timed: bool
) -> None:
    arguments = (BITS,) if contender.peer is TARED else (1 << BITS, limit)
    try:
        reply = worker.call(contender.function, *arguments)
    except PeerError as error:
        results.missing[contender.name] = str(error)
        return
    if timed:
        results.wall_s.setdefault(contender.name, []).append(reply.wall_s)
    elif reply.value.size == expected.size:
        results.wrong[contender.name] = int(np.abs(reply.value.astype(np.int64) - expected).sum())


def section(results: Results) -> Section:
    """Other work on the machine only ever adds time: the fastest rounds tell how much of the medians it is."""
    table = Section(results.title, COLUMNS)
    for contender in CONTENDERS:
        if contender.name in results.missing:
            table.rows.append((contender.name, results.missing[contender.name], *[""] * 5))
        elif contender.name in results.wall_s:
            seconds, fastest = median(results.wall_s[contender.name]), min(results.wall_s[contender.name])
            wrong = results.wrong.get(contender.name)
            table.rows.append(
                (
                    contender.name,
                    f"{1e3 * seconds:.1f} ms",
                    times(results.ratio(contender.name)),
                    f"{1e3 * fastest:.1f} ms",
                    f"{4e-9 * SIZE / fastest:.2f}",
                    times(fastest / min(results.wall_s[OURS])),
                    "" if wrong is None else str(wrong),
                )
            )
    return table


def bars(results: list[Results]) -> list[Bar]:
    found = []
    for result in results:
        direct, after_abs = result.ratio(RIVAL), result.ratio(RIVAL_ABS)
        if RIVAL in result.wall_s or RIVAL in result.missing:
            found.append(at_least(f"{result.title}: fast-histogram's time without np.abs", 1.0, direct))
            found.append(at_least("the same, the goal", 1.7, direct))
        found.append(at_least(f"{result.title}: fast-histogram's time with its np.abs", 1.0, after_abs))
        found.append(at_least("the same, the goal", 1.7, after_abs))
    return found


def open_workers() -> dict[tuple[str, str], Worker | str]:
    """One process per environment and script, or the reason why there is none."""
    opened: dict[tuple[str, str], Worker | str] = {}
    for contender in CONTENDERS:
        key = contender.peer.name, contender.script
        if key not in opened:
            try:
                opened[key] = Worker(contender.peer, contender.script)
            except PeerError as error:
                opened[key] = str(error)
    return opened


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Collecting a histogram of |x| beside what else counts.")
    parser.add_argument("--rounds", type=int, default=15)
    add_output_option(parser)
    options = parser.parse_args()
    workers = open_workers()
    normal = np.random.default_rng(0).normal(size=SIZE).astype(np.float32)
    cases = {"normal": normal, "normal after ReLU": np.maximum(normal, 0.0), "half-normal": np.abs(normal)}
    results = [compare(f"{name}, 64 MiB", x, workers, options.rounds) for name, x in cases.items()]
    ours = workers[TARED.name, "histogram_tared"]
    sections = [section(result) for result in results]
    if isinstance(ours, Worker):
        kind = "compiled passes" if ours.call("facts").value else "NumPy passes: no compiler when it was installed"
        sections[0].note = f"tared ran its {kind}"
    publish([*sections, bars_section(bars(results))], options)
    for worker in workers.values():
        if isinstance(worker, Worker):
            worker.close()


if __name__ == "__main__":
    main()
