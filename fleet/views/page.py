"""Write the fleet's report as one HTML page: states, fidelity, drift, thirty days, rollouts, refused messages.

agent/common/html draws and renders it. The page fetches nothing from anywhere.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from agent.common.html.charts import Axis, Series, histogram_chart, line_chart, stacked_bars, timeline
from agent.common.html.pages import Figure, Section, Table, render_report
from fleet.devices.devices import Device
from fleet.devices.facts import Fact, facts
from fleet.devices.records import AuditEntry, Refused
from fleet.devices.trends import Day
from fleet.rollout.register import Overview
from fleet.rollout.rows import count_words
from fleet.views.listing import ago, interval, tag_names, unread

_STATES = {
    "online": "good",
    "degraded": "warning",
    "stopping": "idle",
    "silent": "c3",
    "offline": "bad",
    "never heard": "c7",
}
_DRIFT = {"calm": "good", "warning": "warning", "alarm": "bad", "not known": "idle"}
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
_MOST_GROUPS, _MOST_WORST, _MOST_LANES, _MOST_REFUSED = 30, 20, 40, 20
_BINS = 20


def page(
    fleet: str,
    devices: Sequence[Device],
    rollouts: Sequence[Overview],
    records: Sequence[AuditEntry],
    refused: Sequence[Refused],
    trends: Sequence[Day],
    silent_s: float,
) -> str:
    """Return the whole page.

    Args:
        records: The oldest first; those of the rollouts are drawn.
        trends: Day by day, the oldest first.
        silent_s: As in `facts`.
    """
    now = time.time()
    known = [facts(each, now, silent_s) for each in devices]
    sections = [
        _states(devices, known),
        _fidelity(known),
        _drift(devices, known),
        _trends(trends),
        _rollouts(rollouts, records),
        _refused(refused),
    ]
    title = f"Fleet {fleet}: {len(devices)} devices"
    return render_report(title, "By what the boards last reported.", sections)


def _states(devices: Sequence[Device], known: Sequence[Mapping[str, Fact]]) -> Section:
    counts = Counter(str(fact["state"] or "never heard") for fact in known)
    bars = stacked_bars(
        {state: {state: counts[state]} for state in _STATES if counts[state]}, _STATES, "Devices by state"
    )
    versions = Counter(str(fact["agent"] or "not known") for fact in known)
    listed = [(version, (str(count), count)) for version, count in versions.most_common()]
    table = Table((("tared", False), ("devices", True)), listed)
    words = unread(devices)
    return Section("State", [f"{words}."] if words else [], figures=[Figure("Devices by state", bars)], tables=[table])


def _fidelity(known: Sequence[Mapping[str, Fact]]) -> Section:
    """Draw the lower ends of the intervals: the least fidelity of each engine, with 95 % confidence."""
    measured = [fact for fact in known if isinstance(fact["fidelity_low"], float)]
    if not measured:
        return Section("Fidelity", ["No board has reported any yet."])
    lows = sorted(measured, key=lambda fact: float(fact["fidelity_low"] or 0.0))
    counts, edges = np.histogram([float(fact["fidelity_low"] or 0.0) for fact in lows], _BINS, (0.0, 1.0))
    chart = histogram_chart(edges.tolist(), counts.tolist(), Axis("fidelity", 0.0, 1.0), "Fidelity of the devices")
    caption = f"Lower end of the 95 % interval, of {len(measured)} of {len(known)} devices"
    rows = [
        (
            str(fact["name"]),
            (interval(dict(fact)), fact["fidelity_low"]),
            (_gain(fact), fact["gain_db"] if isinstance(fact["gain_db"], float) else ""),
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
    bars = stacked_bars({name: groups[name] for name in largest[:_MOST_GROUPS]}, _DRIFT, "Drift by group")
    more = len(largest) - _MOST_GROUPS
    text = [f"And {more} smaller groups."] if more > 0 else []
    return Section("Drift by group", text, figures=[Figure("Devices by tag and state of drift", bars, _DRIFT)])


def _trends(days: Sequence[Day]) -> Section:
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


_DAY_AXIS = Axis(times=True)
_QUANTILES = {"lowest tenth": "c1", "median": "c0"}


def _rollouts(rollouts: Sequence[Overview], records: Sequence[AuditEntry]) -> Section:
    """Draw what was done to each rollout, and when; list the states of its waves."""
    lanes: dict[str, list[tuple[float, str, str]]] = defaultdict(list)
    known = {each.rollout.id for each in rollouts}
    for record in records:
        if record.subject in known:
            when = time.strftime("%m-%d %H:%M:%S", time.gmtime(record.at))
            words = f"{when} {record.what}, by {record.who}" + (f": {record.why}" if record.why else "")
            lanes[record.subject].append((record.at, _STEPS.get(record.what.partition(",")[0], "c0"), words))
    if not lanes:
        return Section("Rollouts", ["None so far."])
    chart = timeline(dict(list(lanes.items())[-_MOST_LANES:]), "Steps of each rollout")
    rows = []
    for overview in rollouts[:_MOST_LANES]:
        waves = [f"{wave + 1}: {count_words([counts])}" for wave, counts in sorted(overview.counts.items())]
        rollout = overview.rollout
        rows.append((rollout.id, rollout.op, rollout.state.value, "; ".join(waves)))
    heads = (("rollout", False), ("op", False), ("state", False), ("boards by wave", False))
    return Section("Rollouts", figures=[Figure("Steps of each rollout", chart)], tables=[Table(heads, rows)])


def _refused(refused: Sequence[Refused]) -> Section:
    if not refused:
        return Section("Quarantine", ["Empty."])
    rows = [(f"{each.fleet}/{each.device}", each.topic, each.found) for each in refused[:_MOST_REFUSED]]
    heads = (("device", False), ("topic", False), ("found, the newest first", False))
    return Section("Quarantine", ["Messages that no collector could take."], tables=[Table(heads, rows)])


def _gain(fact: Mapping[str, Fact]) -> str:
    return f"{fact['gain_db']:.1f} dB" if isinstance(fact["gain_db"], float) else ""
