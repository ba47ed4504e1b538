"""What no recalibration cures: a view that is blurred, blind, or of somewhere else, and a camera that repeats a frame.

Judged from the frames themselves, beside how they usually are: INT8 noise says nothing of a dirty lens, whose blur
hardly changes the ranges of a network's values.
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
_FALSE_ALERTS = 1e5  # observed frames per false alert, and per trouble that is called over while it lasts
# Observed frames, an hour at one in 7 s: longer than a lorry stands before a lens, and time to put a camera back.
_SETTLED = 512
_FROZEN_FRAMES, _FROZEN_S = 8, 10.0

BLIND, FROZEN = "blind", "frozen"  # a view that shows nothing, and one that shows nothing new
MOVED, BLURRED = "moved", "blurred"

Layout = NDArray[np.float64]


@dataclass(frozen=True)
class FrameFeatures:
    """One frame: mean luminance in [0, 255], its means over a coarse grid (9, 16), and its sharpness.

    sharpness: mean absolute Laplacian of the middle of the frame, over the standard deviation there: light cancels.
    """

    luminance: float
    layout: Layout
    sharpness: float

    @classmethod
    def from_image(cls, image: NDArray[np.uint8]) -> FrameFeatures:
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
    """trouble: BLIND, MOVED, BLURRED, FROZEN or empty; evidence: by name, figures of the latest frame that says so."""

    trouble: str
    evidence: dict[str, float]


class TroubleDetector:
    """Whether a view is in a trouble: from when more than a quarter of its frames have it, until fewer have.

    An e-detector says either. As long as the chance of the next frame to have it, given the past, stays at or under a
    quarter, it is believed in once in 100000 frames, or more rarely; as long as that stays at or above, it is called
    over no more often. Nine frames in a row that have it are enough, and 39 that do not.
    """

    def __init__(self) -> None:
        self._begins = EDetector(_TOLERATED, _FALSE_ALERTS, 1.0)
        self._ends = EDetector(1.0 - _TOLERATED, _FALSE_ALERTS, 1.0)

    @property
    def holds(self) -> bool:
        return self._begins.drift_detected

    def update(self, found: bool) -> None:
        """The next frame that could tell."""
        if not self.holds:
            self._begins.update(float(found))
            return
        self._ends.update(float(not found))
        if self._ends.drift_detected:
            self._begins.reset()
            self._ends.reset()


class _Baseline:
    """How a view is: the median of its first frames; from then on the layout follows, for light comes and goes."""

    def __init__(self) -> None:
        self._first: list[FrameFeatures] = []
        self.look: FrameFeatures | None = None
        self.is_steady = True

    def learn(self, look: FrameFeatures) -> None:
        """Take one of the first frames; `update` is known after the last of them."""
        self._first.append(look)
        if len(self._first) == _LEARNING:
            layout = np.median([each.layout for each in self._first], axis=0)
            sharpness = float(np.median([each.sharpness for each in self._first]))
            self.is_steady = float(np.median([_alike(each.layout, layout) for each in self._first])) > _STEADY
            self.look, self._first = FrameFeatures(float(layout.mean()), layout, sharpness), []

    def follow(self, look: FrameFeatures, usual: FrameFeatures) -> None:
        layout = usual.layout + _FOLLOWED * (look.layout - usual.layout)
        self.look = FrameFeatures(float(layout.mean()), layout, usual.sharpness)


class _NewViewpoint:
    """Whether a moved camera has come to stand: its layouts agree with each other, frame after frame."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._usual = _Baseline()
        self._wanders = TroubleDetector()
        self._stood = 0

    def take(self, look: FrameFeatures) -> _Baseline | None:
        """The next frame of another view than the usual one. How that view is, once it may be called usual.

        A lamp that goes on begins it anew: what moves as the light changes is not to be taken for what stands.
        """
        usual = self._usual.look
        if usual is None:
            self._usual.learn(look)
            return None
        agrees = _alike(look.layout, usual.layout) > _STEADY
        self._wanders.update(not agrees)
        if self._wanders.holds or not self._usual.is_steady:
            self._begin()
        elif agrees:
            self._usual.follow(look, usual)
            self._stood += 1
        return self._usual if self._stood == _SETTLED else None


class ViewMonitor:
    """Watches one camera's view, whose first frames tell how it usually is; each trouble needs evidence of its own.

    Where things are is compared with what was usual of late, since light comes and goes; sharpness with what it was at
    the beginning, since dirt comes slowly. A frame counts for or against a trouble only where it can tell: a dark one
    says nothing of where the camera looks, nor does one of elsewhere of the lens.

    A view that was moved and has stood still since for an hour or so becomes the usual one, with its sharpness; that
    it was moved has been told. Blur never does so by itself.
    """

    def __init__(self) -> None:
        self._usual = _Baseline()
        self._settling = _NewViewpoint()
        self._beliefs = {name: TroubleDetector() for name in (BLIND, MOVED, BLURRED)}
        self._figures: dict[str, dict[str, float]] = {}
        self._same, self._checksum, self._since_ts = 0, -1, 0.0
        self._last_ts = 0.0

    @property
    def state(self) -> ViewState:
        if self._same >= _FROZEN_FRAMES and self._last_ts - self._since_ts >= _FROZEN_S:
            return ViewState(FROZEN, {"seconds": self._last_ts - self._since_ts})
        found = next((name for name, belief in self._beliefs.items() if belief.holds), "")
        return ViewState(found, dict(self._figures[found]) if found else {})

    def update(self, ts: float, image: NDArray[np.uint8]) -> bool:
        """Take an observed frame of capture time `ts`, BGR uint8 (H, W, 3). False for one that was seen before."""
        checksum = zlib.crc32(image[::4, ::4].tobytes())
        self._last_ts = ts
        if checksum == self._checksum and ts >= self._since_ts:
            self._same += 1
            return False
        self._same, self._checksum, self._since_ts = 0, checksum, ts
        look = FrameFeatures.from_image(image)
        self._count(BLIND, look.is_blind, luminance=look.luminance, contrast=float(look.layout.std()))
        if not look.is_blind:
            if self._usual.look is None:
                self._usual.learn(look)
            else:
                self._compare(look, self._usual.look)
        return True

    def _compare(self, look: FrameFeatures, usual: FrameFeatures) -> None:
        alike = _alike(look.layout, usual.layout) if self._usual.is_steady else 1.0
        sharpness = look.sharpness / max(usual.sharpness, 1e-6)
        relit = abs(np.log2(max(look.luminance, 1.0) / max(usual.luminance, 1.0))) > _RELIT
        moved = alike < _MOVED and (self._beliefs[MOVED].holds or not relit)  # dusk puts no camera back
        self._count(MOVED, moved, luminance=look.luminance, alike=alike)
        if alike >= _MOVED:
            self._count(BLURRED, sharpness < _BLURRED, alike=alike, sharpness=sharpness)
        if not moved:
            self._usual.follow(look, usual)
        elif self._beliefs[MOVED].holds:
            self._settle(look)
        if not self._beliefs[MOVED].holds:
            self._settling = _NewViewpoint()

    def _settle(self, look: FrameFeatures) -> None:
        settled = self._settling.take(look)
        if settled is not None:
            self._usual = settled
            self._beliefs.update({MOVED: TroubleDetector(), BLURRED: TroubleDetector()})

    def _count(self, trouble: str, found: bool, **figures: float) -> None:
        self._beliefs[trouble].update(found)
        if found:
            self._figures[trouble] = figures


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
