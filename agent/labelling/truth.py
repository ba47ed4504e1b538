"""Check a label as people give it: the name or number of a class, or boxes in frame pixels."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

import numpy as np

from agent.common.errors import AgentError
from agent.labelling.store import Truth
from agent.vision.detections import LabelledBoxes, Size

_MOST_BOXES = 1000
_FAR_PX = 1e9
_MOST_CLASSES = 1 << 16  # for a model whose spec names no class
_LISTED = 8  # names in a message


def class_name(number: int, labels: Sequence[str]) -> str:
    """Return the name of a class; its number where there is none."""
    return labels[number] if number < len(labels) else str(number)


def parse_class(text: str, labels: Sequence[str]) -> int:
    """Return the class of this name, in any case, or of this number. Raises AgentError (`labelling.label`)."""
    wanted = text.strip()
    for named in (
        [number for number, label in enumerate(labels) if label == wanted],
        [number for number, label in enumerate(labels) if label.casefold() == wanted.casefold()],
    ):
        if len(named) == 1:
            return named[0]
    if wanted.isascii() and wanted.isdecimal() and len(wanted) < 9:
        return check_class(int(wanted), labels)
    near = difflib.get_close_matches(wanted, labels, n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else "write a name as labels of the model spec has it"
    raise _refusal(f"class '{wanted}'", f"a class of the model: {_listed(labels)}", hint)


def check_class(number: Any, labels: Sequence[str]) -> int:
    """Return the number of a class if the model has it. Raises AgentError (`labelling.label`)."""
    count = len(labels) or _MOST_CLASSES
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < count:
        raise _refusal(
            f"class {number!s:.40}", f"a number from 0 to {count - 1}", "correct the class, or labels in the spec"
        )
    return number


def check_boxes(rows: Sequence[tuple[int, Sequence[float]]], size: Size, labels: Sequence[str]) -> LabelledBoxes:
    """Return boxes cut at the frame's edges.

    Args:
        rows: The class and the box x1 y1 x2 y2 of each object, in frame pixels; corners in any order.
        size: Of the frame.

    Raises AgentError (`labelling.label`) for a box that is empty or outside, and for an unknown class.
    """
    if len(rows) > _MOST_BOXES:
        raise _refusal(f"{len(rows)} boxes", f"at most {_MOST_BOXES} in a frame", "leave out some")
    height, width = size
    boxes = []
    for number, box in rows:
        check_class(number, labels)
        if len(box) != 4 or not all(_is_number(value) for value in box):
            raise _refusal(f"box {box!s:.80}", "four numbers x1 y1 x2 y2 in pixels", "correct the box")
        xs, ys = (
            sorted(round(min(max(float(value), 0.0), end), 2) for value in box[at::2])  # as the store rounds
            for at, end in ((0, width), (1, height))
        )
        if xs[0] == xs[1] or ys[0] == ys[1]:
            found = "box " + " ".join(f"{value:g}" for value in box)
            raise _refusal(found, f"x1 y1 x2 y2 within {width} x {height} pixels", "correct the box")
        boxes.append((xs[0], ys[0], xs[1], ys[1]))
    classes = np.array([number for number, _ in rows], np.int64)
    return LabelledBoxes(boxes=np.array(boxes, np.float32).reshape(-1, 4), classes=classes)


def check_truth(document: Any, task: str, size: Size, labels: Sequence[str]) -> Truth:
    """Return a label from its JSON: a class, or a list of {"class", "box"}. Raises AgentError (`labelling.label`)."""
    if task == "classify":
        return check_class(document, labels)
    if not isinstance(document, list) or not all(
        isinstance(each, dict) and isinstance(each.get("box"), list) for each in document
    ):
        raise _refusal(
            "a label that is no list of boxes", '[{"class": 0, "box": [x1, y1, x2, y2]}]', "load the page again"
        )
    return check_boxes([(each.get("class"), each["box"]) for each in document], size, labels)


def is_same(first: Truth | None, second: Truth) -> bool:
    """Return whether two labels say the same; boxes may differ by what the store rounds."""
    if not isinstance(first, LabelledBoxes) or not isinstance(second, LabelledBoxes):
        return not isinstance(first, LabelledBoxes) and first == second
    if first.classes.tolist() != second.classes.tolist():
        return False
    return bool(np.allclose(first.boxes, second.boxes, rtol=0.0, atol=0.02))


def _is_number(value: Any) -> bool:
    """Return True for a finite number of a sane size; NaN is not at most anything."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= _FAR_PX


def _listed(labels: Sequence[str]) -> str:
    if not labels:
        return "its number, since the spec names none"
    return ", ".join([*labels[:_LISTED], *(["..."] if len(labels) > _LISTED else [])])


def _refusal(found: str, expected: str, remedy: str) -> AgentError:
    return AgentError("labelling.label", found, expected, remedy)
