"""Draw a check: the network's input beside its answer, and below it the answer under every other spec, in a grid."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap

import cv2
import numpy as np

from agent.common.errors import AgentError
from agent.inspection.check import Answered, Check, Row
from agent.vision.drawing import COLORS, Color, Picture, input_picture, scaled
from agent.vision.tasks.opening import open_task

_COLUMNS = 3
_TILE_PX, _TALLEST_PX = 480, 340  # width, and most height, of a tile's picture
_MARGIN_PX, _LINE_PX = 32, 26
_TITLE_PX = 64  # above a tile's picture: two lines
_PAPER, _MAT, _INK, _FAINT = (255, 255, 255), (240, 240, 240), (34, 34, 34), (120, 120, 120)
_FRAME, _BETTER = (205, 205, 205), (0, 94, 213)
_FONT = cv2.FONT_HERSHEY_SIMPLEX
_TEXT, _HEADING = 0.55, 0.9  # scales of OpenCV's font
_SUFFIXES = (".png", ".jpg", ".jpeg")
_CHANNELS = {"bgr": "B G R", "rgb": "R G B", "gray": "grey"}


@dataclass(frozen=True)
class _Tile:
    """A picture of at most _TILE_PX in width, below two lines of text; its frame is coloured if `stands_out`."""

    title: str
    note: str
    picture: Picture
    mat: Color = _MAT  # around the picture, where another one of its row is larger
    stands_out: bool = False


def check_output(path: Path) -> None:
    """Raises AgentError (`check.output`) for a picture that could not be written, before any work is done."""
    if path.suffix.lower() not in _SUFFIXES:
        expected, remedy = f"a name ending in {' or '.join(_SUFFIXES)}", "name another with -o"
        raise AgentError("check.output", f"picture {path}", expected, remedy)
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise _unwritable(f"{path}, which is a folder" if path.is_dir() else f"no folder {path.parent} to write to")


def draw_check(check: Check, path: Path) -> None:
    """Write the picture of a check, PNG or JPEG by its suffix. Raises AgentError (`check.output`)."""
    _, encoded = cv2.imencode(path.suffix.lower(), _sheet(check))
    try:
        path.write_bytes(encoded.tobytes())
    except OSError as error:
        raise _unwritable(f"{path}: {error.strerror}") from error


def _unwritable(found: str) -> AgentError:
    return AgentError("check.output", found, "a file name in a writable folder", "name another with -o")


def _sheet(check: Check) -> Picture:
    first, image = check.answers[0], check.written.input
    picture = input_picture(first.tensor, image)
    seen = f"{picture.shape[1]} x {picture.shape[0]}, {_CHANNELS[image.color]}"
    values = f"values {float(first.tensor.min()):.3g} to {float(first.tensor.max()):.3g}"
    tiles = [
        _Tile("what the network gets", f"{seen}, {values}", scaled(picture, _fit(picture))),
        _answer_tile(check, check.rows[0], first, "what it answers"),
        _Tile(check.rows[0].alternative.name, check.target.name, _facts(check), _PAPER),
    ]
    tiles += [
        _answer_tile(check, row, answer, row.alternative.name)
        for row, answer in zip(check.rows[1:], check.answers[1:], strict=True)
    ]
    width = _COLUMNS * (_TILE_PX + _MARGIN_PX) + _MARGIN_PX
    rows = [tiles[begin : begin + _COLUMNS] for begin in range(0, len(tiles), _COLUMNS)]
    return np.concatenate([_heading(check, width), *(_row(row, width) for row in rows)])


def _heading(check: Check, width: int) -> Picture:
    notes = [f"! {fault}" for fault in check.faults] + check.lines
    texts = [(check.verdict, _HEADING), *((note, _TEXT) for note in notes)]
    lines = [(line, size) for text, size in texts for line in _wrapped(text, width - 2 * _MARGIN_PX, size)]
    steps = [round(_LINE_PX * (1.5 if size == _HEADING else 1.0)) for _, size in lines]
    canvas = _blank(_MARGIN_PX + sum(steps), width)
    foot = _MARGIN_PX // 2
    for (line, size), step in zip(lines, steps, strict=True):
        foot += step
        _write(canvas, line, (_MARGIN_PX, foot), size, _INK)
    return canvas


def _row(tiles: Sequence[_Tile], width: int) -> Picture:
    """Return tiles side by side, their pictures in mats of one height."""
    height = max(tile.picture.shape[0] for tile in tiles)
    canvas = _blank(_TITLE_PX + height + _MARGIN_PX, width)
    for index, tile in enumerate(tiles):
        left, top = _MARGIN_PX + index * (_TILE_PX + _MARGIN_PX), _TITLE_PX
        _write(canvas, _cut(tile.title), (left, top - 36), _TEXT, _BETTER if tile.stands_out else _INK, bold=True)
        _write(canvas, _cut(tile.note), (left, top - 12), _TEXT, _BETTER if tile.stands_out else _FAINT)
        canvas[top : top + height, left : left + _TILE_PX] = tile.mat
        inner_height, inner_width = tile.picture.shape[:2]
        y, x = top + (height - inner_height) // 2, left + (_TILE_PX - inner_width) // 2
        canvas[y : y + inner_height, x : x + inner_width] = tile.picture
        color, thickness = (_BETTER, 3) if tile.stands_out else (_FRAME, 1)
        corner = left + _TILE_PX, top + height
        cv2.rectangle(canvas, (left - 1, top - 1), corner, color, thickness)
    return canvas


def _answer_tile(check: Check, row: Row, answer: Answered, title: str) -> _Tile:
    spec = row.alternative.spec
    picture = answer.prediction.drawn_into(check.frame, answer.geometry, spec, _fit(check.frame))
    if answer.classes:
        picture = _with_classes(scaled(check.frame, _fit(check.frame)), answer.classes)
    note = check.caption(row)
    if not check.is_compared:
        note = "not judged" if open_task(spec).can_be_drawn else "not drawn: raw outputs"
    return _Tile(title, note, picture, stands_out=row is check.surest and row is not check.rows[0])


def _with_classes(picture: Picture, classes: Sequence[tuple[str, float]]) -> Picture:
    """Return the picture above a bar for each class, as wide as it is probable."""
    bars = _blank(len(classes) * _LINE_PX + 8, picture.shape[1])
    for index, (label, probability) in enumerate(classes):
        top = 6 + index * _LINE_PX
        right = round(probability * (picture.shape[1] - 1))
        cv2.rectangle(bars, (0, top), (right, top + _LINE_PX - 6), COLORS[1], cv2.FILLED)
        _write(bars, _cut(f"{probability:.2f}  {label}"), (6, top + _LINE_PX - 11), 0.5, _INK)
    return np.concatenate([picture, bars])


def _facts(check: Check) -> Picture:
    """Return a panel of text: the spec's keys, and the ranges of the outputs for this frame."""
    spec, image = check.written, check.written.input
    lines = [f"task {spec.task}" + (f", decoder {spec.decoder}" if spec.decoder else "")]
    lines += [f"{key}: {_short(value)}" for key, value in image.model_dump(mode="json", exclude={"multiple"}).items()]
    finds_objects = open_task(spec).finds_objects
    if finds_objects:
        lines.append(f"score above {spec.score_threshold:g}, IoU {spec.iou_threshold:g}, nms {spec.suppression}")
    if spec.labels or not finds_objects:  # objects without names are counted by the boxes
        lines.append(f"answer: {check.answers[0].prediction.summary(spec)}")
    lines.append("")
    for name, shape, *figures in check.ranges:
        least, mean, largest = ("not finite" if figure is None else f"{figure:.4g}" for figure in figures)
        lines += [f"output {name}: {shape}", f"    {least} to {largest}, mean {mean}"]
    panel = _blank(len(lines) * _LINE_PX + 24, _TILE_PX)
    for index, line in enumerate(lines):
        _write(panel, _cut(line, 24), (12, 28 + index * _LINE_PX), _TEXT, _INK)
    return panel


def _short(value: object) -> str:
    values = value if isinstance(value, list) else [value]
    return ", ".join(f"{each:.5g}" if isinstance(each, float) else str(each) for each in values)


def _fit(picture: Picture) -> float:
    """Return by what a picture's sides are to be multiplied to fill a tile."""
    height, width = picture.shape[:2]
    return float(min(_TILE_PX / width, _TALLEST_PX / height))


def _wrapped(text: str, width_px: int, size: float) -> list[str]:
    (em_px, _), _ = cv2.getTextSize("n" * 100, _FONT, size, 1)
    return wrap(text, max(10, width_px * 100 // em_px))


def _cut(text: str, indent_px: int = 0) -> str:
    """Return as much of a line as a tile is wide."""
    while len(text) > 1 and cv2.getTextSize(text, _FONT, _TEXT, 1)[0][0] > _TILE_PX - indent_px:
        text = text[:-1]
    return text


def _write(canvas: Picture, text: str, foot: tuple[int, int], size: float, color: Color, *, bold: bool = False) -> None:
    thickness = 2 if bold or size == _HEADING else 1
    cv2.putText(canvas, text, foot, _FONT, size, color, thickness, cv2.LINE_AA)


def _blank(height: int, width: int) -> Picture:
    return np.full((height, width, 3), _PAPER, np.uint8)
