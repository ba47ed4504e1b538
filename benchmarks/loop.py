"""The video loop beside its engine and its peers: speed, overhead, latency, fairness, preview, memory.

    python -m benchmarks.loop [--parts throughput overhead ...] [--models fastestdet yolox_nano] [--rounds 9]

Needs ../shared/data (or $TARED_SHARED/data) and mosquitto. The daemon runs as users start it, on real clips, with the
float reference as its engine, on one thread. What is compared takes turns: while one runs, the others are paused.
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from rich.console import Console
from rich.progress import Progress

from agent.mqtt.client import Endpoint
from benchmarks.loop_cameras import fairness
from benchmarks.loop_memory import flat, memory
from benchmarks.loop_peers import beside_peers
from benchmarks.loop_preprocess import preprocessing
from benchmarks.loop_preview import previewing
from benchmarks.loop_speed import overhead, throughput
from benchmarks.recalibration import broker
from benchmarks.report import Bar, Section, add_output_option, bars_section, publish

Part = Callable[[Path, Endpoint, list[str], int, Progress], tuple[list[Section], list[Bar]]]
PARTS: dict[str, Part] = {
    "throughput": throughput,
    "overhead": overhead,
    "preprocessing": preprocessing,
    "peers": beside_peers,
    "fairness": fairness,
    "preview": previewing,
    "flat": flat,
    "memory": memory,
}


class _Others:
    """What all else takes of the machine, from now on."""

    def __init__(self) -> None:
        self._before = self._now()

    def told(self) -> str:
        """Of what has been waited for."""
        spans = [after - before for before, after in zip(self._before, self._now(), strict=True)]
        all_s, own_s, wall_s = spans
        share = max(0.0, all_s - own_s) / (wall_s * (os.cpu_count() or 1))
        return f"others took {share:.0%} of the machine meanwhile"

    def _now(self) -> tuple[float, float, float]:
        """CPU s of everybody, CPU s of ours and our children, s."""
        times = psutil.cpu_times()
        ours = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        own_s = sum(usage.ru_utime + usage.ru_stime for usage in ours)
        return sum(times) - times.idle - times.iowait - times.guest - times.guest_nice, own_s, time.monotonic()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="How fast, how fair and how lean is the video loop?")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument(
        "--models", nargs="+", choices=["fastestdet", "yolox_nano"], default=["fastestdet", "yolox_nano"]
    )
    parser.add_argument("--rounds", type=int, default=9)
    add_output_option(parser)
    options = parser.parse_args()
    sections: list[Section] = []
    bars: list[Bar] = []
    with tempfile.TemporaryDirectory() as kept, Progress(console=Console(stderr=True)) as progress:
        folder = Path(kept)
        with broker(folder) as endpoint:
            for part in options.parts:
                (folder / part).mkdir()
                others = _Others()
                tables, found = PARTS[part](folder / part, endpoint, options.models, options.rounds, progress)
                tables[-1].note = "; ".join(filter(None, (tables[-1].note, others.told())))
                sections += tables
                bars += found
    publish([*sections, *([bars_section(bars)] if bars else [])], options)


if __name__ == "__main__":
    main()
