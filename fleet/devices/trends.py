"""Count what a fleet's boards reported, day by day: events by kind, and the fidelity that each board had last."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from fleet.devices.facts import least_fidelity
from fleet.store.transaction import FleetStore, Transaction

DAYS = 30
_DAY_S = 86_400.0
_EVENTS = "SELECT device, kind, count(*) FROM reports WHERE received >= ? AND received < ? AND kind <> ? GROUP BY 1, 2"
_NEWEST = (
    "SELECT r.device, r.document FROM reports r JOIN ("
    "SELECT device, max(received) AS received FROM reports WHERE received >= ? AND received < ? AND kind = ? "
    "GROUP BY device) newest ON newest.device = r.device AND newest.received = r.received WHERE r.kind = ?"
)


@dataclass(frozen=True)
class Day:
    """One day that ends at `end`, Unix time in s.

    devices: boards that sent telemetry. events: by kind. fidelity: of the boards' last telemetry of the day, the
    lowest tenth and the median; empty where none had measured any.
    """

    end: float
    devices: int = 0
    events: Mapping[str, int] = field(default_factory=dict)
    fidelity: tuple[float, ...] = ()


def daily_trends(store: FleetStore, devices: Collection[int], now: float, days: int = DAYS) -> list[Day]:
    """Return the last days, the oldest first, from the first on which anything was received.

    Args:
        devices: Ids of the boards that count.
        now: Unix time in s, the end of the last day.
    """
    wanted = set(devices)
    with store.transaction("read") as transaction:
        found = [_day(transaction, wanted, now - before * _DAY_S) for before in reversed(range(days))]
    first = next((number for number, day in enumerate(found) if day.devices or day.events), len(found))
    return found[first:]


def _day(transaction: Transaction, wanted: Collection[int], end: float) -> Day:
    begin, events, fidelities, seen = end - _DAY_S, Counter[str](), list[float](), set[int]()
    for device, kind, count in transaction.execute(_EVENTS, (begin, end, "telemetry")):
        if device in wanted:
            events[str(kind)] += int(count)
    for device, document in transaction.execute(_NEWEST, (begin, end, "telemetry", "telemetry")):
        if device not in wanted or device in seen:
            continue
        seen.add(device)
        estimate = least_fidelity(json.loads(document))[0]
        if estimate is not None:
            fidelities.append(estimate)
    quantiles = np.quantile(fidelities, [0.1, 0.5]).tolist() if fidelities else []
    return Day(end, len(seen), dict(events), tuple(quantiles))
