"""Draw the chart of a precision plan: loss against latency, of the plans that were tried."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from agent.common.errors import AgentError
from agent.reports.plan import CostScale, Evidence, show_confidence, show_loss
from calibrate.errors import install_extra

if TYPE_CHECKING:  # matplotlib is an extra, and slow to import
    from matplotlib.axes import Axes

_SIZE_IN = (8.0, 5.0)
_DPI = 160  # 1280 x 800 px; shrunk to 800 px wide, text is still 14 px high
_TICKS = (0.0, 0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0)
_CLOSEST_TICKS = 0.06  # share of the axis
_INK, _TRIED, _ACCEPTED, _REFUSED = "#222222", "#4477aa", "#117733", "#cc3311"


def draw_chart(evidence: Evidence, path: Path) -> None:
    """Write a PNG of 1280 x 800 px; equal evidence gives equal bytes with one version of matplotlib.

    Loss is on a square-root scale, which shows 0 and keeps a loss of 1 from flattening the small ones. The bars reach
    from a measured loss to its upper bound. Raises AgentError: `plan.plot` without matplotlib, `plan.chart` where the
    file cannot be written.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        remedy = install_extra("plot")
        raise AgentError("plan.plot", "no package matplotlib", "matplotlib, to draw a chart", remedy) from error
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # whatever style the user has set
        figure = Figure(figsize=_SIZE_IN, dpi=_DPI, layout="constrained")
        _draw(evidence, figure.add_subplot())
        try:
            figure.savefig(path, format="png", metadata={"Software": None})
        except OSError as error:
            raise AgentError("plan.chart", f"{path}: {error}", "a file to write", "check the path") from error


def _draw(evidence: Evidence, axes: Axes) -> None:
    scale, max_loss = CostScale(evidence), evidence["max_loss"]
    axes.set_title(f"{evidence['model_name']}: what INT8 loses, and what it takes", loc="left", parse_math=False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("predicted latency (ms)" if scale.measured else "relative cost (MACs), % of all float")
    axes.set_ylabel("loss (1 − fidelity), square-root scale")
    axes.axhline(max_loss, color=_INK, linewidth=1.0, linestyle=(0, (5, 3)), label=f"allowed: {show_loss(max_loss)}")
    tried = sorted((scale.value(one["time"]), one["predicted_loss"]) for one in evidence["candidates"])
    tops = [max_loss, *(loss for _, loss in tried)]
    if tried:
        frames = evidence.get("frame_counts", {}).get("to_search", "few")
        axes.plot(*zip(*tried, strict=True), "o-", color=_TRIED, label=f"plans, loss on {frames} frames")
    for one in evidence["candidates"]:
        if (trial := one["trial"]) is not None:
            color, shape, outcome = (_ACCEPTED, "D", "accepted") if trial["accepted"] else (_REFUSED, "X", "refused")
            bound = f"at most {show_loss(trial['upper'])} with {show_confidence(evidence)}"
            x, label = scale.value(one["time"]), f"{outcome}: loss {show_loss(trial['loss'])}, {bound}"
            bar = [[0.0], [max(trial["upper"] - trial["loss"], 0.0)]]
            axes.errorbar(x, trial["loss"], bar, fmt=shape, color=color, capsize=4, markersize=8, label=label)
            tops.append(trial["upper"])
    axes.plot(scale.value(scale.all_float), 0.0, "s", color=_INK, markersize=7, clip_on=False, label="all float")
    _loss_axis(axes, min(1.15 * max(tops), 1.05))
    axes.legend(frameon=False)


def _loss_axis(axes: Axes, top: float) -> None:
    axes.set_yscale(  # signed, since matplotlib also evaluates values beyond the axis
        "function", functions=(lambda y: np.sign(y) * np.sqrt(np.abs(y)), lambda root: np.sign(root) * np.square(root))
    )
    axes.set_ylim(0.0, top)
    ticks = [0.0]
    for tick in _TICKS:
        if tick <= top and np.sqrt(tick) - np.sqrt(ticks[-1]) >= _CLOSEST_TICKS * np.sqrt(top):
            ticks.append(tick)
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
