"""Calibration end to end beside the peers': CPU time, wall time and peak memory of whole processes.

    python -m benchmarks.calibration [--images 64 256] [--rounds 3] [--quick] [--markdown | --json]

The same network and the same PNG images for all (benchmarks/mobilenet_like.py), method entropy, each contender in a
fresh process of its own per round, in turn. Contenders:

    tared calibrate   the real command, 4096 bins of |x|; and again with timers at the phases' borders
    network           the bare network in ONNX Runtime over the same images, tensors exposed as outputs, nothing
                      counted: the floor. With every tensor exposed, and with only those that tared observes
    onnxruntime       its entropy calibrater, at 4096 signed bins, which resolve |x| as 2048 do, and at its default
                      of 128; once per number of images, since it takes minutes and gigabytes
    modelopt.onnx     quantize(), what a user calls, with its default of 128 signed bins

--quick leaves out onnxruntime at 4096 bins.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import psutil

from benchmarks import mobilenet_like
from benchmarks.peers import HERE, MODELOPT, ROOT, VAR, WORKERS, Peer, PeerError, interpreter
from benchmarks.report import Bar, Section, add_output_option, at_most, bars_section, publish, times

FOLDER = VAR / "mobilenet_like"
MIB = float(1 << 20)
THREADS = "2"
OURS, OURS_BY_PHASE = "tared calibrate", "tared, by phase"
BARE, BARE_TAPS = "network, all tensors", "network, our taps"
ORT_EQUAL, ORT_DEFAULT = "onnxruntime, 4096 bins", "onnxruntime, 128 bins"
MODELOPT_ONNX = "modelopt.onnx, 128 bins"
CALIBRATING = ("images", "network", "histograms", "search")
_ORT_BYTES_PER_IMAGE = 48 << 20  # it keeps every activation until the last image


@dataclass
class Run:
    """What one process took. phases: CPU seconds by phase, where the process tells."""

    cpu_s: float
    wall_s: float
    peak_bytes: int
    tensors: int = 0
    phases: dict[str, float] = field(default_factory=dict)


@dataclass
class Results:
    """All runs by contender for one number of images; or why somebody takes no part."""

    images: int
    runs: dict[str, list[Run]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def median(self, name: str, what: str) -> float | None:
        """The median over rounds of cpu_s, wall_s or peak_bytes."""
        return median(getattr(run, what) for run in self.runs[name]) if name in self.runs else None

    def ratio(self, name: str, other: str, what: str) -> float | None:
        """Of two medians; None where one is missing."""
        a, b = self.median(name, what), self.median(other, what)
        return None if a is None or b is None else a / b

    def calibrating(self, name: str) -> float | None:
        """CPU seconds from the first image to the last threshold: without imports, graph work and files."""
        runs = [run for run in self.runs.get(name, ()) if run.phases]
        return median(sum(run.phases.get(phase, 0.0) for phase in CALIBRATING) for run in runs) if runs else None


def measure(command: Sequence[str | Path]) -> Run:
    """Run a command by way of measure.py. Raises PeerError when it fails."""
    launcher = [sys.executable, str(WORKERS / "measure.py"), *map(str, command)]
    done = subprocess.run(launcher, capture_output=True, text=True, check=True, cwd=ROOT)
    found = json.loads(done.stdout)
    if found["status"]:
        raise PeerError(f"failed: {found['error']}")
    told = json.loads(found["output"])
    phases = {name: cpu for name, (cpu, _) in told.get("phases", {}).items()}
    return Run(found["cpu_s"], found["wall_s"], found["peak_bytes"], told["tensors"], phases)


def commands(images: int, work: Path, quick: bool) -> dict[str, tuple[Peer, list[str | Path], int]]:
    """By contender: whose Python, the command's arguments, and in how many rounds at most."""
    model, pictures = FOLDER / "model.onnx", FOLDER / f"images-{images}"
    output = work / "calibration.json"
    ours: list[str | Path] = [
        "calibrate",
        FOLDER / "model.yaml",
        "--frames",
        pictures,
        "-o",
        output,
        "--threads",
        THREADS,
        "--json",
    ]
    network: list[str | Path] = [WORKERS / "calibrate_network.py", model, pictures, THREADS]
    onnxruntime = WORKERS / "calibrate_onnxruntime.py"
    found: dict[str, tuple[Peer, list[str | Path], int]] = {
        OURS: (HERE, [Path(sys.executable).with_name("tared"), *ours], 99),
        OURS_BY_PHASE: (HERE, [WORKERS / "calibrate_tared.py", *ours], 99),
        BARE: (HERE, [*network, "all"], 99),
        BARE_TAPS: (HERE, [*network, output], 99),
        MODELOPT_ONNX: (MODELOPT, [WORKERS / "calibrate_modelopt.py", model, pictures, work], 99),
        ORT_DEFAULT: (HERE, [onnxruntime, model, pictures, "128", work], 1),
        ORT_EQUAL: (HERE, [onnxruntime, model, pictures, "4096", work], 1),
    }
    if quick:
        del found[ORT_EQUAL]
    return found


def compare(images: int, rounds: int, quick: bool) -> Results:
    """Every contender in turn, each in a process of its own."""
    mobilenet_like.write(FOLDER, images)
    results = Results(images)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            for name, (peer, arguments, most) in commands(images, Path(folder), quick).items():
                if number >= most or name in results.missing:
                    continue
                print(f"{images} images, round {number + 1}: {name}", file=sys.stderr)
                try:
                    _check_memory(name, images)
                    run = measure([interpreter(peer), *arguments])
                    results.runs.setdefault(name, []).append(run)
                except PeerError as error:
                    results.missing[name] = str(error)
    return results


def _check_memory(name: str, images: int) -> None:
    needed, available = images * _ORT_BYTES_PER_IMAGE, psutil.virtual_memory().available
    if name in (ORT_DEFAULT, ORT_EQUAL) and needed > available:
        raise PeerError(f"not run: needs {needed / MIB:.0f} MiB, {available / MIB:.0f} MiB are free")


def section(results: Results) -> Section:
    columns = ("contender", "tensors", "CPU", "wall", "peak memory", "CPU / tared", "wall / tared", "memory / tared")
    table = Section(f"Calibration on {results.images} images, whole processes", columns)
    for name, runs in results.runs.items():
        table.rows.append(
            (
                name,
                str(runs[0].tensors),
                f"{results.median(name, 'cpu_s'):.2f} s",
                f"{results.median(name, 'wall_s'):.2f} s",
                f"{(results.median(name, 'peak_bytes') or 0.0) / MIB:.0f} MiB",
                *(times(results.ratio(name, OURS, what)) for what in ("cpu_s", "wall_s", "peak_bytes")),
            )
        )
    table.rows += [(name, "", reason, *[""] * 5) for name, reason in results.missing.items()]
    return table


def phases(results: Results) -> Section:
    """CPU seconds by phase, medians; a process's own sum can differ a little from its total."""
    told = {name: runs for name, runs in results.runs.items() if runs[0].phases}
    names = list(dict.fromkeys(phase for runs in told.values() for run in runs for phase in run.phases))
    table = Section(f"CPU seconds by phase, {results.images} images", ("phase", *told))
    for phase in names:
        cells = [
            f"{median(run.phases[phase] for run in runs):.2f}" if phase in runs[0].phases else ""
            for runs in told.values()
        ]
        table.rows.append((phase, *cells))
    sums = [f"{results.calibrating(name):.2f}" for name in told]
    table.note = f"calibrating: {', '.join(CALIBRATING)}"
    table.rows.append(("calibrating", *sums))
    return table


def bars(results: Results) -> list[Bar]:
    """Times are CPU times: the machine is shared."""
    scope = f"{results.images} images: "
    modelopt, ours = results.calibrating(MODELOPT_ONNX), results.calibrating(OURS_BY_PHASE)
    return [
        at_most(scope + "time / onnxruntime's at equal bins", 0.1, results.ratio(OURS, ORT_EQUAL, "cpu_s")),
        at_most(scope + "memory / onnxruntime's", 0.05, results.ratio(OURS, ORT_DEFAULT, "peak_bytes")),
        at_most(scope + "time / modelopt.onnx's", 0.25, results.ratio(OURS, MODELOPT_ONNX, "cpu_s")),
        at_most(scope + "the same, calibrating alone", 0.25, ours / modelopt if ours and modelopt else None),
        at_most(scope + "time / the bare network, every tensor exposed", 1.5, results.ratio(OURS, BARE, "cpu_s")),
        at_most(scope + "time / the bare network, our taps exposed", 1.5, results.ratio(OURS, BARE_TAPS, "cpu_s")),
    ]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Calibration end to end beside the peers'.")
    parser.add_argument("--images", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="without onnxruntime at 4096 bins")
    add_output_option(parser)
    options = parser.parse_args()
    results = [compare(images, options.rounds, options.quick) for images in options.images]
    sections = [make(result) for result in results for make in (section, phases)]
    publish([*sections, bars_section([bar for result in results for bar in bars(result)])], options)


if __name__ == "__main__":
    main()
