"""Figures as SVG, to stand inside a page: bars, a histogram, a timeline. Nothing in them is fetched from anywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

_WIDTH_PX, _ROW_PX, _NAME_PX, _COUNT_PX = 720, 24, 180, 60
_PLOT_PX = _WIDTH_PX - _NAME_PX - _COUNT_PX
_HEIGHT_PX = 160


def stacked_bars(rows: Mapping[str, Mapping[str, int]], colours: Mapping[str, str]) -> str:
    """A bar for each row, of pieces in the order of their colours; its name on the left, its total on the right."""
    most = max((sum(parts.values()) for parts in rows.values()), default=0) or 1
    shapes = []
    for number, (name, parts) in enumerate(rows.items()):
        top, left = number * _ROW_PX, float(_NAME_PX)
        shapes.append(_text(0, top + 16, name))
        for part, colour in colours.items():
            if count := parts.get(part, 0):
                width = _PLOT_PX * count / most
                shapes.append(_bar(left, top + 4, width, 16, colour, f"{name}: {count} {part}"))
                left += width
        shapes.append(_text(left + 6, top + 16, str(sum(parts.values()))))
    return _figure(shapes, len(rows) * _ROW_PX)


def histogram(values: Sequence[float], low: float, high: float, bins: int, colour: str) -> str:
    """How many of the values lie in each of so many equal steps from `low` to `high`; others count at its ends."""
    counts = [0] * bins
    for value in values:
        share = min(max((value - low) / (high - low), 0.0), 1.0)
        counts[min(int(share * bins), bins - 1)] += 1
    most, width, step = max(counts) or 1, _WIDTH_PX / bins, (high - low) / bins
    shapes = []
    for number, count in enumerate(counts):
        height = (_HEIGHT_PX - 20) * count / most
        words = f"{count} from {low + number * step:.2f} to {low + (number + 1) * step:.2f}"
        shapes.append(_bar(number * width, _HEIGHT_PX - 20 - height, width - 1, height, colour, words))
    ticks = range(0, bins + 1, max(bins // 10, 1))
    shapes += [_text(min(tick * width, _WIDTH_PX - 30), _HEIGHT_PX - 4, f"{low + tick * step:.2g}") for tick in ticks]
    return _figure(shapes, _HEIGHT_PX)


def timeline(lanes: Mapping[str, Sequence[tuple[float, str, str]]]) -> str:
    """A lane for each name, a mark for each of its moments: Unix time in s, its colour, and what there is to say."""
    times = [at for marks in lanes.values() for at, _, _ in marks]
    begin, end = min(times), max(times)
    scale = (_WIDTH_PX - _NAME_PX - 12) / ((end - begin) or 1.0)
    shapes = []
    for number, (name, marks) in enumerate(lanes.items()):
        middle = number * _ROW_PX + 12
        shapes.append(_text(0, middle + 4, name))
        shapes.append(f'<path d="M{_NAME_PX} {middle}H{_WIDTH_PX}" stroke="#8884"/>')
        for at, colour, words in marks:
            left = _NAME_PX + 6 + (at - begin) * scale
            shapes.append(f'<circle cx="{left:.1f}" cy="{middle}" r="5" fill="{colour}">{_title(words)}</circle>')
    return _figure(shapes, len(lanes) * _ROW_PX)


def _figure(shapes: Sequence[str], height: int) -> str:
    return f'<svg viewBox="0 0 {_WIDTH_PX} {height}" width="{_WIDTH_PX}" height="{height}">{"".join(shapes)}</svg>'


def _bar(left: float, top: float, width: float, height: float, colour: str, words: str) -> str:
    place = f'x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect {place} fill="{colour}">{_title(words)}</rect>'


def _text(left: float, base: float, words: str) -> str:
    return f'<text x="{left:.1f}" y="{base:.1f}">{escape(words[:40])}</text>'


def _title(words: str) -> str:
    """What a mouse that rests there shows."""
    return f"<title>{escape(words)}</title>"
