"""Draw the hero: the sample in the morning as three engines see it, and its fidelity from night to morning."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from math import dist
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from agent.daemon.review import REFERENCE
from docs.tools.figures.picture import BLUE, FAINT, GREEN, INK, VERMILLION, WIDTH_PX, mark, new_figure, save
from docs.tools.figures.replay import Answered, answered_frames
from docs.tools.figures.street_run import StreetRun

_HEIGHT_PX = 680
_GAP_PX, _TITLE_PX, _PANELS = 8, 36, 3
_LEFT_PX, _RIGHT_PX, _BELOW_PX, _MARKS_PX = 104, 20, 84, 46  # around the curve
_DAWN_S = 100.0, 135.0  # from and to, in s of the recording; see examples/street/render.py
_MEAN_S, _FEWEST = 4.0, 5  # a point of the curve: its time in s, and its frames at least
_NEAR = 0.1  # an F1 that is typical is at most so far from that of the period
_LABELS = 4  # on the frame that is shown, at least

Points = tuple[NDArray[np.float64], NDArray[np.float64]]


def draw_sample(run: StreetRun, path: Path) -> None:
    """Write the picture."""
    frames = list(answered_frames(run))
    figure = new_figure(_HEIGHT_PX)
    panels_px = _panels(figure, run, _typical(run, frames))
    width_px, height_px = WIDTH_PX - _LEFT_PX - _RIGHT_PX, _HEIGHT_PX - panels_px - _MARKS_PX - _BELOW_PX
    place_px = np.array([_LEFT_PX / WIDTH_PX, _BELOW_PX / _HEIGHT_PX, width_px / WIDTH_PX, height_px / _HEIGHT_PX])
    _curve(figure.add_axes(tuple(place_px.tolist())), run, frames)
    save(figure, path)


def _typical(run: StreetRun, frames: Sequence[Answered]) -> Answered:
    """Return a frame of the morning on which each engine is about as right as in the mean.

    Of these, the one whose objects are the farthest apart: the names of its boxes can be read.
    """
    since_s, scores = run.summary["swaps"][1]["ts"], run.summary["accuracy"]["last light"]
    typical = [
        frame
        for frame in frames
        if frame.ts >= since_s
        and len(frame.labels.boxes) >= _LABELS
        and all(abs(frame.matches(name).f1 - scores[name]["f1"]) <= _NEAR for name in scores)
    ]
    if not typical:
        raise SystemExit("error: no frame of the morning is like its mean; run the sample again")
    return max(typical, key=_closest)


def _closest(frame: Answered) -> float:
    """Return the least distance between the top left corners of two objects, where their names stand, in pixels."""
    corners = frame.answers[REFERENCE].boxes[:, :2].tolist()
    return min(dist(one, other) for one, other in combinations(corners, 2))


def _panels(figure: Figure, run: StreetRun, frame: Answered) -> int:
    """Draw the frame with the boxes of each engine, pixel by pixel; return their height with the titles."""
    night, morning = (engine.id for engine in run.engines)
    scores = run.summary["accuracy"]["last light"]
    titles = ((REFERENCE, "float reference", INK), (night, "INT8 of the night", VERMILLION))
    width_px = (WIDTH_PX - (_PANELS - 1) * _GAP_PX) // _PANELS
    scale = width_px / frame.image.shape[1]
    for number, (name, title, color) in enumerate((*titles, (morning, "INT8, recalibrated", GREEN))):
        drawn = frame.answers[name].drawn_into(frame.image, None, run.config.model, scale)
        left_px, bottom_px = number * (width_px + _GAP_PX), _HEIGHT_PX - _TITLE_PX - drawn.shape[0]
        figure.figimage(drawn[:, :, ::-1] / 255.0, left_px, bottom_px, origin="upper")
        words, top = f"{title}: F1 {scores[name]['f1']:.2f}", 1.0 - 0.5 * _TITLE_PX / _HEIGHT_PX
        figure.text((left_px + 2) / WIDTH_PX, top, words, color=color, va="center", weight="bold")
    return _TITLE_PX + int(drawn.shape[0])


def _curve(axes: Axes, run: StreetRun, frames: Sequence[Answered]) -> None:
    """Draw fidelity over time: of what served, and of the engine of the night had it stayed."""
    first_s, second_s = (swap["ts"] for swap in run.summary["swaps"])
    (alarm,), end_s = run.summary["alarms"], frames[-1].ts
    night, morning = (engine.id for engine in run.engines)
    served = _means(frames, night, lambda ts: first_s <= ts < second_s)
    stayed = _means(frames, night, lambda ts: ts >= second_s)
    axes.axvspan(0.0, _DAWN_S[0], color="#d9dde6", linewidth=0.0, zorder=0)
    axes.axvspan(*_DAWN_S, color="#eceef3", linewidth=0.0, zorder=0)
    axes.plot(*stayed, color=VERMILLION, linewidth=1.6, linestyle=(0, (3, 1.5)))
    axes.plot(*served, color=VERMILLION, linewidth=2.4)
    axes.plot(*_means(frames, morning, lambda ts: ts >= second_s), color=GREEN, linewidth=2.4)
    axes.set_xlim(0.0, end_s)
    axes.set_ylim(0.0, 1.06)
    axes.set_yticks([0.0, 0.5, 1.0])
    axes.set_xlabel("time in the recording (s)")
    axes.set_ylabel("fidelity to float")
    for text, at, align in (("night", 3.0, "left"), ("dawn", _DAWN_S[0] + 3.0, "left"), ("morning", end_s, "right")):
        axes.text(at, 0.04, text, color=FAINT, ha=align)
    axes.text(0.5 * first_s, 0.5, "float serves while\nframes are collected", color=FAINT, ha="center", va="center")
    axes.text(end_s, 0.74, "the night's INT8,\nhad it stayed", color=VERMILLION, ha="right")
    mark(axes, first_s, "INT8 in service", BLUE)
    mark(axes, alarm["ts"], "alarm", VERMILLION, "right")
    mark(axes, second_s, "recalibrated INT8", GREEN)


def _means(frames: Sequence[Answered], engine: str, includes: Callable[[float], bool]) -> Points:
    """Return times and mean fidelities of an engine, each of a few seconds of frames with something on them."""
    known = [(frame.ts, frame.fidelity[engine]) for frame in frames if includes(frame.ts) and engine in frame.fidelity]
    points = np.array(list(_slices(known)))
    return points[:, 0], points[:, 1]


def _slices(known: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    for number in range(int(known[0][0] // _MEAN_S), int(known[-1][0] // _MEAN_S) + 1):
        part = [each for each in known if int(each[0] // _MEAN_S) == number]
        if len(part) >= _FEWEST:
            ts, value = np.mean(part, axis=0)
            yield float(ts), float(value)
