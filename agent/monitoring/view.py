"""Detect trouble with a camera's view that no recalibration cures: blurred, blind, moved or frozen.

The frames themselves are compared with how they usually are: INT8 noise says nothing of a dirty lens, whose blur
hardly changes the ranges of a network's values. From a frame come `FrameFeatures`; `_Baseline` learns which are usual;
a `TroubleDetector` for each trouble gathers the evidence; `_NewViewpoint` decides when a moved view has become the
usual one; `ViewMonitor` puts them together.

A frozen picture is detected in two places, and neither replaces the other. `FreezeDetector` of
agent/camera/stream_health.py runs in the capture thread and reopens the camera. It counts only frames that were coded
by themselves, because a video encoder repeats to the bit what hardly changes. The check here counts every observed
frame. So it also covers recordings, cameras with `frozen_s: null`, and streams that do not report how a frame was coded
(GStreamer).
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from calibrate.statistics.evidence import EDetector

_LEARNING = 24  # observed frames from which the usual view is learnt: a minute or more
_ROWS, _COLUMNS = 9, 16  # size of the layout
_CROP = 512  # pixels a side, in the middle, in which sharpness is measured, at half the size
# Pixels at half the size: the reach of fine detail; that of coarse detail, which blur hardly changes; the distance of
# the lines that are compared, over which noise is not alike.
_FINE, _COARSE, _APART = 1, 8, 2
_NOISE_ERRORS = 3.0  # standard errors: noise alone hardly ever seems to have so much detail
_DARK = 8.0  # mean on a scale to 255: of a covered lens, or of a night without a lamp
_FLAT = 3.0  # standard deviation on a scale to 255, over the layout, below which there is nothing to see
_BLURRED = 0.5  # fraction of the sharpness that the view had
_MOVED = 0.4  # correlation of the layouts
_STEADY = 0.7  # correlation in the beginning, below which the camera turns, or nothing in its view stands still
_RELIT = 0.3  # octaves of luminance: a lamp that goes on changes the layout too, and moves no camera
_FOLLOWED = 0.05  # weight of the newest frame in the layout that is usual: dawn comes over many
_TOLERATED = 0.25  # share of observed frames that may be so without an alert
_FALSE_ALERTS = 1e5  # observed frames per false alert, and per trouble that is declared over while it lasts
# Observed frames, an hour at one in 7 s: longer than a lorry stands before a lens, and time to put a camera back.
_SETTLED = 512
_FROZEN_FRAMES, _FROZEN_S = 8, 10.0

BLIND, FROZEN = "blind", "frozen"  # a view that shows nothing, and one that shows nothing new
MOVED, BLURRED = "moved", "blurred"

Layout = NDArray[np.float64]


@dataclass(frozen=True)
class FrameFeatures:
    """One frame in a few numbers.

    luminance: Mean, in [0, 255].
    layout: Mean luminance of the cells of a coarse grid, (9, 16).
    sharpness: Fine detail in the middle of the frame, over coarse detail there: light and noise cancel. In [0, inf).
    noise_floor: The sharpness that the noise of this frame can feign; a lower one is no evidence of detail.
    noise: Fine detail that lines near each other do not share, over coarse detail there. In [0, inf).
    """

    luminance: float
    layout: Layout
    sharpness: float
    noise_floor: float
    noise: float

    @classmethod
    def from_image(cls, image: NDArray[np.uint8]) -> FrameFeatures:
        """image: BGR uint8 (H, W, 3)."""
        layout = _grid(image)
        return cls(float(layout.mean()), layout, *_sharpness(image))

    @property
    def is_blind(self) -> bool:
        """True if there is next to nothing to see."""
        return self.luminance < _DARK or float(self.layout.std()) < _FLAT


@dataclass(frozen=True)
class ViewState:
    """trouble: BLIND, MOVED, BLURRED, FROZEN or empty. evidence: figures of the latest frame that has it, by name."""

    trouble: str
    evidence: dict[str, float]


class TroubleDetector:
    """Decide whether a view is in a trouble: from when more than a quarter of its frames have it, until fewer have.

    An e-detector decides either. While at most a quarter of the frames show the trouble, a false alert occurs at most
    once in 100,000 frames. While at least a quarter show it, it is declared over by mistake at most as often. Nine
    frames in a row that have it are enough, and 39 that do not.
    """

    def __init__(self) -> None:
        self._starts = EDetector(_TOLERATED, _FALSE_ALERTS, 1.0)
        self._ends = EDetector(1.0 - _TOLERATED, _FALSE_ALERTS, 1.0)

    @property
    def holds(self) -> bool:
        return self._starts.drift_detected

    def update(self, has_it: bool) -> None:
        """Add a frame that can show the trouble."""
        if not self.holds:
            self._starts.update(float(has_it))
            return
        self._ends.update(float(not has_it))
        if self._ends.drift_detected:
            self._starts.reset()
            self._ends.reset()


class _Baseline:
    """The usual view: the median of its first frames; from then on the layout follows, for light comes and goes.

    The sharpness is that of the first frames whose noise does not hide it, and 0 until there are enough of them. In a
    night so noisy that its frames cannot show a blur, nothing is learnt of the lens. Its sharpness is learnt from the
    first frames that can show it, mostly by daylight. A lens that blurs before then is not noticed: no frame has shown
    how it was.
    """

    def __init__(self) -> None:
        self._first: list[FrameFeatures] = []
        self._sharpness: list[float] = []
        self.features: FrameFeatures | None = None
        self.is_steady = True

    def learn(self, features: FrameFeatures) -> None:
        """Add one of the first frames; `features` are known after the last of them."""
        self._first.append(features)
        sharpness = self._learn_sharpness(features)
        if len(self._first) == _LEARNING:
            layout = np.median([each.layout for each in self._first], axis=0)
            self.is_steady = float(np.median([_alike(each.layout, layout) for each in self._first])) > _STEADY
            self.features, self._first = FrameFeatures(float(layout.mean()), layout, sharpness, 0.0, 0.0), []

    def follow(self, features: FrameFeatures, usual: FrameFeatures) -> None:
        layout = usual.layout + _FOLLOWED * (features.layout - usual.layout)
        sharpness = usual.sharpness or self._learn_sharpness(features)
        self.features = FrameFeatures(float(layout.mean()), layout, sharpness, 0.0, 0.0)

    def _learn_sharpness(self, features: FrameFeatures) -> float:
        """Add a frame if it would show a blur; return the usual sharpness, 0 while it is not known."""
        if features.noise_floor < _BLURRED * features.sharpness:
            self._sharpness.append(features.sharpness)
        return float(np.median(self._sharpness)) if len(self._sharpness) == _LEARNING else 0.0


class _NewViewpoint:
    """Decide whether a moved camera has come to stand: its layouts agree with each other, frame after frame."""

    def __init__(self) -> None:
        self._restart()

    def _restart(self) -> None:
        self._baseline = _Baseline()
        self._wanders = TroubleDetector()
        self._stood = 0

    def update(self, features: FrameFeatures) -> _Baseline | None:
        """Add a frame of another view than the usual one; return that view once it counts as usual.

        A lamp that goes on starts this over: what moves as the light changes must not be mistaken for what stands.
        """
        usual = self._baseline.features
        if usual is None:
            self._baseline.learn(features)
            return None
        agrees = _alike(features.layout, usual.layout) > _STEADY
        self._wanders.update(not agrees)
        if self._wanders.holds or not self._baseline.is_steady:
            self._restart()
        elif agrees:
            self._baseline.follow(features, usual)
            self._stood += 1
        return self._baseline if self._stood == _SETTLED else None


class ViewMonitor:
    """Watch one camera's view, whose first frames show how it usually is; each trouble needs evidence of its own.

    - The layout is compared with the usual one of late, since light comes and goes.
    - The sharpness is compared with that of the first frames, since dirt comes slowly.
    - A frame counts for or against a trouble only where it can show it: a dark frame says nothing of where the camera
      looks; a frame of another view, or one whose noise could hide a blur, says nothing of the lens.
    - A view that was moved and has stood still since for an hour or so becomes the usual one, with its sharpness; it
      has been reported as moved. Blur never becomes usual by itself.
    """

    def __init__(self) -> None:
        self.features: FrameFeatures | None = None  # features of the newest frame
        self._usual = _Baseline()
        self._new_viewpoint = _NewViewpoint()
        self._detectors = {name: TroubleDetector() for name in (BLIND, MOVED, BLURRED)}
        self._figures: dict[str, dict[str, float]] = {}
        self._same, self._checksum, self._since_ts = 0, -1, 0.0
        self._last_ts = 0.0

    @property
    def state(self) -> ViewState:
        if self._same >= _FROZEN_FRAMES and self._last_ts - self._since_ts >= _FROZEN_S:
            return ViewState(FROZEN, {"seconds": self._last_ts - self._since_ts})
        trouble = next((name for name, detector in self._detectors.items() if detector.holds), "")
        return ViewState(trouble, dict(self._figures[trouble]) if trouble else {})

    def update(self, ts: float, image: NDArray[np.uint8]) -> bool:
        """Add an observed frame of capture time `ts`, BGR uint8 (H, W, 3). False for one that repeats the last one."""
        checksum = zlib.crc32(image[::4, ::4].tobytes())
        self._last_ts = ts
        if checksum == self._checksum and ts >= self._since_ts:
            self._same += 1
            return False
        self._same, self._checksum, self._since_ts = 0, checksum, ts
        features = self.features = FrameFeatures.from_image(image)
        contrast = float(features.layout.std())
        self._count(BLIND, features.is_blind, luminance=features.luminance, contrast=contrast)
        if not features.is_blind:
            if self._usual.features is None:
                self._usual.learn(features)
            else:
                self._compare(features, self._usual.features)
        return True

    def _compare(self, features: FrameFeatures, usual: FrameFeatures) -> None:
        alike = _alike(features.layout, usual.layout) if self._usual.is_steady else 1.0
        relit = abs(np.log2(max(features.luminance, 1.0) / max(usual.luminance, 1.0))) > _RELIT
        moved = alike < _MOVED and (self._detectors[MOVED].holds or not relit)  # dusk puts no camera back
        self._count(MOVED, moved, luminance=features.luminance, alike=alike)
        if alike >= _MOVED and features.noise_floor < _BLURRED * usual.sharpness:
            sharpness = features.sharpness / usual.sharpness
            self._count(BLURRED, sharpness < _BLURRED, alike=alike, sharpness=sharpness)
        if not moved:
            self._usual.follow(features, usual)
        elif self._detectors[MOVED].holds:
            new_usual = self._new_viewpoint.update(features)
            if new_usual is not None:
                self._usual = new_usual
                self._detectors.update({MOVED: TroubleDetector(), BLURRED: TroubleDetector()})
        if not self._detectors[MOVED].holds:
            self._new_viewpoint = _NewViewpoint()

    def _count(self, trouble: str, has_it: bool, **figures: float) -> None:
        self._detectors[trouble].update(has_it)
        if has_it:
            self._figures[trouble] = figures


def _alike(layout: Layout, other: Layout) -> float:
    """Return the correlation of two layouts; 1 where one of them is even."""
    deviations = [each - each.mean() for each in (layout, other)]
    scale = float(np.prod([np.sqrt(np.square(each).sum()) for each in deviations]))
    return float((deviations[0] * deviations[1]).sum()) / scale if scale > 0.0 else 1.0


def _sharpness(image: NDArray[np.uint8]) -> tuple[float, float, float]:
    """Return the sharpness of the middle of a frame, the sharpness that its noise can feign, and the noise itself over
    coarse detail; 0 for a tiny frame.

    Sharpness is fine detail over coarse detail, and either is the root of a power. Noise adds to a power. So detail is
    not squared, but multiplied with what lies two lines on: edges run on from line to line, and noise does not. In the
    mean it cancels, however strong it is, and even where it grows with the light. At half the size, and two lines
    apart, so does most of the noise that a colour filter or an encoder has smeared.
    """
    half = _half_size(image)
    if half.shape[0] <= 2 * _COARSE or half.shape[1] <= 2 * _COARSE:
        return 0.0, 0.0, 0.0
    fine, noise, products = _detail(half, _FINE)
    coarse, _, _ = _detail(half, _COARSE)
    # Second differences of white noise overlap: their products vary as if there were half as many.
    error = noise * np.sqrt(2.0 / products)
    sharpness, noise_floor = np.sqrt(np.maximum([fine, _NOISE_ERRORS * error], 0.0) / max(coarse, 1.0))
    return float(sharpness), float(noise_floor), math.sqrt(max(noise, 0.0) / max(coarse, 1.0))


def _detail(half: NDArray[np.float32], reach: int) -> tuple[float, float, int]:
    """Compare second differences over `reach` pixels with those two lines on, along rows and along columns.

    Return the mean power that both lines share, the mean power that they do not, and the number of products in a mean.
    """
    shared, power, products = 0.0, 0.0, 0
    for lines in (half, half.T):
        bends = lines[:, 2 * reach :] + lines[:, : -2 * reach] - 2.0 * lines[:, reach:-reach]
        shared += _dot(bends[:-_APART], bends[_APART:])
        power += _dot(bends[_APART:], bends[_APART:])
        products += bends[_APART:].size
    return shared / products, (power - shared) / products, products


def _half_size(image: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return the luminance of the middle of a frame at half its size, at most (256, 256), in [0, 255]."""
    height, width = image.shape[:2]
    rows, columns = (min(size, _CROP) // 2 for size in (height, width))
    top, left = height // 2 - rows, width // 2 - columns
    middle = image[top : top + 2 * rows, left : left + 2 * columns]
    pairs = np.add(middle[::2], middle[1::2], dtype=np.uint16).reshape(rows, columns, 6)
    half: NDArray[np.float32] = sum(pairs[..., column] for column in range(6)) / np.float32(12.0)
    return half


def _dot(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    """Return the sum of products. BLAS would take threads for it."""
    return float(np.einsum("ij,ij->", a, b))


def _grid(image: NDArray[np.uint8]) -> Layout:
    """Return the mean luminance of the cells of a frame, (9, 16); every fourth pixel is enough."""
    means: Layout = image[::4, ::4].mean(axis=2)
    for axis, parts in enumerate((_ROWS, _COLUMNS)):
        size = means.shape[axis]
        starts = np.linspace(0, size, parts, endpoint=False).astype(np.int64)
        counts = np.maximum(np.diff(np.append(starts, size)), 1)  # a frame of few pixels has some in several parts
        means = np.add.reduceat(means, starts, axis) / np.expand_dims(counts, 1 - axis)
    return means
