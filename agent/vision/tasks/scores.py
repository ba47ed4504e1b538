"""Hold what one pass over labelled images comes to, in the currency of a task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ClassScore:
    """The score of one class, and the number of its objects, without crowds, or of its pixels."""

    class_id: int
    value: float
    count: int


@dataclass(frozen=True)
class Evaluation:
    """The result of one pass over a data set.

    scores: By name, in [0, 1]; the first is the task's own: top1, map (COCO's mean over classes and IoU thresholds), or
    miou. by_size: COCO's mean by size of object, None where no object has it. by_class: of each class `class_score`,
    and how many of `class_unit` there are. Tasks without them have none. names_worst: The worst class is named.
    """

    task: str
    images: int
    scores: Mapping[str, float]
    by_size: Mapping[str, float | None] = field(default_factory=dict)
    by_class: Sequence[ClassScore] = ()
    class_score: str = "map"
    class_unit: str = "objects"
    names_worst: bool = False
