"""Define what every answer of a model can be asked, whatever its task: `Answer`.

An answer is what a task's decoder makes of an engine's outputs for one frame: boxes, a class, a mask. Whoever serves,
watches, draws or reports answers asks them by these methods, and never for their type.
"""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from agent.vision.boxes import FloatArray, Part, Size
from agent.vision.drawing import Picture, scaled
from agent.vision.policy import Policy
from agent.vision.preprocess import Geometry
from agent.vision.spec import ModelSpec
from engines.interface import Array

if TYPE_CHECKING:  # in `typing` since Python 3.11
    from typing_extensions import Self

# Marks the objects that count: classes (n,) and, of objects in places, boxes (n, 4) in frame pixels.
Wanted = Callable[[NDArray[np.int64], FloatArray | None], NDArray[np.bool_]]
# The reference's class of an object, and the served class; None where the object was not found.
ServedClass = tuple[int, int | None]
# A class, how many pixels both answers give it, and how many either does.
ClassOverlap = tuple[int, int, int]
_ARRAY_BYTES = 128  # an array without its values


@dataclass(frozen=True)
class MatchCounts:
    """True positives, false positives and false negatives; sums over frames are made with `+`."""

    true_positives: int = 0
    false_positives: int = 0
    false_negatives: int = 0

    def __add__(self, other: MatchCounts) -> MatchCounts:
        return MatchCounts(*map(operator.add, astuple(self), astuple(other)))

    @property
    def f1(self) -> float:
        """F1 in [0, 1]; 1 where there is no object and no detection."""
        errors = self.false_positives + self.false_negatives
        return 1.0 if errors == 0 else 2 * self.true_positives / (2 * self.true_positives + errors)


@dataclass(frozen=True, eq=False)
class Hits:
    """An answer compared with a label.

    Args:
        found: int64 (n,), the classes that were found.
        scores: float (n,).
        right: bool (n,), which of them are true.
        shown: int64 (m,), the classes that are there.
    """

    found: NDArray[np.int64]
    scores: NDArray[np.floating[Any]]
    right: NDArray[np.bool_]
    shown: NDArray[np.int64]

    @property
    def counts(self) -> MatchCounts:
        hits = int(self.right.sum())
        return MatchCounts(hits, len(self.found) - hits, len(self.shown) - hits)


class Answer(ABC):
    """The answer to one frame. It is kept for minutes, so that no array is a view of an engine's outputs.

    Raw outputs alone are the outputs themselves, and are not kept.

    Its places are in pixels of the network input until `in_frame` has moved them.
    """

    @property
    def is_empty(self) -> bool:
        """True where nothing was found; an answer that always says something is never empty."""
        return False

    @property
    def classes_seen(self) -> frozenset[int]:
        """The classes that are in the frame by this answer."""
        return frozenset()

    @property
    def confidence(self) -> float:
        """The score of the surest object; NaN where nothing was found, or nothing has a score."""
        return math.nan

    @property
    def nbytes(self) -> int:
        """The size of its arrays in memory, approximately."""
        arrays = (each for each in vars(self).values() if isinstance(each, np.ndarray))
        return sum(each.nbytes + _ARRAY_BYTES for each in arrays)

    @abstractmethod
    def fidelity(self, reference: Self) -> float | None:
        """Return how far the answer agrees with the float reference's to the same frame, in [0, 1]: 1 - the loss.

        It is None where the two cannot be compared.
        """

    def pairs(self, served: Self | None) -> list[ServedClass]:
        """Return the served class of each object that this answer, the reference's, has; none without classes.

        served: None serves nothing, e.g. where outputs are not finite.
        """
        del served
        return []

    def sqnr_by_part(self, reference: Self) -> Mapping[str, float]:
        """Return the signal to quantisation noise of each part of the outputs in dB, by its name.

        It is empty where the task knows what outputs mean.
        """
        del reference
        return {}

    def overlaps_by_class(self, served: Self | None) -> list[ClassOverlap]:
        """Return how far each class of either answer covers the same pixels in both; none without classes of pixels.

        Their sums over frames give the IoU of all frames together. This answer is the reference's; served as for
        `pairs`.
        """
        del served
        return []

    def accuracy(self, truth: Any) -> float | None:
        """Return the accuracy of the answer, in frame pixels, by a label of its task, in [0, 1].

        It is None where nothing is there, and nothing was found.
        """
        raise _no_labels(self, truth)

    def hits(self, truth: Any, wanted: Wanted | None = None) -> Hits:
        """Return what of the answer, in frame pixels, is true by a label of its task.

        wanted: What of both counts; None: everything.
        """
        raise _no_labels(self, truth, wanted)

    def sureness(self, reference: Self) -> float:
        """Return how sure this answer and the reference's are; comparable among frames of one model."""
        agreement = self.fidelity(reference)
        return 0.0 if agreement is None else agreement

    def without_padding(self, part: Part, size: Size) -> Self:
        """Return the answer without what it says of the network input's padding.

        Args:
            part: Of the network input, which the frame covers.
            size: (height, width) of the network input in pixels.
        """
        del part, size
        return self

    def in_frame(self, geometry: Geometry | None) -> Self:
        """Return the answer with its places in frame pixels.

        geometry: Where the frame lay in the network input; None: they are in frame pixels already.
        """
        del geometry
        return self

    @abstractmethod
    def as_dict(self, spec: ModelSpec) -> dict[str, Any]:
        """Return the answer in JSON's terms: null for a value that is not finite, or is withheld."""

    @abstractmethod
    def summary(self, spec: ModelSpec) -> str:
        """Return the answer in a few words."""

    def draw(self, picture: Picture, spec: ModelSpec) -> None:  # noqa: B027  (raw outputs are not drawn)
        """Draw the answer into a picture in whose pixels it is; nothing where it cannot be drawn."""

    def drawn_into(self, image: Picture, geometry: Geometry | None, spec: ModelSpec, scale: float = 1.0) -> Picture:
        """Return a copy of a frame with the answer drawn into it.

        Args:
            geometry: As for `in_frame`.
            scale: The sides of the copy, by those of the frame.
        """
        picture = scaled(image, scale) if scale != 1.0 else image.copy()
        if scale != 1.0:
            (height, width), (rows, columns) = image.shape[:2], picture.shape[:2]
            placed = geometry or Geometry(width, height, 1.0, 1.0, 0, 0)
            scale_x, scale_y = placed.scale_x / scale, placed.scale_y / scale
            geometry = Geometry(columns, rows, scale_x, scale_y, placed.left_px, placed.top_px)
        self.in_frame(geometry).draw(picture, spec)
        return picture

    def shown(self, policy: Policy, camera: str, geometry: Geometry | None) -> Self:
        """Return the answer as a policy lets it be shown.

        geometry: As for `in_frame`. Raises ValueError where the policy has masks, and the frame's size is unknown.
        """
        del policy, camera, geometry
        return self

    def left_out(self, shown: Self) -> int:
        """Return how many objects are missing in `shown`, as a policy lets the answer be shown."""
        del shown
        return 0


def _no_labels(*arguments: object) -> TypeError:
    return TypeError(f"{type(arguments[0]).__name__}, whose task has no labels")


Decoder = Callable[[Mapping[str, Array]], Answer]
