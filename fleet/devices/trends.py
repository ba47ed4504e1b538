"""Count what a fleet's boards reported, day by day: events by kind, and the fidelity that each board had last."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from statistics import quantiles

from fleet.devices.facts import least_fidelity
from fleet.store.transaction import FleetStore, Transaction

DAYS = 30
_DAY_S = 86_400.0
# Days count backwards from the last one. Both databases divide whole numbers alike.
_DAY = "(? - CAST(received AS BIGINT)) / 86400"
_EVENTS = (
    f"SELECT {_DAY}, device, kind, count(*) FROM reports WHERE received >= ? AND received < ? AND kind <> 'telemetry' "
    "GROUP BY 1, 2, 3"
)
_NEWEST = (
    f"SELECT {_DAY}, device, epoch, max(seq) FROM reports WHERE received >= ? AND received < ? AND kind = 'telemetry' "
    "GROUP BY 1, 2, 3"
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


def daily_trends(store: FleetStore, devices: Collection[int], now: float) -> list[Day]:
    """Return the last days, the oldest first, from the first on which anything was received.

    Args:
        devices: Ids of the boards that count.
        now: Unix time in s, the end of the last day.
    """
    wanted, last = set(devices), math.ceil(now) + 1  # one database rounds to whole seconds, the other one cuts
    span = last, float(last - DAYS * _DAY_S), float(last)
    events: dict[int, Counter[str]] = defaultdict(Counter)
    newest: dict[int, dict[int, tuple[int, int]]] = defaultdict(dict)  # by day and device: epoch, number
    with store.transaction("read") as transaction:
        for day, device, kind, count in transaction.execute(_EVENTS, span):
            if device in wanted:
                events[int(day)][str(kind)] += int(count)
        for day, device, epoch, seq in transaction.execute(_NEWEST, span):
            if device in wanted:
                newest[int(day)][device] = max(newest[int(day)].get(device, (0, 0)), (int(epoch), int(seq)))
        oldest = max([*events, *newest], default=-1)
        return [
            Day(now - day * _DAY_S, len(newest[day]), dict(events[day]), _fidelity(transaction, newest[day]))
            for day in range(oldest, -1, -1)
        ]


def _fidelity(transaction: Transaction, newest: Mapping[int, tuple[int, int]]) -> tuple[float, ...]:
    """Return the lowest tenth and the median of these boards; newest: epoch and number of their telemetry."""
    keys = [(device, *number) for device, number in newest.items()]
    documents = transaction.lookup("reports", ("device", "epoch", "seq"), ("document",), keys)
    estimates = [least_fidelity(json.loads(row[0]))[0] for row in documents.values()]
    known = [each for each in estimates if each is not None]
    if len(known) < 2:  # too few for quantiles
        return tuple(known * 2)
    tenths = quantiles(known, n=10, method="inclusive")
    return tenths[0], tenths[4]
