"""Draw a threshold in its histogram: which values of a tensor INT8 clips, and which it rounds to zero."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from agent.common.html.pages import show_share
from agent.reports.calibration import TensorFacts, tensor_facts
from docs.tools.figures.picture import BLUE, FAINT, ORANGE, SKY, VERMILLION, mark, new_figure, save
from docs.tools.figures.street_run import StreetRun
from engines.calibration import load_calibration

_HEIGHT_PX = 700
_BARS = 80  # on each side of the threshold, at most
_STEPS, _ENLARGED = 127, 5

Bars = tuple[NDArray[np.float64], NDArray[np.float64]]


def draw_threshold(run: StreetRun, path: Path) -> None:
    """Write the picture: of the tensor of the night's calibration whose values are clipped most often."""
    calibration = load_calibration(run.engines[0].path / "calibration.json")
    facts = max(tensor_facts(calibration), key=lambda each: each.clipped)
    figure = new_figure(_HEIGHT_PX)
    figure.set_layout_engine("constrained")
    axes = figure.add_subplot()
    width, largest = facts.histogram.bin_width, facts.histogram.amax
    end, used = round(facts.amax / width), int(np.ceil(largest / width))
    _draw(axes, _bars(facts, 0, end), SKY)
    _draw(axes, _bars(facts, end, used), VERMILLION)
    axes.set_yscale("log")
    axes.set_ylim(bottom=0.7)
    axes.set_xlim(0.0, 1.02 * largest)
    axes.set_xlabel(f"absolute value, in {calibration.frames} frames of the night\n{facts.name}")
    axes.set_ylabel("values (log scale)")
    mark(axes, facts.amax, f"threshold {facts.amax:.3g}, the end of INT8's range", BLUE, "center")
    mark(axes, largest, f"largest value {largest:.3g}", FAINT, "right")
    clipped = f"clipped: {100.0 * facts.clipped:.1g} % of all values"
    axes.annotate(clipped, (0.62, 0.32), xycoords="axes fraction", color=VERMILLION)
    _enlarge(axes.inset_axes((0.6, 0.54, 0.36, 0.36)), facts)
    save(figure, path)


def _enlarge(axes: Axes, facts: TensorFacts) -> None:
    """Draw the smallest values, with the steps of INT8."""
    step, width = facts.amax / _STEPS, facts.histogram.bin_width
    half, used = round(0.5 * step / width), int(np.ceil(_ENLARGED * step / width))
    for first, last, color in ((0, half, ORANGE), (half, used, SKY)):
        edges, counts = _bars(facts, first, last)
        _draw(axes, (edges / step, counts), color)
    for number in range(1, _ENLARGED):
        axes.axvline(number, color=BLUE, linewidth=1.0)
    axes.set_xlim(0.0, _ENLARGED)
    axes.set_yticks([])
    axes.set_xlabel(f"the first of {_STEPS} steps of {step:.2g}")
    axes.set_title(f"rounded to zero: {show_share(facts.rounded)} of all values", color="#9a6a00", fontsize=10.0)


def _draw(axes: Axes, bars: Bars, color: str) -> None:
    edges, counts = bars
    axes.bar(edges[:-1], counts, np.diff(edges), align="edge", color=color)


def _bars(facts: TensorFacts, first: int, last: int) -> Bars:
    """Return edges (n + 1,) and counts (n,) of the bins from `first` to before `last`; exact zeros are left out."""
    counts = facts.histogram.counts.astype(np.float64)
    counts[0] = max(counts[0] - facts.histogram.zeros, 0.0)
    cuts = np.unique(np.linspace(first, last, _BARS + 1).astype(int))
    return cuts * facts.histogram.bin_width, np.add.reduceat(counts[:last], cuts[:-1])
