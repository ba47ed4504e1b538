"""Draw how a fleet is, for its report and its pages: states, versions, engines, fidelity, drift, and thirty days."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from agent.common.html.charts import Axis, Series, histogram_chart, line_chart, stacked_bars
from agent.common.html.pages import Figure, Section, Table
from fleet.devices.devices import Device
from fleet.devices.facts import Fact, facts
from fleet.devices.records import AuditEntry
from fleet.devices.trends import Day
from fleet.views.words import ago, gain, interval, tag_names, unread

STATE_COLORS = {
    "online": "good",
    "degraded": "warning",
    "stopping": "idle",
    "silent": "c3",
    "offline": "bad",
    "never heard": "c7",
}
DRIFT_COLORS = {"calm": "good", "warning": "warning", "alarm": "bad", "not known": "idle"}
_STEPS = {
    "gate passed": "good",
    "COMPLETED": "good",
    "gate failed": "bad",
    "ROLLED_BACK": "bad",
    "aborted": "warning",
    "ABORTED": "warning",
    "paused": "idle",
    "halted": "bad",
}
_EVENTS = {"alarm": "bad", "swap": "c2", "rollback": "c3", "error": "warning"}
_QUANTILES = {"lowest tenth": "c1", "median": "c0"}
_ABSENT = ("silent", "offline", "never heard")
_MOST_GROUPS, _MOST_KINDS, _MOST_WORST, _MOST_ABSENT = 30, 12, 20, 50
_BINS = 20
_DAY_AXIS = Axis(times=True)


def distributions(devices: Sequence[Device], now: float, silent_s: float) -> list[Section]:
    """Return how the devices are distributed. now: Unix time in s; silent_s: as in `facts`."""
    known = [facts(each, now, silent_s) for each in devices]
    return [_states(devices, known), _fidelity(known), _drift(devices, known)]


def state_word(fact: Mapping[str, Fact]) -> str:
    """Return the state of a device, or the word for none; of a state unknown here too."""
    state = str(fact["state"] or "never heard")
    return state if state in STATE_COLORS else "never heard"


def _states(devices: Sequence[Device], known: Sequence[Mapping[str, Fact]]) -> Section:
    counts = Counter(state_word(fact) for fact in known)
    bars = {state: {state: counts[state]} for state in STATE_COLORS if counts[state]}
    figures = [
        Figure("Devices by state", stacked_bars(bars, STATE_COLORS, "Devices by state")),
        _by_kind("Devices by version of tared", (str(fact["agent"] or "not known") for fact in known), known),
        _by_kind("Devices by engine", (str(fact["engine"] or "none")[:12] for fact in known), known),
    ]
    absent = sorted((fact for fact in known if state_word(fact) in _ABSENT), key=lambda fact: -_age(fact["seen_s"]))
    heads = (("silent or offline", False), ("state", False), ("seen", True), ("engine", False))
    rows = [
        (
            str(fact["name"]),
            state_word(fact),
            (ago(fact["seen_s"]), _age(fact["seen_s"])),
            str(fact["engine"] or "")[:16],
        )
        for fact in absent[:_MOST_ABSENT]
    ]
    words = [f"{newer}."] if (newer := unread(devices)) else []
    if len(absent) > _MOST_ABSENT:
        words.append(f"The table shows {_MOST_ABSENT} of {len(absent)} devices that are silent or offline.")
    return Section("State", words, figures=figures, tables=[Table(heads, rows)] if rows else [])


def _age(seconds: Fact) -> float:
    return float(seconds) if isinstance(seconds, float) else 1e12  # never seen: the longest


def _by_kind(title: str, kinds: Iterable[str], known: Sequence[Mapping[str, Fact]]) -> Figure:
    """Draw how many devices are of each kind, the most frequent first, by state; the rare kinds are one bar."""
    counted: dict[str, Counter[str]] = defaultdict(Counter)
    for kind, fact in zip(kinds, known, strict=True):
        counted[kind][state_word(fact)] += 1
    ordered = sorted(counted, key=lambda kind: (-sum(counted[kind].values()), kind))
    shown = ordered
    if len(ordered) > _MOST_KINDS:
        shown = [kind for kind in ordered[:_MOST_KINDS] if sum(counted[kind].values()) > 1]
    bars: dict[str, Counter[str]] = {kind: counted[kind] for kind in shown}
    if rare := ordered[len(shown) :]:
        bars[f"{len(rare)} {'others' if shown else 'different'}"] = sum(map(counted.__getitem__, rare), Counter[str]())
    states = {state: color for state, color in STATE_COLORS.items() if any(bar[state] for bar in bars.values())}
    return Figure(title, stacked_bars(bars, states, title), states)


def _fidelity(known: Sequence[Mapping[str, Fact]]) -> Section:
    """Draw the lower ends of the intervals: the least fidelity of each engine, with 95 % confidence."""
    measured = [fact for fact in known if isinstance(fact["fidelity_low"], float)]
    if not measured:
        return Section("Fidelity", ["No board has reported any yet."])
    lows = sorted(measured, key=lambda fact: float(fact["fidelity_low"] or 0.0))
    counts = Counter(min(int(_BINS * float(fact["fidelity_low"] or 0.0)), _BINS - 1) for fact in lows)
    edges = [number / _BINS for number in range(_BINS + 1)]
    chart = histogram_chart(
        edges, [counts[number] for number in range(_BINS)], Axis("fidelity", 0.0, 1.0), "Fidelity of the devices"
    )
    caption = f"Lower end of the 95 % interval, of {len(measured)} of {len(known)} devices"
    rows = [
        (
            str(fact["name"]),
            (interval(fact), fact["fidelity_low"]),
            (gain(fact), fact["gain_db"] if isinstance(fact["gain_db"], float) else ""),
            ago(fact["seen_s"]),
        )
        for fact in lows[:_MOST_WORST]
    ]
    heads = (("lowest", False), ("fidelity", True), ("predicted gain", True), ("seen", False))
    return Section("Fidelity", figures=[Figure(caption, chart)], tables=[Table(heads, rows)])


def _drift(devices: Sequence[Device], known: Sequence[Mapping[str, Fact]]) -> Section:
    """Draw the drift states by tag; devices without a tag form a group of their own."""
    groups: dict[str, Counter[str]] = defaultdict(Counter)
    for device, fact in zip(devices, known, strict=True):
        for name in tag_names(device) or ["without a tag"]:
            groups[name][str(fact["drift"] or "not known")] += 1
    largest = sorted(groups, key=lambda name: (-sum(groups[name].values()), name))
    bars = stacked_bars({name: groups[name] for name in largest[:_MOST_GROUPS]}, DRIFT_COLORS, "Drift by group")
    more = len(largest) - _MOST_GROUPS
    text = [f"And {more} smaller groups."] if more > 0 else []
    return Section("Drift by group", text, figures=[Figure("Devices by tag and state of drift", bars, DRIFT_COLORS)])


def thirty_days(days: Sequence[Day]) -> Section:
    """Return what each day brought: devices heard, events, fidelity. days: the oldest first."""
    if not days:
        return Section("Thirty days", ["Nothing was received in these days."])
    events = [
        Series(kind, [(day.end, float(day.events.get(kind, 0))) for day in days], color)
        for kind, color in _EVENTS.items()
        if any(day.events.get(kind) for day in days)
    ]
    heard = [Series("devices", [(day.end, float(day.devices)) for day in days], "c0")]
    measured = [day for day in days if day.fidelity]
    lines = [
        Series(name, [(day.end, day.fidelity[index]) for day in measured], color)
        for index, (name, color) in enumerate(_QUANTILES.items())
    ]
    figures = [
        Figure(
            "Devices that sent telemetry, by day",
            line_chart(heard, _DAY_AXIS, Axis("devices", 0.0), "Devices", dots=True),
        ),
    ]
    if events:
        chart = line_chart(events, _DAY_AXIS, Axis("events", 0.0), "Events by day", dots=True)
        figures.append(Figure("Events by day", chart, {each.name: each.color for each in events}))
    if measured:
        chart = line_chart(lines, _DAY_AXIS, Axis("fidelity", high=1.0), "Fidelity by day", dots=True)
        figures.append(Figure("Fidelity of the devices, at the end of each day", chart, _QUANTILES))
    return Section("Thirty days", figures=figures)


def step_mark(record: AuditEntry) -> tuple[float, str, str]:
    """Return the mark of a rollout's step on a timeline: when, colour and words."""
    when = time.strftime("%m-%d %H:%M:%S", time.gmtime(record.at))
    words = f"{when} {record.what}, by {record.who}" + (f": {record.why}" if record.why else "")
    return record.at, _STEPS.get(record.what.partition(",")[0], "c0"), words
