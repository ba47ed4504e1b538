"""Say why an alarm came, and what would help: what has changed in the view, and the gain of each remedy.

1. `Appearance` is a frame in a few numbers. `AppearanceHistory` compares those of now with those of the first frames
   that the engine in service answered, and names the change: light, contrast, noise, blur, or the content where none of
   them changed.
2. `Explanation` puts the remedies beside each other, the one with the largest gain first. Gains are measured on the
   histograms that raised the alarm, in dB of quantisation noise, and in the fidelity that so many dB are expected to
   be worth. The gain of the former exposure is tried out: some
   observed frames are relit and observed once more (`Relighting`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, astuple, dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import AllowInfNan, Field, StrictFloat, TypeAdapter

from agent.monitoring.view import FrameFeatures
from calibrate.histogram import AbsHistogram, merge_into
from calibrate.statistics.evidence import Interval

_FRAMES = 24  # frames whose median counts, then and now
_RELIT_FRAMES = 4
# Octaves from which on a change is one. Set on one clip of three (vehicles) so that each first severity of the
# corruption ladder is beyond it where it can be seen at all; frames of the same light differ by a tenth of that.
_CHANGES = {"light": 0.2, "contrast": 0.3, "noise": 0.2, "blur": 0.35}
_LEAST = 1e-3
_UNSURE = 0.8  # fraction of the confidence that the float model had
LIGHT, CONTENT = "light", "content"
_Finite = Annotated[StrictFloat, AllowInfNan(False)]


@dataclass(frozen=True)
class Appearance:
    """One frame. luminance: mean, in [0, 255]. contrast: deviation of the coarse grid over the luminance.

    noise: what neighbouring lines do not share of fine detail, over coarse detail. sharpness: as of FrameFeatures.
    confidence: of the float model's surest answer, in [0, 1]; NaN where it found nothing.
    """

    luminance: _Finite
    contrast: _Finite
    noise: _Finite
    sharpness: _Finite
    confidence: StrictFloat

    @classmethod
    def from_features(cls, features: FrameFeatures, confidence: float) -> Appearance:
        luminance = max(features.luminance, 1.0)
        contrast = float(features.layout.std()) / luminance
        return cls(luminance, contrast, features.noise, features.sharpness, confidence)


_FIRST_FRAMES = TypeAdapter(Annotated[list[Appearance], Field(min_length=_FRAMES, max_length=_FRAMES)])


@dataclass(frozen=True)
class Change:
    """A change in the view and its size in octaves: light -1 is half as bright. content: by 0."""

    cause: str
    octaves: float


class AppearanceHistory:
    """One view when the engine in service was new, and now."""

    def __init__(self) -> None:
        self._first: list[Appearance] = []
        self._newest: deque[Appearance] = deque(maxlen=_FRAMES)

    def add(self, appearance: Appearance) -> bool:
        """Add an observed frame; the first ones show the scene of the calibration. Return True at the last of them."""
        is_first = len(self._first) < _FRAMES
        if is_first:
            self._first.append(appearance)
        self._newest.append(appearance)
        return is_first and len(self._first) == _FRAMES

    @property
    def changes(self) -> tuple[Change, ...]:
        """The changes, the likeliest cause first; content alone if nothing else has changed."""
        if not self._first:
            return (Change(CONTENT, 0.0),)
        before, now = self._medians
        light, contrast, noise, sharpness = (
            _octaves(getattr(now, name), getattr(before, name))
            for name in ("luminance", "contrast", "noise", "sharpness")
        )
        sizes = {"light": light, "contrast": min(contrast, 0.0), "noise": max(noise, 0.0), "blur": min(sharpness, 0.0)}
        if abs(light) >= _CHANGES[LIGHT]:  # light that saturates flattens, and dark frames are noisy
            sizes |= {"contrast": 0.0, "noise": 0.0}
        if sizes["blur"] <= -_CHANGES["blur"]:  # which takes fine noise and contrast away
            sizes |= {"contrast": 0.0, "noise": 0.0}
        found = {cause: size for cause, size in sizes.items() if abs(size) >= _CHANGES[cause]}
        by_size = sorted(found, key=lambda cause: -abs(found[cause]) / _CHANGES[cause])
        return tuple(Change(cause, found[cause]) for cause in by_size) or (Change(CONTENT, 0.0),)

    @property
    def relighting(self) -> float:
        """The factor that gives the newest frames the light of the first ones."""
        before, now = self._medians
        return before.luminance / now.luminance

    @property
    def confidences(self) -> tuple[float, float]:
        """The float model's confidence in the beginning and now; NaN where it found nothing."""
        before, now = self._medians
        return before.confidence, now.confidence

    @property
    def _medians(self) -> tuple[Appearance, Appearance]:
        return _median(self._first), _median(self._newest)

    def state(self) -> list[dict[str, float]]:
        """Return those of the first frames, in JSON's types."""
        return [asdict(each) for each in self._first]

    def restore(self, state: Any) -> None:
        """Go on with the first frames that an earlier process saw. Raises ValueError for anything else."""
        self._first = _FIRST_FRAMES.validate_python(state)


def _median(appearances: Collection[Appearance]) -> Appearance:
    """Return the median of each number; of the confidence where something was found."""
    *figures, confidences = np.array([astuple(each) for each in appearances], np.float64).T
    seen = confidences[~np.isnan(confidences)]
    medians = [*np.median(figures, axis=1).tolist(), float(np.median(seen)) if seen.size else math.nan]
    return Appearance(*medians)


def _octaves(now: float, before: float) -> float:
    return math.log2(max(now, _LEAST) / max(before, _LEAST))


@dataclass(frozen=True)
class Remedy:
    """A measure that would help. gain_db: predicted, of quantisation noise; None if dB cannot express it.

    detail: The artefact of a regime, or the evidence.
    gain: Expected, of fidelity; None where that cannot be said.
    """

    remedy: str
    gain_db: float | None
    detail: str = ""
    gain: Interval | None = None


@dataclass(frozen=True)
class Explanation:
    """changes: As of AppearanceHistory. remedies: The largest gain first, then those without a figure."""

    changes: tuple[Change, ...]
    remedies: tuple[Remedy, ...]


def explanation(
    history: AppearanceHistory,
    recalibration_db: float,
    raised_db: float,
    regimes_db: Mapping[str, float],
    relit_db: float | None,
    is_faithful: bool,
    expected_gain: Callable[[float], Interval | None] = lambda _gain_db: None,
) -> Explanation:
    """Put the remedies beside each other.

    Args:
        recalibration_db: The gain of a recalibration over the engine in service.
        raised_db: The same, if the loudest layers were left float under the present scales.
        regimes_db: The gain of a recalibration over each other known regime, by artefact.
        relit_db: Its gain if the light were as it was; None: not tried.
        is_faithful: INT8 answers as the float model does: what is lost, the float model has lost.
        expected_gain: Returns the fidelity that so many dB are worth on the newest frames; None where that cannot be
            said.
    """
    changes = history.changes
    candidates = [("recalibrate", recalibration_db, ""), ("raise precision", raised_db, "")]
    candidates += [
        ("switch regime", recalibration_db - still_db, artefact)
        for artefact, still_db in regimes_db.items()
        if still_db < recalibration_db
    ]
    if relit_db is not None:
        candidates.append(("restore exposure", recalibration_db - relit_db, ""))
    by_gain = sorted(candidates, key=lambda candidate: -candidate[1])
    with_gain = [Remedy(remedy, gain_db, detail, expected_gain(gain_db)) for remedy, gain_db, detail in by_gain]
    others = []
    if any(change.cause == "blur" for change in changes):
        others.append(Remedy("clean or focus the lens", None, "fine detail is lost, and no scale restores it"))
    before, now = history.confidences
    if is_faithful and now < _UNSURE * before:
        others.append(Remedy("retrain", None, f"the float model's confidence fell from {before:.2f} to {now:.2f}"))
    needs_hands = changes[0].cause == "blur"
    return Explanation(changes, (*others, *with_gain) if needs_hands else (*with_gain, *others))


class Relighting:
    """Observes some frames once more, relit as the calibrated scene was; the observer's thread uses it."""

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self._seen: dict[str, AbsHistogram] = {}
        self._left = _RELIT_FRAMES

    def relit(self, image: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return the frame in the other light, BGR uint8 (H, W, 3)."""
        light = np.clip(np.arange(256) * self.factor + 0.5, 0.0, 255.0).astype(np.uint8)
        relit: NDArray[np.uint8] = light[image]  # by a table: a large frame in floats would take four times its memory
        return relit

    def add(self, histograms: Mapping[str, AbsHistogram]) -> Mapping[str, AbsHistogram] | None:
        """Add what the reference saw of a relit frame; return all of it once there is enough."""
        merge_into(self._seen, histograms)
        self._left -= 1
        return self._seen if self._left <= 0 else None
