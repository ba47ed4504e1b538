"""Write the fleet's report as one HTML page, with its figures (bars, a histogram, a timeline) as SVG inside.

The page fetches nothing from anywhere.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from html import escape

from fleet.devices.devices import Device
from fleet.devices.facts import Fact, facts
from fleet.devices.records import AuditEntry, Refused
from fleet.rollout.register import Overview
from fleet.rollout.rows import count_words
from fleet.views.listing import ago, interval, tag_names, unread

_STATES = {
    "online": "#2a9d5c",
    "degraded": "#e0a100",
    "stopping": "#8a8a8a",
    "silent": "#b5179e",
    "offline": "#c1121f",
    "never told": "#bbbbbb",
}
_DRIFT = {"calm": "#2a9d5c", "warning": "#e0a100", "alarm": "#c1121f", "not known": "#bbbbbb"}
_BLUE = "#3a6ea5"
_STEPS = {
    "gate passed": "#2a9d5c",
    "COMPLETED": "#2a9d5c",
    "gate failed": "#c1121f",
    "ROLLED_BACK": "#c1121f",
    "aborted": "#e0a100",
    "ABORTED": "#e0a100",
    "paused": "#8a8a8a",
    "halted": "#c1121f",
}
_MOST_GROUPS, _MOST_WORST, _MOST_LANES, _MOST_REFUSED = 30, 20, 40, 20
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em;color-scheme:light dark}"
    "svg{display:block;margin:.5em 0;max-width:100%;height:auto}"
    "svg text{font:12px system-ui,sans-serif;fill:currentColor}"
    "table{border-collapse:collapse}td,th{text-align:left;padding:.1em 1em .1em 0;vertical-align:top}"
)
_WIDTH_PX, _ROW_PX, _NAME_PX, _COUNT_PX = 720, 24, 180, 60
_PLOT_PX = _WIDTH_PX - _NAME_PX - _COUNT_PX
_HEIGHT_PX = 160


def page(
    fleet: str,
    devices: Sequence[Device],
    rollouts: Sequence[Overview],
    records: Sequence[AuditEntry],
    refused: Sequence[Refused],
    silent_s: float,
) -> str:
    """Return the whole page.

    Args:
        records: The oldest first; those of the rollouts are drawn.
        silent_s: As in `facts`.
    """
    now = time.time()
    known = [facts(each, now, silent_s) for each in devices]
    sections = {
        "State": _states(devices, known),
        "Fidelity": _fidelity(known),
        "Drift by group": _drift(devices, known),
        "Rollouts": _rollouts(rollouts, records),
        "Quarantine": _refused(refused),
    }
    title = f"Fleet {escape(fleet)}: {len(devices)} devices"
    made = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(now))
    body = "".join(f"<h2>{name}</h2>{''.join(parts)}" for name, parts in sections.items())
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
        f"<h1>{title}</h1><p>As of {made}, by what they last reported.</p>{body}</html>\n"
    )


def _states(devices: Sequence[Device], known: Sequence[Mapping[str, Fact]]) -> Iterator[str]:
    counts = Counter(str(fact["state"] or "never told") for fact in known)
    yield stacked_bars({state: {state: counts[state]} for state in _STATES if counts[state]}, _STATES)
    versions = Counter(str(fact["agent"] or "not told") for fact in known)
    yield _table(["tared", "devices"], [(version, str(count)) for version, count in versions.most_common()])
    if words := unread(devices):
        yield f"<p>{escape(words)}.</p>"


def _fidelity(known: Sequence[Mapping[str, Fact]]) -> Iterator[str]:
    """Draw the lower ends of the intervals: the least fidelity of each engine, with 95 % confidence."""
    measured = [fact for fact in known if isinstance(fact["fidelity_low"], float)]
    if not measured:
        yield "<p>Nobody has told it yet.</p>"
        return
    lows = sorted(measured, key=lambda fact: float(fact["fidelity_low"] or 0.0))
    yield f"<p>Lower end of the 95 % interval, of {len(measured)} of {len(known)} devices.</p>"
    yield histogram([float(fact["fidelity_low"] or 0.0) for fact in lows], 0.0, 1.0, 20, _BLUE)
    rows = [(str(fact["name"]), interval(dict(fact)), _gain(fact), ago(fact["seen_s"])) for fact in lows[:_MOST_WORST]]
    yield _table(["lowest", "fidelity", "predicted gain", "seen"], rows)


def _drift(devices: Sequence[Device], known: Sequence[Mapping[str, Fact]]) -> Iterator[str]:
    """Draw the drift states by tag; devices without a tag form a group of their own."""
    groups: dict[str, Counter[str]] = defaultdict(Counter)
    for device, fact in zip(devices, known, strict=True):
        for name in tag_names(device) or ["without a tag"]:
            groups[name][str(fact["drift"] or "not known")] += 1
    largest = sorted(groups, key=lambda name: (-sum(groups[name].values()), name))
    yield stacked_bars({name: groups[name] for name in largest[:_MOST_GROUPS]}, _DRIFT)
    if (more := len(largest) - _MOST_GROUPS) > 0:
        yield f"<p>And {more} smaller groups.</p>"
    legend = " ".join(f'<span style="color:{colour}">&#9632;</span> {name}' for name, colour in _DRIFT.items())
    yield f"<p>{legend}</p>"


def _rollouts(rollouts: Sequence[Overview], records: Sequence[AuditEntry]) -> Iterator[str]:
    """Draw what was done to each rollout, and when; list the states of its waves."""
    lanes: dict[str, list[tuple[float, str, str]]] = defaultdict(list)
    known = {each.rollout.id for each in rollouts}
    for record in records:
        if record.subject in known:
            when = time.strftime("%m-%d %H:%M:%S", time.gmtime(record.at))
            words = f"{when} {record.what}, by {record.who}" + (f": {record.why}" if record.why else "")
            lanes[record.subject].append((record.at, _STEPS.get(record.what.partition(",")[0], _BLUE), words))
    if not lanes:
        yield "<p>None so far.</p>"
        return
    yield timeline(dict(list(lanes.items())[-_MOST_LANES:]))
    rows = []
    for overview in rollouts[:_MOST_LANES]:
        waves = [f"{wave + 1}: {count_words([counts])}" for wave, counts in sorted(overview.counts.items())]
        rollout = overview.rollout
        rows.append((rollout.id, rollout.op, rollout.state.value, "; ".join(waves)))
    yield _table(["rollout", "op", "state", "boards by wave"], rows)


def _refused(refused: Sequence[Refused]) -> Iterator[str]:
    if not refused:
        yield "<p>Empty.</p>"
        return
    rows = [(f"{each.fleet}/{each.device}", each.topic, each.found) for each in refused[:_MOST_REFUSED]]
    yield _table(["device", "topic", "found, the newest first"], rows)


def _gain(fact: Mapping[str, Fact]) -> str:
    return f"{fact['gain_db']:.1f} dB" if isinstance(fact["gain_db"], float) else ""


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(each)}</th>" for each in heads)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def stacked_bars(rows: Mapping[str, Mapping[str, int]], colours: Mapping[str, str]) -> str:
    """Draw a bar for each row, of parts in the order of `colours`; its name on the left, its total on the right."""
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
    """Draw how many values lie in each of `bins` equal steps from `low` to `high`; values outside count at the ends."""
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
    """Draw a lane for each name, and on it marks: (Unix time in s, colour, text)."""
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
    """Return a text that is shown when the mouse rests on the shape."""
    return f"<title>{escape(words)}</title>"
