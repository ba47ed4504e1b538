"""Draw the hero: the sample in the morning as three engines see it, and its fidelity from night to morning."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from agent.daemon.review import REFERENCE
from agent.vision.drawing import draw_prediction
from docs.tools.figures.picture import (
    BLUE,
    FAINT,
    GREEN,
    INK,
    ORANGE,
    VERMILLION,
    WIDTH_PX,
    mark,
    new_figure,
    save,
)
from docs.tools.figures.replay import Answered, answered_frames
from docs.tools.figures.street_run import StreetRun

_HEIGHT_PX = 660
_GAP_PX, _TOP_PX, _PANELS = 8, 34, 3
_MEAN_S = 4.0  # of a point of the curve
_NEAR = 0.1  # an F1 that is typical is at most so far from that of the period


def draw_sample(run: StreetRun, path: Path) -> None:
    """Write the picture."""
    frames = list(answered_frames(run))
    figure = new_figure(_HEIGHT_PX)
    height_px = _panels(figure, run, _typical(run, frames))
    bottom_px, top_px = 62, _TOP_PX + height_px + 48
    axes = figure.add_axes((0.055, bottom_px / _HEIGHT_PX, 0.93, (_HEIGHT_PX - top_px - bottom_px) / _HEIGHT_PX))
    _curve(axes, run, frames)
    save(figure, path)


def _typical(run: StreetRun, frames: Sequence[Answered]) -> Answered:
    """Return the frame of the morning with the most labels on which each engine is about as right as in the mean."""
    since_s, scores = run.summary["swaps"][1]["ts"], run.summary["accuracy"]["last light"]
    typical = [
        frame
        for frame in frames
        if frame.ts >= since_s and all(abs(frame.matches(name).f1 - scores[name]["f1"]) <= _NEAR for name in scores)
    ]
    if not typical:
        raise SystemExit("error: no frame of the morning is like its mean; run the sample again")
    return max(typical, key=lambda frame: len(frame.labels.classes))


def _panels(figure: Figure, run: StreetRun, frame: Answered) -> int:
    """Draw the frame with the boxes of each engine, pixel by pixel; return the height."""
    night, morning = (engine.id for engine in run.engines)
    scores = run.summary["accuracy"]["last light"]
    titles = (
        (REFERENCE, "float reference", INK),
        (night, "INT8 of the night", VERMILLION),
        (morning, "INT8, recalibrated on the board", GREEN),
    )
    width_px = (WIDTH_PX - (_PANELS - 1) * _GAP_PX) // _PANELS
    scale = width_px / frame.image.shape[1]
    for number, (name, title, color) in enumerate(titles):
        drawn = draw_prediction(frame.image, frame.answers[name], None, run.config.model, scale)
        left_px, height_px = number * (width_px + _GAP_PX), drawn.shape[0]
        figure.figimage(drawn[:, :, ::-1] / 255.0, left_px, _HEIGHT_PX - _TOP_PX - height_px, origin="upper")
        words = f"{title}: F1 {scores[name]['f1']:.2f}"
        figure.text(
            left_px / WIDTH_PX + 0.002, 1.0 - 0.5 * _TOP_PX / _HEIGHT_PX, words, color=color, va="center", weight="bold"
        )
    return int(height_px)


def _curve(axes: Axes, run: StreetRun, frames: Sequence[Answered]) -> None:
    """Draw fidelity over time: of what served, and of the engine of the night had it stayed."""
    first, second = run.summary["swaps"]
    (alarm,) = run.summary["alarms"]
    night, morning = (engine.id for engine in run.engines)
    stayed = _means(frames, night, lambda ts: ts >= second["ts"])
    axes.plot(*stayed, color=VERMILLION, linewidth=1.6, linestyle=(0, (3, 1.5)))
    axes.plot(*_means(frames, night, lambda ts: first["ts"] <= ts < second["ts"]), color=VERMILLION, linewidth=2.2)
    axes.plot(*_means(frames, morning, lambda ts: ts >= second["ts"]), color=GREEN, linewidth=2.2)
    axes.set_xlim(0.0, run.summary["accuracy"] and frames[-1].ts)
    axes.set_ylim(0.0, 1.06)
    axes.set_yticks([0.0, 0.5, 1.0])
    axes.grid()
    axes.set_xlabel("time in the recording (s): night until 100 s, dawn until 135 s, then morning")
    axes.set_ylabel("fidelity to float")
    axes.text(0.5 * first["ts"], 0.5, "collecting;\nfloat serves", color=FAINT, ha="center", va="center")
    axes.text(
        stayed[0].mean(),
        stayed[1].mean() + 0.08,
        "the engine of the night, had it stayed",
        color=VERMILLION,
        ha="center",
    )
    mark(axes, first["ts"], "INT8 calibrated", BLUE)
    mark(axes, alarm["ts"], "alarm", ORANGE, "right")
    mark(axes, second["ts"], "recalibrated engine", BLUE)


Points = tuple[NDArray[np.float64], NDArray[np.float64]]


def _means(frames: Sequence[Answered], engine: str, includes: Callable[[float], bool]) -> Points:
    """Return times and the mean fidelities of an engine, each of a few seconds of frames with something on them."""
    known = [(frame.ts, frame.fidelity[engine]) for frame in frames if includes(frame.ts) and engine in frame.fidelity]
    points = np.array(list(_sliced(known)))
    return points[:, 0], points[:, 1]


def _sliced(known: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    for number in range(int(known[0][0] // _MEAN_S), int(known[-1][0] // _MEAN_S) + 1):
        part = [each for each in known if int(each[0] // _MEAN_S) == number]
        if part:
            ts, value = np.mean(part, axis=0)
            yield float(ts), float(value)
