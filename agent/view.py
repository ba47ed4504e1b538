"""What no recalibration cures: a view that is blurred, blind, or of somewhere else, and a camera that repeats a frame.

Judged from the frames themselves, beside what they were when the engine in service began: INT8 noise says nothing of a
dirty lens, whose blur hardly changes the ranges of a network's values.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from calibrate.evidence import EDetector

_LEARNING = 24  # observed frames that tell how the view is: a minute or more
_ROWS, _COLUMNS = 9, 16  # of the layout
_CROP = 256  # pixels a side, in the middle, in which sharpness is measured
_DARK = 8.0  # of 255: mean of a covered lens, or of a night without a lamp
_FLAT = 3.0  # of 255: standard deviation over the layout, below which there is nothing to see
_BLURRED = 0.5  # of the sharpness that the view had
_MOVED = 0.4  # correlation of the layouts
_STEADY = 0.7  # correlation in the beginning, below which the camera turns, or nothing in its view stands still
_RELIT = 0.3  # octaves of luminance: a lamp that goes on changes the layout too, and moves no camera
_FOLLOWED = 0.05  # weight of the newest frame in the layout that is usual: dawn comes over many
_TOLERATED = 0.25  # of observed frames that may be so without an alert
_FALSE_ALERTS = 1e5  # observed frames per false alert
_FROZEN_FRAMES, _FROZEN_S = 8, 10.0

BLIND, FROZEN = "blind", "frozen"  # a view that shows nothing, and one that shows nothing new

Layout = NDArray[np.float64]


@dataclass(frozen=True)
class Look:
    """One frame: mean luminance in [0, 255], its means over a coarse grid (9, 16), and its sharpness.

    sharpness: mean absolute Laplacian of the middle of the frame, over the standard deviation there: light cancels.
    """

    luminance: float
    layout: Layout
    sharpness: float

    @classmethod
    def at(cls, image: NDArray[np.uint8]) -> Look:
        """A frame, BGR uint8 (H, W, 3)."""
        layout = _grid(image)
        middle = _middle(image)
        beside = middle[:-2, 1:-1] + middle[2:, 1:-1] + middle[1:-1, :-2] + middle[1:-1, 2:]
        laplacian = 4.0 * middle[1:-1, 1:-1] - beside
        sharpness = float(np.abs(laplacian).mean() / max(float(middle.std()), 1.0)) if laplacian.size else 0.0
        return cls(float(layout.mean()), layout, sharpness)

    @property
    def is_blind(self) -> bool:
        """Whether there is next to nothing to see."""
        return self.luminance < _DARK or float(self.layout.std()) < _FLAT


@dataclass(frozen=True)
class ViewState:
    """trouble: BLIND, "moved", "blurred", FROZEN or empty; evidence: the figures that say so, by name."""

    trouble: str
    evidence: dict[str, float]


class View:
    """Watches one camera's view from the moment an engine began to serve; each trouble needs evidence of its own.

    Where things are is compared with what was usual of late, since light comes and goes; sharpness with what it was at
    the beginning, since dirt comes slowly. An e-detector counts the frames in trouble: as long as the chance of the
    next one to be so stays at or under a quarter, a false alert comes once in 100000 observed frames, or more rarely.
    """

    def __init__(self) -> None:
        self._usual: Look | None = None
        self._learnt: list[Look] = []
        self._is_steady = True
        self._evidence = {name: EDetector(_TOLERATED, _FALSE_ALERTS, 1.0) for name in (BLIND, "moved", "blurred")}
        self._figures: dict[str, float] = {}
        self._same, self._checksum, self._since_ts = 0, -1, 0.0
        self._last_ts = 0.0

    @property
    def state(self) -> ViewState:
        if self._same >= _FROZEN_FRAMES and self._last_ts - self._since_ts >= _FROZEN_S:
            return ViewState(FROZEN, {"seconds": self._last_ts - self._since_ts})
        found = next((name for name, evidence in self._evidence.items() if evidence.drift_detected), "")
        return ViewState(found, dict(self._figures) if found else {})

    def look(self, ts: float, image: NDArray[np.uint8]) -> bool:
        """Take an observed frame of capture time `ts`, BGR uint8 (H, W, 3). False for one that was seen before."""
        checksum = zlib.crc32(image[::4, ::4].tobytes())
        self._last_ts = ts
        if checksum == self._checksum and ts >= self._since_ts:
            self._same += 1
            return False
        self._same, self._checksum, self._since_ts = 0, checksum, ts
        look = Look.at(image)
        if self._usual is None:
            self._learn(look)
        else:
            self._compare(look, self._usual)
        return True

    def _learn(self, look: Look) -> None:
        """The view that the engine began with: the median of its first frames, unless there was nothing to see."""
        self._count({BLIND: look.is_blind})
        if look.is_blind:
            return
        self._learnt.append(look)
        if len(self._learnt) == _LEARNING:
            layout = np.median([each.layout for each in self._learnt], axis=0)
            sharpness = float(np.median([each.sharpness for each in self._learnt]))
            self._is_steady = float(np.median([_alike(each.layout, layout) for each in self._learnt])) > _STEADY
            self._usual, self._learnt = Look(float(layout.mean()), layout, sharpness), []

    def _compare(self, look: Look, usual: Look) -> None:
        alike = 1.0 if look.is_blind or not self._is_steady else _alike(look.layout, usual.layout)
        sharpness = look.sharpness / max(usual.sharpness, 1e-6)
        self._figures = {"luminance": look.luminance, "alike": alike, "sharpness": sharpness}
        relit = abs(np.log2(max(look.luminance, 1.0) / max(usual.luminance, 1.0))) > _RELIT
        moved = alike < _MOVED and not relit
        blurred = not look.is_blind and alike >= _MOVED and sharpness < _BLURRED
        self._count({BLIND: look.is_blind, "moved": moved, "blurred": blurred})
        if not moved and not look.is_blind:
            layout = usual.layout + _FOLLOWED * (look.layout - usual.layout)
            self._usual = Look(float(layout.mean()), layout, usual.sharpness)

    def _count(self, troubles: dict[str, bool]) -> None:
        """A trouble that was believed in is over once nothing speaks for it any more."""
        for name, found in troubles.items():
            evidence = self._evidence[name]
            if evidence.drift_detected and not found:
                evidence.reset()
            evidence.update(float(found))


def _alike(layout: Layout, other: Layout) -> float:
    """Their correlation; 1 where one of them is even."""
    deviations = [each - each.mean() for each in (layout, other)]
    scale = float(np.prod([np.sqrt(np.square(each).sum()) for each in deviations]))
    return float((deviations[0] * deviations[1]).sum()) / scale if scale > 0.0 else 1.0


def _grid(image: NDArray[np.uint8]) -> Layout:
    """Mean luminance (9, 16) of the parts of a frame; every fourth pixel is enough."""
    means: Layout = image[::4, ::4].mean(axis=2)
    for axis, parts in enumerate((_ROWS, _COLUMNS)):
        size = means.shape[axis]
        starts = np.linspace(0, size, parts, endpoint=False).astype(np.int64)
        counts = np.maximum(np.diff(np.append(starts, size)), 1)  # a frame of few pixels has some in several parts
        means = np.add.reduceat(means, starts, axis) / np.expand_dims(counts, 1 - axis)
    return means


def _middle(image: NDArray[np.uint8]) -> NDArray[np.float64]:
    height, width = image.shape[:2]
    top, left = max(0, (height - _CROP) // 2), max(0, (width - _CROP) // 2)
    middle: NDArray[np.float64] = image[top : top + _CROP, left : left + _CROP].mean(axis=2)
    return middle
