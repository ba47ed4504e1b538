"""Write the fleet's report as one HTML page: states, fidelity, drift, thirty days, rollouts, refused messages.

agent/common/html draws and renders it. The page fetches nothing from anywhere.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence

from agent.common.html.charts import timeline
from agent.common.html.pages import Figure, Section, Table, render_report
from fleet.devices.devices import Device
from fleet.devices.records import AuditEntry, Refused
from fleet.devices.trends import Day
from fleet.rollout.register import Overview
from fleet.rollout.rows import count_words
from fleet.views.sections import distributions, step_mark, thirty_days

_MOST_LANES, _MOST_REFUSED = 40, 20


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
    sections = [
        *distributions(devices, time.time(), silent_s),
        thirty_days(trends),
        _rollouts(rollouts, records),
        _refused(refused),
    ]
    title = f"Fleet {fleet}: {len(devices)} devices"
    return render_report(title, "By what the boards last reported.", sections)


def _rollouts(rollouts: Sequence[Overview], records: Sequence[AuditEntry]) -> Section:
    """Draw what was done to each rollout, and when; list the states of its waves."""
    lanes: dict[str, list[tuple[float, str, str]]] = defaultdict(list)
    known = {each.rollout.id for each in rollouts}
    for record in records:
        if record.subject in known:
            lanes[record.subject].append(step_mark(record))
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
