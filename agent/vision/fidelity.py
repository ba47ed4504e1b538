"""Compare an engine's answer with the reference engine's for the same frame: its fidelity."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from agent.vision.answer import Answer, ClassOverlap


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

    def add(self, frame: Iterable[ClassOverlap]) -> None:
        """Add the `overlaps_by_class` of one frame."""
        for class_id, both, either in frame:
            self._both[class_id] += both
            self._either[class_id] += either

    def by_class(self, label: Callable[[int], str]) -> dict[str, float]:
        """Return the IoU of each class by its name; none without classes of pixels."""
        return {label(each): self._both[each] / self._either[each] for each in sorted(self._either)}
