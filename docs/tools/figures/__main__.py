"""Make pictures of the manual anew.

    python -m docs.tools.figures [NAME ...] [-o docs/images] [--kept]

Without names all are made. Those of the sample share one run of it, which stays in var/figures; with --kept the run
that is there is drawn again.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import engines  # noqa: F401  # before ONNX Runtime is imported, which would report elsewhere
from benchmarks.peers import ROOT
from docs.tools.figures.alarm import draw_alarm
from docs.tools.figures.frontier import draw_frontier
from docs.tools.figures.sample import draw_sample
from docs.tools.figures.screens import require_browser, take_board, take_fleet, take_labels, take_report
from docs.tools.figures.street_run import StreetRun, kept_run, run_street
from docs.tools.figures.threshold import draw_threshold

IMAGES = ROOT / "docs" / "images"
# Drawn from what a run of the sample has left, by the name of the file.
OF_A_RUN: dict[str, Callable[[StreetRun, Path], None]] = {
    "sample": draw_sample,
    "threshold": draw_threshold,
    "alarm": draw_alarm,
    "label": take_labels,
    "report": take_report,
}
DURING_A_RUN = "web"
ALONE: dict[str, Callable[[Path], None]] = {"frontier": draw_frontier, "fleet": take_fleet}
OF_PAGES = {"web", "fleet", "label", "report"}
NAMES = (*OF_A_RUN, DURING_A_RUN, *ALONE)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Make pictures of the manual anew.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which: {', '.join(NAMES)} (default: all)")
    parser.add_argument("-o", "--output", type=Path, default=IMAGES, metavar="FOLDER")
    parser.add_argument("--kept", action="store_true", help="draw the run of the sample that is in var/figures")
    options = parser.parse_args()
    names = options.names or [name for name in NAMES if not (options.kept and name == DURING_A_RUN)]
    unknown = sorted(set(names) - set(NAMES))
    if unknown:
        parser.error(f"no picture {', '.join(unknown)}; there are {', '.join(NAMES)}")
    if options.kept and DURING_A_RUN in names:
        parser.error(f"{DURING_A_RUN} is taken while the sample runs: leave --kept away")
    if OF_PAGES & set(names):
        require_browser()  # before minutes have passed
    options.output.mkdir(parents=True, exist_ok=True)
    make(names, options.output, options.kept)


def make(names: list[str], folder: Path, is_kept: bool) -> None:
    """Make the named pictures in a folder. is_kept: draw the run that is in var/figures."""
    if any(name in OF_A_RUN or name == DURING_A_RUN for name in names):
        place = ROOT / "var" / "figures" / "street"
        watch = partial(take_board, folder / f"{DURING_A_RUN}.png") if DURING_A_RUN in names else None
        begun_s = time.monotonic()
        run = kept_run(place) if is_kept else run_street(place, watch)
        print(f"the sample's run: {time.monotonic() - begun_s:.0f} s")
        for name in (name for name in OF_A_RUN if name in names):
            _timed(partial(OF_A_RUN[name], run), folder / f"{name}.png")
    for name in (name for name in ALONE if name in names):
        _timed(ALONE[name], folder / f"{name}.png")


def _timed(draw: Callable[[Path], None], path: Path) -> None:
    begun_s = time.monotonic()
    draw(path)
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB, {time.monotonic() - begun_s:.0f} s")


if __name__ == "__main__":
    main()
