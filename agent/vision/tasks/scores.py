"""Hold what one pass over labelled images comes to, in the currency of a task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ClassPrecision:
    """The mean AP of one class, over COCO's IoU thresholds, and the number of its objects without crowds."""

    class_id: int
    average: float
    objects: int


@dataclass(frozen=True)
class Evaluation:
    """The result of one pass over a data set.

    scores: top1, or map and map50, in [0, 1]: COCO's mean over classes and IoU thresholds, and at IoU 0.5. by_size: the
    same mean by size of object, None where no object has it. by_class: one of each class. A classifier has neither.
    """

    task: str
    images: int
    scores: Mapping[str, float]
    by_size: Mapping[str, float | None] = field(default_factory=dict)
    by_class: Sequence[ClassPrecision] = ()
