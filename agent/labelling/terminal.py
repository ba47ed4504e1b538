"""Label frames in a terminal, for boards that only a shell reaches: a picture, then one line of input."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

import numpy as np
from rich.console import Console

from agent.camera.images import decode_image
from agent.common.errors import AgentError
from agent.labelling.half_blocks import TerminalPicture
from agent.labelling.progress import LabelProgress
from agent.labelling.store import DrawnFrame, LabelStore, Truth
from agent.labelling.truth import check_boxes, class_name, parse_class
from agent.vision.detections import NO_BOXES, Detections, LabelledBoxes, iou_matrix

_SAME_IOU = 0.5  # of two boxes of one class: both engines see one object
_ROOM_ROWS = 8  # of the terminal, for text below the picture
_LEAST_ROWS = 8
_MOST_NAMES = 40  # that are listed at the start
_ADDED = re.compile(r"(.+?)((?:\s+-?\d+(?:\.\d+)?){4})")
_CLASSIFY_HELP = "a class by name or number; s skips what cannot be decided, b goes back, q ends"
_DETECT_HELP = (
    "the numbers of all boxes that are right, and those that are missing: 1 3 +{name} 10 20 110 220 (x1 y1 x2 y2); "
    "0 if nothing is there; s skips what cannot be decided, b goes back, q ends"
)


class LabelTerminal:
    """Shows frames that wait, and stores what is typed."""

    def __init__(self, store: LabelStore, labels: Sequence[str], console: Console) -> None:
        self._store, self._labels, self._console = store, labels, console

    def run(self) -> None:
        """Ask until no frame waits, `q`, or the end of the input. Raises AgentError where the store fails."""
        self._explain()
        number: int | None = None
        while (frame := self._frame(number)) is not None:
            candidates = self._show(frame)
            reply = self._ask(frame, candidates)
            if reply == "q":
                return
            number = self._before(frame) if reply == "b" else None
        self._say("every drawn frame has a label or was skipped")

    def _explain(self) -> None:
        is_detector = self._store.task == "detect"
        self._say(_DETECT_HELP.format(name=class_name(0, self._labels)) if is_detector else _CLASSIFY_HELP)
        names = [f"{number} {label}" for number, label in enumerate(self._labels[:_MOST_NAMES])]
        more = [f"and {len(self._labels) - _MOST_NAMES} more"] if len(self._labels) > _MOST_NAMES else []
        if names:
            self._say(f"classes: {', '.join([*names, *more])}")

    def _frame(self, number: int | None) -> DrawnFrame | None:
        """Return the frame of this number, or the oldest that waits."""
        frames = self._store.frames()
        return next((each for each in frames if (each.is_waiting if number is None else each.id == number)), None)

    def _before(self, frame: DrawnFrame) -> int | None:
        before = [each.id for each in self._store.frames() if each.id < frame.id]
        if not before:
            self._say("this is the first frame")
        return before[-1] if before else frame.id

    def _show(self, frame: DrawnFrame) -> LabelledBoxes:
        """Show a frame with the boxes of both engines; return those."""
        progress = LabelProgress.count(self._store.frames())
        self._say("")
        candidates = _candidates(frame)
        try:
            image = decode_image(self._store.picture(frame.id))
            trouble = "the picture of this frame is damaged" if image is None else ""
        except AgentError as error:
            image, trouble = None, error.found
        if trouble:
            self._say(f"{trouble}; s skips the frame")
        if image is not None and self._console.color_system is not None:
            rows = max(_LEAST_ROWS, self._console.height - _ROOM_ROWS)
            self._console.print(TerminalPicture(image, candidates, self._console.width, rows), end="")
        done = f"{progress.drawn - progress.waiting} of {progress.drawn}"
        self._say(f"{done}: frame {frame.id}, camera {frame.camera}, {frame.width} x {frame.height} pixels")
        for number, (box, class_id) in enumerate(_rows(candidates), 1):
            self._say(f"  {number} {class_name(class_id, self._labels)} {' '.join(f'{value:.0f}' for value in box)}")
        if not frame.is_waiting:
            self._say(f"so far: {self._shown_label(frame)}")
        return candidates

    def _shown_label(self, frame: DrawnFrame) -> str:
        if isinstance(frame.label, LabelledBoxes):
            rows = (
                f"{class_name(number, self._labels)} {' '.join(f'{x:.0f}' for x in box)}"
                for box, number in _rows(frame.label)
            )
            return ", ".join(rows) or "nothing there"
        return class_name(frame.label, self._labels) if frame.label is not None else "skipped"

    def _ask(self, frame: DrawnFrame, candidates: LabelledBoxes) -> str:
        """Read lines until one can be carried out; return it. The end of the input is `q`."""
        while True:
            self._console.print("> ", end="")
            line = sys.stdin.readline()
            reply = line.strip()
            if not line:
                self._say("")  # ends the line of the prompt
                return "q"
            if reply in ("q", "b"):
                return reply
            try:
                if reply == "s":
                    self._store.skip(frame.id)
                else:
                    self._store.label(frame.id, self._truth(reply, frame, candidates), _is_suggested(frame))
            except AgentError as error:
                if error.code != "labelling.label":
                    raise
                self._say(f"{error.found}; expected {error.expected}; {error.remedy}")
                continue
            return reply

    def _truth(self, reply: str, frame: DrawnFrame, candidates: LabelledBoxes) -> Truth:
        if self._store.task == "classify":
            return parse_class(reply, self._labels)
        return parse_boxes(reply, candidates, (frame.height, frame.width), self._labels)

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def parse_boxes(reply: str, candidates: LabelledBoxes, size: tuple[int, int], labels: Sequence[str]) -> LabelledBoxes:
    """Return the boxes that a line names: numbers of candidates, and `+CLASS x1 y1 x2 y2` for others.

    >>> found = LabelledBoxes(boxes=np.array([[0, 0, 9, 9], [5, 5, 8, 8]], np.float32), classes=np.array([0, 1]))
    >>> parse_boxes("2 +traffic light 1 1 4 8", found, (10, 10), ["car", "traffic light"]).boxes.tolist()
    [[5.0, 5.0, 8.0, 8.0], [1.0, 1.0, 4.0, 8.0]]

    Raises AgentError (`labelling.label`).
    """
    chosen, *added = re.split(r"(?:^|\s)\+", reply)
    words = chosen.replace(",", " ").split()
    if words == ["0"] and not added:
        return NO_BOXES
    numbers = [int(word) if word.isascii() and word.isdecimal() and len(word) < 6 else 0 for word in words]
    if not (words or added) or not all(0 < number <= len(candidates) for number in numbers):
        known = f"numbers from 1 to {len(candidates)}, or " if len(candidates) else ""
        expected = f"{known}+CLASS x1 y1 x2 y2, or 0 alone for nothing"
        raise AgentError("labelling.label", f"'{reply}'", expected, "type it again")
    of_candidates = [*_rows(candidates)]
    rows = [(of_candidates[number - 1][1], of_candidates[number - 1][0]) for number in dict.fromkeys(numbers)]
    for text in added:
        found = _ADDED.fullmatch(text.strip())
        if found is None:
            raise AgentError("labelling.label", f"'+{text}'", "+CLASS x1 y1 x2 y2 in frame pixels", "type it again")
        rows.append((parse_class(found[1], labels), [float(value) for value in found[2].split()]))
    return check_boxes(rows, size, labels)


def _candidates(frame: DrawnFrame) -> LabelledBoxes:
    """Return the boxes of both engines: the reference's, and those of the served answer that it lacks."""
    reference, served = frame.reference, frame.served
    if not isinstance(reference, Detections) or not isinstance(served, Detections):
        return NO_BOXES
    overlaps = iou_matrix(served.boxes, reference.boxes)
    same_class = served.classes[:, np.newaxis] == reference.classes[np.newaxis]
    lacking = ~((overlaps >= _SAME_IOU) & same_class).any(axis=1)
    return LabelledBoxes(
        boxes=np.concatenate([reference.boxes, served.boxes[lacking]]),
        classes=np.concatenate([reference.classes, served.classes[lacking]]),
    )


def _rows(boxes: LabelledBoxes) -> list[tuple[list[float], int]]:
    return [*zip(boxes.boxes.tolist(), boxes.classes.tolist(), strict=True)]


def _is_suggested(frame: DrawnFrame) -> bool:
    """Return True for a detector: its boxes were shown. A classifier's answer is not."""
    return isinstance(frame.reference, Detections)
