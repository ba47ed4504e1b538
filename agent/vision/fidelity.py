"""Compare an engine's answer with the reference engine's for the same frame: its fidelity."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agent.vision.answer import Answer, ClassOverlap
from calibrate.statistics.evidence import shows_loss

_LEAST_SHARE = 0.001  # a class of fewer of all pixels is chance, or too small for anyone to miss


@dataclass(frozen=True)
class Fidelity:
    """The fidelity of one frame in [0, 1].

    `is_empty`: the frame shows nothing: both engines detected nothing, or their answers cannot be compared. Such frames
    agree by default. An average has to count them apart, or an empty scene would look like proof.
    """

    value: float
    is_empty: bool = False


def fidelity(served: Answer, reference: Answer) -> Fidelity:
    """Return the fidelity of a served answer against the reference engine's for the same frame.

    Raises TypeError on answers of different tasks.
    """
    if type(served) is not type(reference):
        raise TypeError(f"answers of two tasks: {type(served).__name__} and {type(reference).__name__}")
    agreement = served.fidelity(reference)
    if agreement is None:
        return Fidelity(1.0, is_empty=True)
    return Fidelity(agreement, is_empty=served.is_empty and reference.is_empty)


class PooledIou:
    """The IoU of each class, of the pixels of many frames together.

    A class that covers a few pixels of a frame makes its mean over frames low; here each pixel counts alike.
    """

    def __init__(self) -> None:
        self._both, self._either = Counter[int](), Counter[int]()
        self._frames: dict[int, list[tuple[int, int]]] = defaultdict(list)

    def add(self, frame: Iterable[ClassOverlap]) -> None:
        """Add the `overlaps_by_class` of one frame."""
        for class_id, both, either in frame:
            self._both[class_id] += both
            self._either[class_id] += either
            self._frames[class_id].append((both, either))

    def iou(self, class_id: int) -> float:
        """Return the IoU of a class; 1 where neither answer has ever had it."""
        return self._both[class_id] / self._either[class_id] if self._either[class_id] else 1.0

    def by_class(self, label: Callable[[int], str]) -> dict[str, float]:
        """Return the IoU of each class by its name; none without classes of pixels."""
        return {label(each): self.iou(each) for each in sorted(self._either)}

    def below(self, least: float) -> list[int]:
        """Return the classes whose IoU is below `least`, the worst first, but for those of hardly any pixel."""
        return sorted((each for each in self._shown() if self.iou(each) < least), key=self.iou)

    def lost(self, least: float, error: float) -> list[int]:
        """Return the classes `below` least by more than chance, which names one with a probability of `error` at most.

        In a frame in which a class has the IoU that is asked, `both` is that share of `either`.
        """
        candidates = self.below(least)
        return [each for each in candidates if shows_loss(self._gains(each, least), error / len(self._shown()))]

    def _gains(self, class_id: int, least: float) -> NDArray[np.float64]:
        """Return by how many pixels each frame has more of a class in both answers than are asked for."""
        both, either = np.array(self._frames[class_id], np.float64).T
        gains: NDArray[np.float64] = both - least * either
        return gains

    def _shown(self) -> list[int]:
        pixels = sum(self._either.values())
        return [each for each, either in self._either.items() if either >= _LEAST_SHARE * pixels]
