"""Draw a threshold in its histogram: which values of a tensor INT8 clips, and which it rounds to zero."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from agent.reports.calibration import TensorFacts, tensor_facts
from docs.tools.figures.picture import BLUE, FAINT, ORANGE, SKY, VERMILLION, mark, new_figure, save
from docs.tools.figures.street_run import StreetRun
from engines.calibration import load_calibration

_HEIGHT_PX = 620
_BARS = 160
_STEPS = 127


def draw_threshold(run: StreetRun, path: Path) -> None:
    """Write the picture: of the tensor that loses most by clipping in the calibration of the night."""
    calibration = load_calibration(run.engines[0].path / "calibration.json")
    facts = max(tensor_facts(calibration), key=lambda each: each.clipped * (each.clipping > 0.0))
    figure = new_figure(_HEIGHT_PX)
    figure.set_layout_engine("constrained")
    axes = figure.add_subplot()
    edges, counts = _bars(facts)
    step = facts.amax / _STEPS
    centres = 0.5 * (edges[:-1] + edges[1:])
    for kept, color in ((centres <= facts.amax, SKY), (centres > facts.amax, VERMILLION)):
        axes.bar(edges[:-1][kept], counts[kept], np.diff(edges)[kept], align="edge", color=color)
    axes.axvspan(0.0, 0.5 * step, color=ORANGE, alpha=0.6, linewidth=0.0)
    axes.set_yscale("log")
    axes.set_ylim(0.7, 4.0 * counts.max())
    axes.set_xlim(0.0, 1.02 * facts.histogram.amax)
    axes.set_xlabel(f"absolute value of the tensor {facts.name}, over {calibration.frames} frames of the night")
    axes.set_ylabel("values (log scale)")
    mark(axes, facts.amax, f"threshold {facts.amax:.3g}: the end of INT8's range", BLUE, "right")
    mark(axes, facts.histogram.amax, f"largest value {facts.histogram.amax:.3g}", FAINT, "right")
    save(figure, path)


def _bars(facts: TensorFacts) -> tuple[np.ndarray, np.ndarray]:
    """Return edges (n + 1,) and counts (n,) up to the largest value, with exact zeros left out."""
    counts = facts.histogram.counts.astype(np.float64)
    counts[0] = max(counts[0] - facts.histogram.zeros, 0.0)
    used = int(np.ceil(facts.histogram.amax / facts.histogram.bin_width))
    cuts = np.unique(np.linspace(0, used, _BARS + 1).astype(int))
    return cuts * facts.histogram.bin_width, np.add.reduceat(counts[:used], cuts[:-1])
