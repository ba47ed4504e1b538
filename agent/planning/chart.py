"""Draw the chart of a precision plan: loss against latency, of the frontier and of the candidates."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from agent.common.errors import AgentError
from agent.planning.report import (
    Candidate,
    CostScale,
    Evidence,
    chosen_candidate,
    show_confidence,
    show_digits,
    show_loss,
    trials_by_source,
)
from calibrate.errors import install_extra

if TYPE_CHECKING:  # matplotlib is an extra, and slow to import
    from matplotlib.axes import Axes

_SIZE_IN = (8.0, 5.0)
_DPI = 160  # 1280 x 800 px; shrunk to 800 px wide, text is still 14 px high
_TICKS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0)
_CLOSEST_TICKS = 0.06  # share of the axis
# Share of the axis: above it, the line of the allowed loss would cross the key, which then goes below the line.
_KEY_ABOVE = 0.6
_LINE_PT = 14.0
_ON_WHITE = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}  # the grid does not cross the words
_INK, _FAINT, _FRONTIER, _ACCEPTED, _REFUSED = "#222222", "#8a8a8a", "#4477aa", "#117733", "#cc3311"


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
    scale = CostScale(evidence)
    axes.set_title(f"{evidence['model_name']}: what INT8 loses, and what it takes", loc="left", parse_math=False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("predicted latency (ms)" if scale.measured else "relative cost (MACs), % of all float")
    axes.set_ylabel("loss (1 − fidelity), square-root scale")
    _loss_axis(evidence, axes)
    axes.axhline(evidence["max_loss"], color=_INK, linewidth=1.0, linestyle=(0, (5, 3)))
    ends = axes.get_yaxis_transform()
    allowed = f"allowed: {show_loss(evidence['max_loss'])}"
    axes.annotate(allowed, (1.0, evidence["max_loss"]), (0, 3), ends, "offset points", ha="right")
    known = [(scale.value(plan["time"]), plan["loss"]) for plan in evidence["frontier"] if plan["loss"] is not None]
    times, losses = [time for time, _ in known], [loss for _, loss in known]
    axes.plot(times, losses, "o-", color=_FRONTIER, linewidth=1.5, markersize=4, clip_on=False)
    for number, candidate in enumerate(evidence["candidates"]):
        if candidate["trial"] or number == evidence["chosen"]:
            _candidate(axes, scale.value(candidate["time"]), candidate, str(number + 1))
    axes.plot(scale.value(scale.all_float), 0.0, "s", color=_INK, markersize=7, clip_on=False, zorder=4)
    axes.annotate("all float", (scale.value(scale.all_float), 0.0), (0, 8), textcoords="offset points", ha="center")
    axes.margins(x=0.06)
    _key(evidence, axes)


def _loss_axis(evidence: Evidence, axes: Axes) -> None:
    chosen = chosen_candidate(evidence)
    losses = [one["trial"]["upper"] for one in evidence["candidates"] if one["trial"]]
    losses += [plan["loss"] for plan in evidence["frontier"] if plan["loss"] is not None]
    losses += [evidence["max_loss"], chosen["predicted_loss"] if chosen else 0.0]
    top = min(1.15 * max(losses), 1.05)
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


def _candidate(axes: Axes, x: float, candidate: Candidate, number: str) -> None:
    """Draw a candidate as measured; one without a trial is hollow, as predicted."""
    trial = candidate["trial"]
    color, shape, size = (_ACCEPTED, "D", 9) if trial is None or trial["accepted"] else (_REFUSED, "X", 8)
    if trial is not None:
        axes.plot([x, x], [trial["loss"], trial["upper"]], color=color, linewidth=1.5, clip_on=False, zorder=5)
        axes.plot(x, trial["upper"], "_", color=color, markersize=9, clip_on=False, zorder=5)
    face, edge = (color, "white") if trial else ("white", color)
    y = trial["loss"] if trial else candidate["predicted_loss"]
    axes.plot(x, y, shape, mfc=face, mec=edge, markersize=size, clip_on=False, zorder=5)
    axes.annotate(number, (x, y), (-6, 2), textcoords="offset points", ha="right", color=color)


def _key(evidence: Evidence, axes: Axes) -> None:
    """Write the key in the colours of what it names, at the right, where a falling frontier leaves room."""
    line = float(np.sqrt(evidence["max_loss"] / axes.get_ylim()[1]))  # the allowed loss on the axis, in [0, 1]
    top = line - 0.02 if line > _KEY_ABOVE else 1.0
    for row, (text, color) in enumerate(_key_lines(evidence)):
        where, down = (1.0, top), (0, -_LINE_PT * row)
        axes.annotate(
            text, where, down, "axes fraction", "offset points", ha="right", va="top", color=color, bbox=_ON_WHITE
        )


def _key_lines(evidence: Evidence) -> Iterator[tuple[str, str]]:
    if any(plan["loss"] is not None for plan in evidence["frontier"]):
        yield f"plans of the search, loss on {evidence['frame_counts']['to_search']} frames", _FRONTIER
    else:
        yield "the search measured no loss", _FRONTIER
    chosen = chosen_candidate(evidence)
    if chosen is None:
        yield "no plan was accepted: all float", _INK
    elif chosen["trial"] is None:
        predicted = show_loss(chosen["predicted_loss"])
        yield f"{evidence['chosen'] + 1} chosen: loss {predicted} predicted, not measured", _ACCEPTED
    else:
        trial = chosen["trial"]
        losses = f"loss {show_loss(trial['loss'])}, at most {show_loss(trial['upper'])}"
        yield f"{evidence['chosen'] + 1} accepted: {losses}", _ACCEPTED
        if sources := len(trials_by_source(chosen)):
            yield f"in the worst of {sources} sources", _ACCEPTED
        in_float = show_digits(trial["latency_float_ms"])
        yield f"measured {show_digits(trial['latency_ms'])} ms, float {in_float} ms", _ACCEPTED
    trials = [(number, one["trial"]) for number, one in enumerate(evidence["candidates"], start=1) if one["trial"]]
    refused = [str(number) for number, trial in trials if not trial["accepted"]]
    if refused:
        yield f"refused: {', '.join(refused)}", _REFUSED
    if trials:
        yield f"bars reach to the bound with {show_confidence(evidence)}", _FAINT
