"""Read what people say that a frame shows, and write it down: a class, or boxes in frame pixels.

`LabelKind` is what a task's labels have in common, wherever they come from: a message, a file, the page of
`tared label`, or a labelling tool.
"""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Generic, Literal, TypeVar

from agent.common.errors import AgentError
from agent.vision.answer import Answer
from agent.vision.boxes import Size
from agent.vision.spec import ModelSpec

_FAR_PX = 1e9
_MOST_CLASSES = 1 << 31  # for a model whose spec names no class
_LISTED = 8  # names in a message

Truth = Any  # what a label of some task says: a class id, boxes in frame pixels
TruthT = TypeVar("TruthT")
AnswerT = TypeVar("AnswerT", bound=Answer)


class LabelKind(ABC, Generic[TruthT, AnswerT]):
    """What one frame's label is.

    form: It decides how the page of `tared label` asks for a label, and what labelling tools exchange. A "class" is an
        int. "boxes" are LabelledBoxes, and an answer can be given as a label. "shapes" are LabelledBoxes with more,
        which people draw in another tool.
    unnamed: The label of a frame that the labels of a recording do not name; None: it has none.
    example: A label in JSON.
    accuracy: What the mean of `Answer.accuracy` over frames is, in words.
    """

    form: ClassVar[Literal["class", "boxes", "shapes"]]
    example: ClassVar[str]
    accuracy: ClassVar[str] = "mean accuracy"
    unnamed: TruthT | None = None

    @abstractmethod
    def read(self, document: Any, names: Sequence[str] = (), size: Size | None = None) -> TruthT:
        """Return a label from its JSON, with classes by number or name.

        Args:
            names: Of the model's classes; empty: any number is one.
            size: (height, width) of the frame, within which the label has to be; None: it is not known.

        Raises LabelError: `labels.task` for a label of another form; `labels.class`, `labels.box`, `labels.shape`.
        """

    @abstractmethod
    def document(self, truth: TruthT) -> Any:
        """Return a label as `read` takes it."""

    @abstractmethod
    def is_same(self, first: TruthT, second: TruthT) -> bool:
        """Return whether two labels say the same; places may differ by what `document` rounds."""

    @abstractmethod
    def answer_document(self, answer: AnswerT) -> dict[str, Any]:
        """Return an answer, in frame pixels, for JSON."""

    @abstractmethod
    def read_answer(self, document: Mapping[str, Any]) -> AnswerT:
        """Return an answer from its `answer_document`. Raises ValueError, KeyError and the like for any other."""

    def is_nothing(self, truth: TruthT) -> bool:
        """Return whether a label says that nothing is there."""
        del truth
        return False

    def fitted(self, spec: ModelSpec) -> LabelKind[TruthT, AnswerT]:
        """Return what a label is for the model of one spec, which may know more of it."""
        del spec
        return self

    def from_answer(self, answer: AnswerT, size: Size) -> TruthT:
        """Return the label that says what an answer says, of a frame of this (height, width); not of a class."""
        del size
        raise TypeError(f"{type(answer).__name__} as a label")

    def coco_category(self) -> dict[str, Any]:
        """Return what COCO's categories have beside id and name."""
        return {}

    def to_coco(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """Return COCO's keys of one object of `document`, but for those that identify it."""
        left, top, right, bottom = document["box"]
        width, height = round(right - left, 2), round(bottom - top, 2)
        return {"bbox": [left, top, width, height], "area": round(width * height, 2)}

    def from_coco(self, box: Sequence[float], outline: Any, keypoints: Any, size: Size) -> dict[str, Any]:
        """Return an object as `read` takes it, but for its class.

        Args:
            box: x1 y1 x2 y2.
            outline, keypoints: `segmentation` and `keypoints` as they are in the file; None: there is none.
            size: (height, width) of the frame.

        Raises LabelError: `labels.shape`.
        """
        del outline, keypoints, size
        return {"box": box}


class LabelError(AgentError):
    """A label that fits no frame of the model: `labels.task`, `labels.class`, `labels.box`, `labels.shape`."""


def class_name(number: int, names: Sequence[str]) -> str:
    """Return the name of a class; its number where there is none."""
    return names[number] if number < len(names) else str(number)


def parse_class(text: str, names: Sequence[str]) -> int:
    """Return the class of this name, in any case, or of this number. Raises LabelError (`labels.class`)."""
    wanted = text.strip()
    for exact in (text, wanted):
        if exact in names:
            return names.index(exact)
    alike = [number for number, name in enumerate(names) if name.strip().casefold() == wanted.casefold()]
    if len(alike) == 1:
        return alike[0]
    if wanted.isascii() and wanted.isdecimal() and len(wanted) < 9:
        return check_class(int(wanted), names)
    near = difflib.get_close_matches(wanted, names, n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else "write a name as labels of the model spec has it"
    raise LabelError("labels.class", f"class {text[:64]!r}", f"a class of the model: {_listed(names)}", hint)


def check_class(number: Any, names: Sequence[str]) -> int:
    """Return the number of a class if the model has it. Raises LabelError (`labels.class`)."""
    count = len(names) or _MOST_CLASSES
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < count:
        raise LabelError(
            "labels.class",
            f"class {number!s:.40}",
            f"a number from 0 to {count - 1}",
            "correct the class, or labels in the model spec",
        )
    return number


def whole(number: Any) -> Any:
    """Return a whole number as one, as pandas writes it: 3.0."""
    return int(number) if isinstance(number, float) and number.is_integer() else number


def class_id(document: Any, names: Sequence[str]) -> int:
    """Return the class of this name or number. Raises LabelError (`labels.class`)."""
    return parse_class(document, names) if isinstance(document, str) else check_class(document, names)


def checked_box(box: Sequence[Any], size: Size | None) -> tuple[float, ...]:
    """Return a box; with the frame's `size`, cut at its edges, corners in any order.

    Raises LabelError (`labels.box`) for one that is empty or outside.
    """
    if len(box) != 4 or not all(_is_number(value) for value in box):
        found = f"box {box!s:.80}"
        raise LabelError("labels.box", found, "four numbers x1 y1 x2 y2 in pixels", "correct the box")
    if size is None:
        return tuple(map(float, box))
    height, width = size
    xs, ys = (
        sorted(round(min(max(float(value), 0.0), end), 2) for value in box[at::2])  # as `document` rounds
        for at, end in ((0, width), (1, height))
    )
    if xs[0] == xs[1] or ys[0] == ys[1]:
        found = "box " + " ".join(f"{value:g}" for value in box)
        raise LabelError("labels.box", found, f"x1 y1 x2 y2 within {width} x {height} pixels", "correct the box")
    return xs[0], ys[0], xs[1], ys[1]


def _is_number(value: Any) -> bool:
    """Return True for a finite number of a sane size; NaN is not at most anything."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= _FAR_PX


def _listed(names: Sequence[str]) -> str:
    if not names:
        return "its number, since the spec names none"
    return ", ".join([*names[:_LISTED], *(["..."] if len(names) > _LISTED else [])])
