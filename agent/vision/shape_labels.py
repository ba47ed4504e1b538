"""Read what people draw of a frame's objects in a tool made for that: outlines, key points or corners.

`FrameShapes` is what these labels have in common. A label that holds shapes is an answer's equal but for its scores, so
that the task compares the two as it compares two answers.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from agent.vision.answer import Answer
from agent.vision.boxes import FloatArray, LabelledBoxes, Size
from agent.vision.datasets.outlines import bounds_of, checked_outline
from agent.vision.labels import LabelError, LabelKind, class_id, whole

MOST_OBJECTS = 1000  # in a label
_ANY_SIZE = (1 << 16, 1 << 16)

LabelledT = TypeVar("LabelledT", bound=LabelledBoxes)
AnswerT = TypeVar("AnswerT", bound=Answer)


class FrameShapes(LabelKind[LabelledT, AnswerT]):
    """All objects of a frame, each with a shape.

    shape_key: The key of an object's document that has its shape.
    """

    form: ClassVar[Literal["class", "boxes", "shapes"]] = "shapes"
    shape_key: ClassVar[str]

    def read(self, document: Any, names: Sequence[str] = (), size: Size | None = None) -> LabelledT:
        """Return the objects; `labels.shape` for a shape that is none, or is not in the frame."""
        if not isinstance(document, list) or not all(
            isinstance(each, dict) and self.shape_key in each for each in document
        ):
            found, expected = f"a label that is no list of objects with '{self.shape_key}'", self.example
            raise LabelError("labels.task", found, expected, "send labels of the model's task")
        if len(document) > MOST_OBJECTS:
            expected = f"at most {MOST_OBJECTS} in a frame"
            raise LabelError("labels.shape", f"{len(document)} objects", expected, "leave out some")
        classes = np.array([class_id(whole(each.get("class")), names) for each in document], np.int64)
        return self._objects(document, classes, size)

    @abstractmethod
    def _objects(
        self, documents: Sequence[Mapping[str, Any]], classes: NDArray[np.int64], size: Size | None
    ) -> LabelledT:
        """Return the objects of these classes (n,). Raises LabelError (`labels.shape`)."""

    def is_same(self, first: LabelledT, second: LabelledT) -> bool:
        return bool(self.document(first) == self.document(second))

    def is_nothing(self, truth: LabelledT) -> bool:
        return not len(truth)


@dataclass(frozen=True, eq=False, kw_only=True)
class LabelledOutlines(LabelledBoxes):
    """Hold the objects of one image with their outlines.

    Args:
        outlines: (n,), each as `checked_outline` returns it.
    """

    outlines: NDArray[np.object_]


class FrameOutlines(FrameShapes[LabelledOutlines, AnswerT]):
    """All objects of a frame, or all of its areas, each with an outline as COCO has it."""

    shape_key: ClassVar[str] = "outline"
    example: ClassVar[str] = '[{"class": 0, "outline": [[x1, y1, x2, y2, x3, y3]]}]'
    unnamed: LabelledOutlines | None = LabelledOutlines(
        boxes=np.zeros((0, 4), np.float32), classes=np.zeros(0, np.int64), outlines=np.zeros(0, object)
    )

    def _objects(
        self, documents: Sequence[Mapping[str, Any]], classes: NDArray[np.int64], size: Size | None
    ) -> LabelledOutlines:
        return outlined([sound_outline(each["outline"], size) for each in documents], classes)

    def document(self, truth: LabelledOutlines) -> list[dict[str, Any]]:
        rows = zip(truth.classes.tolist(), truth.outlines, strict=True)
        return [{"class": number, "outline": _rounded(each)} for number, each in rows]

    def to_coco(self, document: Mapping[str, Any]) -> dict[str, Any]:
        outline = document["outline"]
        left, top, right, bottom = bounds_of(outline)
        if isinstance(outline, Mapping):
            area = float(sum(outline["counts"][1::2]))
        else:
            area = sum(abs(_area(np.array(each).reshape(-1, 2))) for each in outline)
        bbox = [left, top, right - left, bottom - top]
        return {"bbox": [round(each, 2) for each in bbox], "area": round(area, 2), "segmentation": outline}

    def from_coco(self, box: Sequence[float], outline: Any, keypoints: Any, size: Size) -> dict[str, Any]:
        del box, keypoints, size
        return {"outline": outline}


def outlined(outlines: Sequence[Any], classes: NDArray[np.int64]) -> LabelledOutlines:
    """Return the objects of these sound outlines and classes (n,)."""
    kept = np.empty(len(outlines), object)
    for number, each in enumerate(outlines):
        kept[number] = each
    boxes = np.array([bounds_of(each) for each in outlines], np.float32).reshape(-1, 4)
    return LabelledOutlines(boxes=boxes, classes=classes, outlines=kept)


def kept_size(document: Sequence[int]) -> Size:
    """Return (height, width) from JSON. Raises ValueError for anything else."""
    height, width = document
    if not (type(height) is type(width) is int and 0 < height <= _ANY_SIZE[0] and 0 < width <= _ANY_SIZE[1]):
        raise ValueError("a height and a width")
    return height, width


def numbers(
    values: Any, shape: tuple[int, ...], what: str, reach: tuple[float, float], size: Size | None
) -> FloatArray:
    """Return a list of numbers as an array, of which the last axis begins with x and y.

    Args:
        shape: Of the array; -1 stands for any length.
        what: The numbers' name, for errors.
        reach: How far x, y may be beyond the frame: in its sides, and in pixels.
        size: (height, width) of the frame; None: it is not known.

    Raises LabelError (`labels.shape`) for anything else.
    """
    try:
        array = np.array(values, np.float64).reshape(shape)
    except (TypeError, ValueError, OverflowError):
        raise _no_shape(f"{what} {values!s:.80}", f"numbers, {'x'.join(map(str, shape))}") from None
    sides = np.array((size or _ANY_SIZE)[::-1], np.float64)
    slack = reach[0] * sides + reach[1]
    places = array[..., :2]
    if not (np.isfinite(array).all() and (places >= -slack).all() and (places <= sides + slack).all()):
        where = f"within {sides[0]:g} x {sides[1]:g} pixels" if size else "numbers of pixels"
        raise _no_shape(f"{what} {values!s:.80}", where)
    return array.astype(np.float32)


def sound_outline(outline: Any, size: Size | None) -> Any:
    """Return an outline that has a pixel, as `checked_outline` does. Raises LabelError (`labels.shape`)."""
    own = outline.get("size") if isinstance(outline, Mapping) else None
    try:
        if size is None and own is not None:
            sound = checked_outline(outline, *kept_size(own))
        else:
            sound = checked_outline(outline, *(size or _ANY_SIZE))
        is_empty = isinstance(sound, Mapping) and not any(sound["counts"][1::2])
    except (ValueError, TypeError) as error:
        raise _no_shape(f"outline {outline!s:.80}", str(error)) from None
    if is_empty:
        raise _no_shape("an outline without a pixel", "an outline with some")
    return sound


def _no_shape(found: str, expected: str) -> LabelError:
    return LabelError("labels.shape", found, expected, "correct the object, or remove it")


def _rounded(outline: Any) -> Any:
    return outline if isinstance(outline, Mapping) else [[round(value, 2) for value in each] for each in outline]


def _area(points: NDArray[np.float64]) -> float:
    """Return the area of a polygon (n, 2), by the shoelace formula."""
    (x, y), (next_x, next_y) = points.T, np.roll(points, -1, axis=0).T
    return float((x * next_y - next_x * y).sum()) / 2.0
