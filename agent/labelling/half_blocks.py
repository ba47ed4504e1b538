"""Draw a frame in a terminal: two pixels a character, numbered boxes, and rulers in frame pixels."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from rich.color import Color
from rich.console import Console, ConsoleOptions
from rich.segment import Segment
from rich.style import Style

from agent.vision.detections import LabelledBoxes
from agent.vision.drawing import COLORS, Picture, scaled

_MARGIN = 6  # columns: the ruler on the left
_LEAST_COLUMNS = 20
_TICK_COLUMNS, _TICK_ROWS = 10, 4
_MOST_SCALE = 8.0  # of a small picture
_UPPER_HALF = "\u2580"
_FAINT = Style(dim=True)


class TerminalPicture:
    """A picture for a console of rich, which chooses the colours that its terminal has."""

    def __init__(self, image: Picture, boxes: LabelledBoxes, columns: int, rows: int) -> None:
        """Fit into columns and rows of characters. boxes: in pixels of the image; each is numbered, from 1."""
        height, width = image.shape[:2]
        scale = min((max(columns, _LEAST_COLUMNS) - _MARGIN) / width, 2 * (rows - 1) / height, _MOST_SCALE)
        self._scale = float(scale)
        self._pixels = scaled(image, scale)
        if self._pixels.shape[0] % 2:  # a character has two rows of pixels
            self._pixels = np.concatenate([self._pixels, self._pixels[-1:]])
        self._marks: dict[tuple[int, int], tuple[str, Style]] = {}  # characters in place of pixels, by row and column
        for number, box in enumerate(boxes.boxes.tolist(), 1):
            self._draw(number, box)

    def _draw(self, number: int, box: list[float]) -> None:
        rows, columns = self._pixels.shape[:2]
        limits = (columns, rows, columns, rows)
        pairs = zip(box, limits, strict=True)
        left, top, right, bottom = (min(max(round(value * self._scale), 0), most - 1) for value, most in pairs)
        color = COLORS[(number - 1) % len(COLORS)]
        self._pixels[[top, bottom], left : right + 1] = color
        self._pixels[top : bottom + 1, [left, right]] = color
        style = Style(color="black", bgcolor=_color(color), bold=True)
        for offset, digit in enumerate(str(number)):
            self._marks[top // 2, min(left + offset, columns - 1)] = digit, style

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        columns = self._pixels.shape[1]
        ticks = range(0, max(1, columns - 4), _TICK_COLUMNS)
        yield Segment(" " * _MARGIN + "".join(f"{self._pixel(tick):<{_TICK_COLUMNS}}" for tick in ticks), _FAINT)
        yield Segment.line()
        pairs = self._pixels.reshape(-1, 2, columns, 3)
        for row, (upper, lower) in enumerate(zip(pairs[:, 0].tolist(), pairs[:, 1].tolist(), strict=True)):
            tick = str(self._pixel(2 * row)) if row % _TICK_ROWS == 0 else ""
            yield Segment(f"{tick:>{_MARGIN - 1}} ", _FAINT)
            for column in range(columns):
                text, style = self._marks.get((row, column), ("", _FAINT))
                if not text:
                    text, style = _UPPER_HALF, Style(color=_color(upper[column]), bgcolor=_color(lower[column]))
                yield Segment(text, style)
            yield Segment.line()

    def _pixel(self, place: int) -> int:
        """Return the frame's pixel at a pixel of the terminal."""
        return round(place / self._scale)


def _color(bgr: tuple[int, ...]) -> Color:
    blue, green, red = bgr
    return Color.from_rgb(red, green, blue)
