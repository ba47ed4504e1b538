"""Follow class by class what the engine in service loses of what the reference sees, while it serves.

A mean fidelity hides a class: if a 6 is read as an 8 in four frames of a hundred, the mean is 0.96, and 40 % of the
sixes are lost. `ClassLosses` watches each class by itself, and names one that loses more than it did, or far more than
the others do, at a bounded rate of false alarms over all classes together.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from agent.common.state_files import count, finite
from agent.monitoring.estimates import mean_interval
from agent.vision.answer import ServedClass
from calibrate.errors import CalibrationError
from calibrate.statistics.evidence import LossDetector

_MONTH_S = 30 * 86_400.0
_PER_FRAME = 4  # classes of one frame that count, drawn at random where there are more
_LEARNT = 100  # frames with a class, from which its usual loss is bounded; again at each doubling
_ERROR = 1e-3  # probability that any bound of one class fails
_MARGIN = 0.02  # beyond the usual loss
_UNLIKE = 0.1  # beyond the loss of all classes together: a class that is worse than that was so from the beginning
_MOST_TOLERATED = 0.9
_WARNING = 100.0
_RECENT = 0.02  # weight of the newest frame in a class's recent loss
_EXAMPLES = 3
_NEWEST = 32  # lost objects, of which the commonest answer is named


@dataclass(frozen=True)
class LossExample:
    """A frame in which an object of the class was lost. served: the class in its place; None: nothing."""

    frame: int
    ts: float
    served: int | None


@dataclass(frozen=True)
class LostClass:
    """A class that loses too much.

    Args:
        class_id: Of the reference.
        loss: Share of its objects that are missed or answered as another class, over the newest frames with it.
        tolerance: The loss that was tolerated.
        instead: The class that is most often served in its place; None: mostly nothing.
        examples: The newest frames.
    """

    class_id: int
    loss: float
    tolerance: float
    instead: int | None
    examples: tuple[LossExample, ...]


class _ClassLoss:
    """One class. detector: None until the usual loss is known."""

    def __init__(self) -> None:
        self.frames = 0
        self.total = 0.0
        self.recent = 0.0
        self.detector: LossDetector | None = None
        self.instead: deque[int | None] = deque(maxlen=_NEWEST)
        self.examples: deque[LossExample] = deque(maxlen=_EXAMPLES)


class ClassLosses:
    """The losses of one engine, by class of the reference.

    The loss of a frame in a class is the share of the class's objects there that are missed, or served as another
    class. A class may lose 2 points more than usual: than the upper bound of its mean so far, taken at 100, 200, 400,
    ... frames, or than 10 points beyond all classes together if that is less. While the mean loss of each class, given
    the past, stays within that, the expected number of alarms in 30 days is at most `false_alarms_per_30d`, over all
    classes: see EDetector. A bound is below a constant mean with a probability of 0.001 at most, for each class.
    """

    def __init__(self, period_s: float, false_alarms_per_30d: float) -> None:
        """period_s: capture time between two frames, at least, in the mean."""
        self._frames_per_alarm = _MONTH_S / period_s / false_alarms_per_30d
        self._random = np.random.default_rng(0)
        self.start()

    def start(self) -> None:
        """Forget everything: another engine serves."""
        self._classes: dict[int, _ClassLoss] = {}
        self._found: list[int] = []  # classes that lose too much
        self._seen = 0  # frames with any class
        self.values, self._total = 0, 0.0  # one value for each class of a frame

    def add(self, frame: int, ts: float, pairs: Iterable[ServedClass]) -> None:
        """Add an observed frame of capture time `ts`, by the reference's `Answer.pairs`; none without classes."""
        by_class: dict[int, list[int | None]] = defaultdict(list)
        for class_id, answer in pairs:
            by_class[class_id].append(answer)
        names = list(by_class)
        if len(names) > _PER_FRAME:
            names = self._random.choice(names, _PER_FRAME, replace=False).tolist()
        self._seen += bool(names)
        for class_id in names:
            self._add(class_id, by_class[class_id], frame, ts)

    @property
    def lost(self) -> tuple[LostClass, ...]:
        """The classes that lose too much, as they were found."""
        return tuple(
            LostClass(
                class_id,
                each.recent,
                each.detector.tolerance,
                Counter(each.instead).most_common(1)[0][0] if each.instead else None,
                tuple(each.examples),
            )
            for class_id, each in ((found, self._classes[found]) for found in self._found)
            if each.detector is not None
        )

    def _add(self, class_id: int, served: list[int | None], frame: int, ts: float) -> None:
        known = self._classes.setdefault(class_id, _ClassLoss())
        lost = [answer for answer in served if answer != class_id]
        loss = len(lost) / len(served)
        known.frames, known.total = known.frames + 1, known.total + loss
        known.recent += max(_RECENT, 1.0 / known.frames) * (loss - known.recent)
        self.values, self._total = self.values + 1, self._total + loss
        if lost:
            known.instead.extend(lost)
            known.examples.append(LossExample(frame, ts, lost[0]))
        if known.detector is not None:
            known.detector.update(loss)
            if known.detector.drift_detected and class_id not in self._found:
                self._found.append(class_id)
        doublings = math.log2(known.frames / _LEARNT)
        if doublings >= 0.0 and doublings.is_integer():
            tolerance = self._tolerance(known, int(doublings))
            if known.detector is None:
                known.detector = self._detector(tolerance)
            else:
                known.detector.tolerance = min(known.detector.tolerance, tolerance)

    def _tolerance(self, known: _ClassLoss, doublings: int) -> float:
        error = _ERROR / ((doublings + 1) * (doublings + 2))  # these sum up to _ERROR
        usual, common = mean_interval(known.total, known.frames, error).high, self._total / self.values
        return min(min(usual, common + _UNLIKE) + _MARGIN, _MOST_TOLERATED)

    def _detector(self, tolerance: float) -> LossDetector:
        threshold = max(1.0, self.values / max(1, self._seen) * self._frames_per_alarm)
        return LossDetector(tolerance, threshold, min(_WARNING, threshold))

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs, in JSON's types."""
        classes = {
            str(class_id): {
                "frames": each.frames,
                "total": each.total,
                "recent": each.recent,
                "detector": each.detector.state() if each.detector is not None else None,
                "instead": list(each.instead),
                "examples": [[example.frame, example.ts, example.served] for example in each.examples],
            }
            for class_id, each in self._classes.items()
        }
        return {"seen": self._seen, "values": self.values, "total": self._total, "classes": classes}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken. Raises CalibrationError, AttributeError, KeyError, TypeError or ValueError
        for anything else, and then forgets everything.
        """
        self.start()
        try:
            self._seen, self.values = count(state["seen"]), count(state["values"])
            self._total = finite(state["total"])
            for class_id, kept in state["classes"].items():
                known = self._classes[int(class_id)] = _ClassLoss()
                known.frames = count(kept["frames"])
                known.total, known.recent = finite(kept["total"]), finite(kept["recent"])
                if (detector := kept["detector"]) is not None:
                    threshold = finite(detector["threshold"])
                    known.detector = LossDetector(finite(detector["tolerance"]), threshold, min(_WARNING, threshold))
                    known.detector.restore(detector)
                    if known.detector.drift_detected:
                        self._found.append(int(class_id))
                known.instead.extend(_class_or_none(each) for each in kept["instead"])
                known.examples.extend(
                    LossExample(count(frame), finite(ts), _class_or_none(served))
                    for frame, ts, served in kept["examples"]
                )
        except (CalibrationError, AttributeError, KeyError, TypeError, ValueError):
            self.start()
            raise


def _class_or_none(kept: Any) -> int | None:
    if not (kept is None or isinstance(kept, int)):
        raise ValueError(f"{kept!r} in place of a class")
    return kept
