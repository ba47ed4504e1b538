"""Draw charts as SVG, on the machine that makes the page.

A chart has its colours by class (`c0` to `c7`, `good`, `warning`, `bad`, `idle`). The page's style has them, for light,
for dark and for paper. The meaning of a mark stands in its `<title>`, which browsers show and screen readers read. No
chart needs a script, or a style of its own, so that pages can forbid both.

Sizes are in units of the drawing, which the page scales.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from markupsafe import Markup, escape

from agent.common.html.text import visible

WIDTH, HEIGHT = 560, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 24, 34
_PLOT_WIDTH, _PLOT_HEIGHT = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM
_ROW, _NAMES, _COUNTS = 24, 150, 44  # layout of charts with a row for each name, in pixels
_DOT = 4
_TICKS = 5
_LEAST_SPAN = 1e-300  # an axis spans more than this; a fifth of less may be no float above 0
_NAME_CHARACTERS = 18  # as many as fit, in the larger letters of a telephone
_TIME_STEPS_S = (1, 5, 15, 60, 300, 900, 3600, 3 * 3600, 6 * 3600, 12 * 3600, 86400, 2 * 86400, 7 * 86400, 14 * 86400)

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """A line through points (x, y) in the order of x. band: (x, low, high), an interval around it."""

    name: str
    points: Sequence[Point]
    color: str = "c0"
    band: Sequence[tuple[float, float, float]] = ()


@dataclass(frozen=True)
class Mark:
    """Something at a place x, or at a height y where `across` is True: an event, or a limit."""

    at: float
    text: str
    color: str = "idle"
    across: bool = False


@dataclass(frozen=True)
class Axis:
    """A chart's axis: linear, logarithmic or a time.

    times: x is Unix time in s, or, from less than a year on, time since a beginning.
    """

    title: str = ""
    low: float | None = None
    high: float | None = None
    logarithmic: bool = False
    times: bool = False


@dataclass(frozen=True)
class _Scale:
    """Takes a value to its place in the drawing."""

    axis: Axis
    low: float
    high: float
    begin: float
    end: float

    @classmethod
    def spanning(cls, axis: Axis, values: Iterable[float], begin: float, end: float) -> _Scale:
        """Span the values, and whatever the axis says; a span of nothing is widened."""
        seen = [value for value in values if math.isfinite(value) and (value > 0.0 or not axis.logarithmic)]
        low = axis.low if axis.low is not None else min(seen, default=0.0)
        high = axis.high if axis.high is not None else max(seen, default=1.0)
        if high - low < _LEAST_SPAN:
            low, high = (low / 2.0, low * 2.0) if axis.logarithmic and low > 0.0 else (low - 0.5, low + 0.5)
        return cls(axis, low, high, begin, end)

    def __call__(self, value: float) -> float:
        if self.axis.logarithmic:
            value, low, high = (math.log10(max(each, 1e-300)) for each in (value, self.low, self.high))
        else:
            low, high = self.low, self.high
        share = min(max((value - low) / (high - low), 0.0), 1.0)
        return self.begin + share * (self.end - self.begin)

    def ticks(self) -> list[tuple[float, str]]:
        """Return the values at which the axis is marked, each with its text."""
        if self.axis.times:
            return _time_ticks(self.low, self.high)
        if self.axis.logarithmic:
            return _log_ticks(self.low, self.high)
        step = _round_step((self.high - self.low) / _TICKS)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        digits = max(0, -math.floor(math.log10(step) + 1e-9))
        return [(number * step, f"{number * step:.{digits}f}") for number in range(first, last + 1)]


def _round_step(step: float) -> float:
    """Return the next of 1, 2, 5, 10, ... times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(each * power for each in (1.0, 2.0, 5.0, 10.0) if each * power >= step * (1.0 - 1e-9))


def _log_ticks(low: float, high: float) -> list[tuple[float, str]]:
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    every = max(1, (last - first + 1) // _TICKS)
    ticks = [10.0**power for power in range(first, last + 1, every)]
    ticks = ticks if len(ticks) > 1 else [low, math.sqrt(low * high), high]
    return [(value, _short(value)) for value in ticks]


def _short(value: float) -> str:
    """Show a number with a thousand as k and a million as M."""
    for factor, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.3g} {unit}"
    return f"{value:.3g}"


def _time_ticks(low: float, high: float) -> list[tuple[float, str]]:
    step = next((each for each in _TIME_STEPS_S if (high - low) / each <= _TICKS), _TIME_STEPS_S[-1])
    is_date = low > 365 * 86400  # else seconds of a recording
    ticks = []
    for number in range(math.ceil(low / step), math.floor(high / step) + 1):
        at = number * step
        if not is_date:
            ticks.append((float(at), f"{at // 60}:{at % 60:02d}" if high > 120 else f"{at} s"))
        else:
            form = "%m-%d" if step >= 86400 else "%H:%M" if step >= 60 else "%H:%M:%S"
            ticks.append((float(at), time.strftime(form, time.gmtime(at))))
    return ticks


@dataclass
class _Plot:
    """A chart in the making: a frame with two axes, and shapes on it."""

    title: str
    x: _Scale
    y: _Scale
    shapes: list[Markup] = field(default_factory=list)

    @classmethod
    def spanning(cls, title: str, x: Axis, xs: Iterable[float], y: Axis, ys: Iterable[float]) -> _Plot:
        """Begin a chart whose axes span these values, and draw them."""
        plot = cls(title, _Scale.spanning(x, xs, _LEFT, WIDTH - _RIGHT), _Scale.spanning(y, ys, HEIGHT - _BOTTOM, _TOP))
        plot._draw_axes()
        return plot

    def _draw_axes(self) -> None:
        bottom, right = HEIGHT - _BOTTOM, WIDTH - _RIGHT
        for value, words in self.y.ticks():
            height = self.y(value)
            self.shapes.append(_line(_LEFT, height, right, height, "grid"))
            self.shapes.append(_text(_LEFT - 6, height + 4, words, "end axis"))
        for value, words in self.x.ticks():
            left = self.x(value)
            self.shapes.append(_line(left, bottom, left, bottom + 4, "rule"))
            self.shapes.append(_text(left, bottom + 16, words, "middle axis"))
        self.shapes.append(_line(_LEFT, bottom, right, bottom, "rule"))
        self.shapes.append(_text(right, HEIGHT - 4, self.x.axis.title, "end axis"))
        self.shapes.append(_text(4, 11, self.y.axis.title, "axis"))

    def draw_marks(self, marks: Sequence[Mark]) -> None:
        for mark in marks:
            x, y = self.x(mark.at), self.y(mark.at)
            x1, y1, x2, y2 = (_LEFT, y, WIDTH - _RIGHT, y) if mark.across else (x, _TOP, x, HEIGHT - _BOTTOM)
            self.shapes.append(_line(x1, y1, x2, y2, f"mark {mark.color}", mark.text))

    def markup(self) -> Markup:
        return _svg(self.shapes, HEIGHT, self.title)


def line_chart(
    series: Sequence[Series], x: Axis, y: Axis, title: str, marks: Sequence[Mark] = (), dots: bool = False
) -> Markup:
    """Draw lines over x. dots: each point is marked, with its values as text.

    >>> chart = line_chart([Series("fidelity", [(0.0, 1.0), (60.0, 0.4)])], Axis(times=True), Axis("", 0, 1), "night")
    >>> chart.startswith("<svg") and "fidelity" in chart
    True
    """
    xs = [at for each in series for at, _ in each.points] + [mark.at for mark in marks if not mark.across]
    ys = [value for each in series for _, value in each.points]
    ys += [end for each in series for _, *ends in each.band for end in ends]
    ys += [mark.at for mark in marks if mark.across]
    plot = _Plot.spanning(title, x, xs, y, ys)
    plot.draw_marks(marks)
    for each in series:
        if each.band:
            outline = [(at, high) for at, _, high in each.band] + [(at, low) for at, low, _ in reversed(each.band)]
            plot.shapes.append(_path(f"{_through(plot, outline)}Z", f"band {each.color}", each.name))
        if each.points:
            plot.shapes.append(_path(_through(plot, each.points), f"line {each.color}", each.name))
        for at, value in each.points if dots or len(each.points) == 1 else ():
            plot.shapes.append(_dot(plot.x(at), plot.y(value), each.color, f"{each.name}: {value:.4g}"))
    return plot.markup()


def _through(plot: _Plot, points: Sequence[Point]) -> str:
    return "M" + "L".join(f"{plot.x(at):.1f} {plot.y(value):.1f}" for at, value in points)


def histogram_chart(
    edges: Sequence[float], counts: Sequence[float], x: Axis, title: str, marks: Sequence[Mark] = ()
) -> Markup:
    """Draw counts between edges, of which there is one more.

    Heights are logarithmic where counts differ a thousandfold. Bins without a count are left out.
    """
    most = max(counts, default=0.0)
    least = min((count for count in counts if count > 0.0), default=1.0)
    y = Axis("count", least / 2.0, most, logarithmic=True) if most > 1000.0 * least else Axis("count", 0.0, most or 1.0)
    plot = _Plot.spanning(title, x, edges, y, counts)
    bottom = HEIGHT - _BOTTOM
    bars = []
    for low, high, count in zip(edges, edges[1:], counts, strict=False):
        if count > 0.0:
            left, width = plot.x(low), max(plot.x(high) - plot.x(low), 0.5)
            bars.append(f"M{left:.1f} {bottom}V{plot.y(count):.1f}h{width:.1f}V{bottom}")
    plot.shapes.append(_path("".join(bars), "bars c0", title))
    plot.draw_marks(marks)
    return plot.markup()


def scatter_chart(
    points: Sequence[tuple[float, float, str, str]], x: Axis, y: Axis, title: str, marks: Sequence[Mark] = ()
) -> Markup:
    """Draw points (x, y, colour, text)."""
    xs, ys = [across for across, *_ in points], [up for _, up, *_ in points]
    ys += [mark.at for mark in marks if mark.across]
    plot = _Plot.spanning(title, x, xs, y, ys)
    plot.draw_marks(marks)
    for across, up, color, words in points:
        plot.shapes.append(_dot(plot.x(across), plot.y(up), color, words))
    return plot.markup()


def stacked_bars(rows: Mapping[str, Mapping[str, int]], colors: Mapping[str, str], title: str) -> Markup:
    """Draw a bar for each row, of parts in the order of `colors`; its name on the left, its total on the right."""
    most = max((sum(parts.values()) for parts in rows.values()), default=0) or 1
    shapes = []
    for number, (name, parts) in enumerate(rows.items()):
        top, left = number * _ROW, float(_NAMES)
        shapes.append(_text(0, top + 16, visible(name, _NAME_CHARACTERS), "name"))
        for part, color in colors.items():
            if count := parts.get(part, 0):
                width = (WIDTH - _NAMES - _COUNTS) * count / most
                shapes.append(_bar(left, top + 4, width, 16, color, f"{visible(name)}: {count} {part}"))
                left += width
        shapes.append(_text(left + 6, top + 16, str(sum(parts.values())), "axis"))
    return _svg(shapes, len(rows) * _ROW, title)


def timeline(lanes: Mapping[str, Sequence[tuple[float, str, str]]], title: str) -> Markup:
    """Draw a lane for each name, and on it marks: (Unix time in s, colour, text); below, the axis of time."""
    times = [at for marks in lanes.values() for at, _, _ in marks]
    scale = _Scale.spanning(Axis(times=True), times, _NAMES + 8, WIDTH - 12)
    foot = len(lanes) * _ROW
    shapes = [_line(scale(at), 0, scale(at), foot, "grid") for at, _ in scale.ticks()]
    for number, (name, marks) in enumerate(lanes.items()):
        middle = number * _ROW + 12
        shapes.append(_text(0, middle + 4, visible(name, _NAME_CHARACTERS), "name"))
        shapes.append(_line(_NAMES, middle, WIDTH, middle, "rule"))
        shapes += [_dot(scale(at), middle, color, words) for at, color, words in marks]
    shapes += [_text(scale(at), foot + 14, words, "middle axis") for at, words in scale.ticks()]
    return _svg(shapes, foot + 20, title)


def strip(cells: Sequence[tuple[float, float, str, str]], title: str, height: int = 72) -> Markup:
    """Draw cells side by side: (width, share of the height in [0, 1], colour, text), the first on the left.

    A cell stands on the foot. Of no height, it is a mark on it all the same.
    """
    total = sum(width for width, *_ in cells) or 1.0
    shapes, left = [], 0.0
    for width, share, color, words in cells:
        wide = WIDTH * width / total
        tall = max(3.0, height * min(max(share, 0.0), 1.0))
        shapes.append(_bar(left, height - tall, max(wide - 0.5, 0.4), tall, color, words))
        left += wide
    return _svg([*shapes, _line(0, height, WIDTH, height, "rule")], height + 1, title)


def _svg(shapes: Sequence[Markup], height: float, title: str) -> Markup:
    return Markup('<svg class="chart" tabindex="0" viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>').format(
        WIDTH, height, visible(title), Markup("").join(shapes)
    )


def _path(steps: str, kind: str, words: str) -> Markup:
    return _shape("path", Markup('class="{}" d="{}"').format(kind, steps), words)


def _line(x1: float, y1: float, x2: float, y2: float, kind: str, words: str = "") -> Markup:
    return _path(f"M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}", kind, words)


def _bar(left: float, top: float, width: float, height: float, color: str, words: str) -> Markup:
    place = Markup('class="bar {}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"')
    return _shape("rect", place.format(color, left, top, width, height), words)


def _dot(left: float, top: float, color: str, words: str) -> Markup:
    place = Markup('class="dot {}" cx="{:.1f}" cy="{:.1f}" r="{}"').format(color, left, top, _DOT)
    return _shape("circle", place, words)


def _shape(tag: str, attributes: Markup, words: str) -> Markup:
    """Return an element; its text is shown where the mouse rests on it."""
    title = Markup("<title>{}</title>").format(visible(words)) if words else Markup("")
    return Markup("<{0} {1}>{2}</{0}>").format(tag, attributes, title)


def _text(left: float, base: float, words: str, kind: str) -> Markup:
    return Markup('<text class="{}" x="{:.1f}" y="{:.1f}">{}</text>').format(kind, left, base, escape(words))
