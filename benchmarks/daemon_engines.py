"""The engines that a daemon comes to by itself: first jobs, other scenes, a night, and what planning costs the video.

    python -m benchmarks.daemon_engines [--parts first sample ...] [--models resnet20 ...] [--json | --markdown]

Needs ../shared/data (or $TARED_SHARED/data). ONNX Runtime, one thread. The module of each part has its settings:

    first    benchmarks/daemon_first.py: the first job of a daemon on each model, and its engine on labelled images
    sample   the same of the bundled sample, whatever the models
    scenes   benchmarks/daemon_scenes.py: engines that are made of one scene, on every other
    night    benchmarks/daemon_night.py: a first start in the dark, then daylight; the detectors of COCO's classes
    beside   benchmarks/daemon_beside.py: latency and memory while a job plans; on a quiet machine only
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from benchmarks.daemon_beside import beside
from benchmarks.daemon_first import first, sample
from benchmarks.daemon_night import night
from benchmarks.daemon_process import FIRST_SCENES
from benchmarks.daemon_scenes import scenes
from benchmarks.report import Bar, Section, add_output_option, bars_section, publish

Part = Callable[[list[str], Path, Progress], tuple[list[Section], list[Bar]]]
PARTS: dict[str, Part] = {"first": first, "sample": sample, "scenes": scenes, "night": night, "beside": beside}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="The engines that a daemon comes to by itself.")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--models", nargs="+", choices=FIRST_SCENES, default=list(FIRST_SCENES))
    add_output_option(parser)
    options = parser.parse_args()
    sections, bars = list[Section](), list[Bar]()
    with tempfile.TemporaryDirectory() as kept, Progress(console=Console(stderr=True)) as progress:
        for part in options.parts:
            folder = Path(kept) / part
            folder.mkdir()
            tables, found = PARTS[part](options.models, folder, progress)
            sections += tables
            bars += found
    publish([*sections, bars_section(bars)], options)


if __name__ == "__main__":
    main()
