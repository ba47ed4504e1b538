"""The entropy search beside the peers': CPU time per histogram, and whether the answers agree.

    python -m benchmarks.thresholds [--quick] [--markdown | --json]

Each peer runs in an environment of its own (benchmarks/peers.py) with one thread; ours and theirs take turns on the
same histograms. --quick leaves out 8192 bins, where one call of pytorch-quantization takes a quarter of a minute.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

import numpy as np
from numpy.typing import NDArray

from benchmarks.peers import HERE, MODELOPT, MXNET, PPQ, PYTORCH_QUANTIZATION, TARED, Peer, PeerError, Worker
from benchmarks.report import Bar, Section, add_output_option, at_least, at_most, bars_section, publish, times

SAMPLES = 1 << 20
TENSORS = 100
OUR_REPEATS = 5  # per turn: one call of ours is too short for one turn
EXHAUSTIVE = "entropy:nvidia"  # every candidate, as pytorch-quantization

Counts = NDArray[np.int64]
Random = np.random.Generator


@dataclass(frozen=True)
class Contender:
    """A peer's search. method: ours of the same rules; candidates: how many it tries, by the number of bins."""

    name: str
    peer: Peer
    script: str
    method: str
    candidates: Callable[[int], int]
    repeats: int = 1
    at_8192: bool = True


CONTENDERS = (
    Contender(
        "pytorch-quantization 2.1.3",
        PYTORCH_QUANTIZATION,
        "threshold_pytorch_quantization",
        "entropy:nvidia",
        lambda bins: bins - 127,
    ),
    Contender(
        "ModelOpt 0.47.0, PyTorch part",
        MODELOPT,
        "threshold_modelopt",
        "entropy:nvidia",
        lambda bins: bins - 127,
        at_8192=False,  # the same code as pytorch-quantization's
    ),
    Contender("ONNX Runtime", HERE, "threshold_onnxruntime", "entropy:onnxruntime", lambda bins: bins - 63),
    Contender("PPQ 0.6.6", PPQ, "threshold_ppq", "entropy:ppq", lambda bins: bins // 128, repeats=5),
    Contender("MXNet 1.9.1, C++", MXNET, "threshold_mxnet", "entropy:tvm", lambda bins: bins - 127),
)

# Activations look like these: |x|.
FAMILIES: dict[str, Callable[[Random], NDArray[np.float64]]] = {
    "normal": lambda random: random.normal(size=SAMPLES),
    "after ReLU": lambda random: np.maximum(random.normal(size=SAMPLES), 0.0),
    "after ReLU6": lambda random: np.clip(random.normal(2.0, 3.0, SAMPLES), 0.0, 6.0),
    "after SiLU": lambda random: _silu(random.normal(0.0, 3.0, SAMPLES)),
    "Laplace": lambda random: random.laplace(size=SAMPLES),
    "log-normal": lambda random: random.lognormal(0.0, 1.0, SAMPLES),
    "Student t, 3 degrees": lambda random: random.standard_t(3.0, SAMPLES),
    "uniform": lambda random: random.uniform(-1.0, 1.0, SAMPLES),
    "two bumps": lambda random: random.normal(random.choice([1.0, 6.0], SAMPLES), 0.5),
    "one outlier": lambda random: np.append(random.normal(size=SAMPLES - 1), 60.0),
}


def _silu(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return x / (1.0 + np.exp(-x))


def histograms(bins: int, count: int) -> list[Counts]:
    """`count` histograms of |x| up to its maximum, from the families in turn."""
    samplers = list(FAMILIES.values())
    made = []
    for seed in range(count):
        x = np.abs(samplers[seed % len(samplers)](np.random.default_rng(seed)))
        made.append(np.histogram(x, bins, (0.0, x.max()))[0].astype(np.int64))
    return made


@dataclass
class Results:
    """CPU seconds by contender and by our methods, one per histogram; and the answers, in bins."""

    bins: int
    cpu_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    amax: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    missing: dict[str, str] = field(default_factory=dict)

    def time(self, name: str) -> float | None:
        return median(self.cpu_s[name]) if self.cpu_s.get(name) else None

    def ratio(self, name: str, ours: str) -> float | None:
        """How many times as long as ours, the median over histograms of the two turns' ratio."""
        pairs = list(zip(self.cpu_s.get(name, ()), self.cpu_s[ours], strict=False))
        return median(theirs / our for theirs, our in pairs) if pairs else None


def compare(ours: Worker, peers: dict[str, Worker | str], cases: list[Counts]) -> Results:
    """Everybody takes a turn on every histogram, ours first, with each method."""
    results = Results(cases[0].size)
    for counts in cases:
        for method in ("entropy", *dict.fromkeys(contender.method for contender in CONTENDERS)):
            _record(results, method, ours, (counts, method), OUR_REPEATS)
        for contender in CONTENDERS:
            worker = peers[contender.name]
            if contender.name in results.missing or (results.bins > 2048 and not contender.at_8192):
                continue
            if isinstance(worker, str):
                results.missing[contender.name] = worker
                continue
            try:
                _record(results, contender.name, worker, (counts,), contender.repeats)
            except PeerError as error:
                results.missing[contender.name] = str(error)
    return results


def _record(results: Results, name: str, worker: Worker, arguments: tuple[object, ...], repeats: int) -> None:
    reply = worker.call("amax", *arguments, repeats=repeats)
    results.cpu_s[name].append(reply.cpu_s)
    results.amax[name].append(float(reply.value))


def section(results: Results) -> Section:
    columns = ("peer", "CPU time", "candidates", "ours, same rules", "ratio", "ratio to entropy", "equal", "difference")
    table = Section(f"One histogram of {results.bins} bins, CPU time", columns)
    for contender in CONTENDERS:
        seconds, ours = results.time(contender.name), results.time(contender.method)
        if seconds is None or ours is None:
            if contender.name in results.missing:
                table.rows.append((contender.name, results.missing[contender.name], *[""] * 6))
            continue
        table.rows.append(
            (
                contender.name,
                _ms(seconds),
                str(contender.candidates(results.bins)),
                f"{_ms(ours)} ({contender.method})",
                times(results.ratio(contender.name, contender.method)),
                times(results.ratio(contender.name, "entropy")),
                *_agreement(results.amax[contender.name], results.amax[contender.method]),
            )
        )
    table.rows.append(("Apache TVM", "not installed: no wheel on PyPI has relay.quantize any more", *[""] * 6))
    default = results.time("entropy") or 0.0
    table.note = (
        f"ours by default (`entropy`, the candidates within 6 dB of the least noise): {_ms(default)}; medians of "
        f"{len(results.cpu_s['entropy'])} histograms. equal: answers that are; difference: the largest relative one "
        f"of amax. ONNX Runtime and MXNet sum in float32, which ranks near ties by its rounding"
    )
    return table


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 1.0 else f"{seconds:.3g} s"


def _agreement(theirs: list[float], ours: list[float]) -> tuple[str, str]:
    """How many answers are equal to float32's precision, and the largest relative difference."""
    differences = [abs(a - b) / max(a, b) for a, b in zip(theirs, ours, strict=False)]
    return f"{sum(d < 1e-6 for d in differences)}/{len(differences)}", f"{max(differences):.2%}"


def many(ours: Worker) -> dict[str, float]:
    """CPU seconds for TENSORS histograms of 2048 bins, which one call of the worker goes through, by method."""
    stacked = np.stack(histograms(2048, TENSORS))
    return {
        method: median(ours.call("amax", stacked, method).cpu_s for _ in range(3)) for method in ("entropy", EXHAUSTIVE)
    }


def bars(results: list[Results], seconds: dict[str, float]) -> list[Bar]:
    found = []
    rival, ppq = CONTENDERS[0].name, "PPQ 0.6.6"
    by_bins = {result.bins: result for result in results}
    for bins, limit in ((2048, 400), (8192, 1000)):
        for method in (EXHAUSTIVE, "entropy"):
            value = by_bins[bins].ratio(rival, method) if bins in by_bins else None
            found.append(at_least(f"{method}: pytorch-quantization's time at {bins} bins", limit, value))
    for method, taken in seconds.items():
        found.append(at_most(f"{method}: {TENSORS} tensors of 2048 bins one after the other, CPU", 0.35, taken, " s"))
    slower = by_bins[2048].ratio(ppq, EXHAUSTIVE)
    what = f"{EXHAUSTIVE}, 1921 candidates: times PPQ's time with its 16"
    found.append(at_most(what, 3, None if slower is None else 1 / slower))
    return found


def open_peers() -> dict[str, Worker | str]:
    """A warm worker by name, or the reason why there is none."""
    return {contender.name: _open(contender) for contender in CONTENDERS}


def _open(contender: Contender) -> Worker | str:
    try:
        worker = Worker(contender.peer, contender.script)
        worker.call("amax", histograms(256, 1)[0])
    except PeerError as error:
        return str(error)
    return worker


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="The entropy search beside the peers'.")
    parser.add_argument("--quick", action="store_true", help="2048 bins only")
    parser.add_argument("--histograms", type=int, default=len(FAMILIES), metavar="N", help="at 2048 bins (10)")
    add_output_option(parser)
    options = parser.parse_args()
    peers, ours = open_peers(), Worker(TARED, "threshold_tared")
    ours.call("amax", histograms(2048, 1)[0], "entropy")
    sizes = [(2048, options.histograms)] + ([] if options.quick else [(8192, 2)])
    results = [compare(ours, peers, histograms(bins, count)) for bins, count in sizes]
    sections = [section(result) for result in results]
    publish([*sections, bars_section(bars(results, many(ours)))], options)
    for worker in (ours, *peers.values()):
        if isinstance(worker, Worker):
            worker.close()


if __name__ == "__main__":
    main()
