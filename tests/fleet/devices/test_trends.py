"""Thirty days of a fleet, counted in each database."""

from __future__ import annotations

import json
import time

import pytest
from databases import postgres as postgres
from databases import store as store
from databases import where as where
from stored import Reports

from fleet.devices.devices import Devices
from fleet.devices.reports import Report, Stream
from fleet.devices.trends import daily_trends
from fleet.store.transaction import FleetStore
from fleet.views.sections import thirty_days

DAY_S = 86_400.0


def telemetry(name: str, epoch: int, seq: int, estimate: float | None) -> Report:
    fidelity = {"estimate": estimate, "low": 0.0, "high": 1.0, "n": 9}
    camera = {"fidelity": fidelity} if estimate is not None else {}
    return Report(Stream("f", name, epoch), seq, "telemetry", 1.0, json.dumps({"cameras": {"a": camera}}))


def test_each_day_has_its_boards_their_events_and_the_newest_fidelity_of_each(store: FleetStore) -> None:
    now, reports = time.time(), Reports(store)

    def put(days_ago: float, *entries: Report) -> None:
        with store.transaction() as transaction:
            reports.put(transaction, entries, now - days_ago * DAY_S)

    put(31.0, telemetry("old", 1, 1, 0.1))
    put(2.5, telemetry("a", 1, 1, 0.2), telemetry("b", 1, 1, None))
    put(2.4, telemetry("a", 2, 1, 0.9))  # after a new start: this one counts
    put(2.3, Report(Stream("f", "b", 1), 2, "alarm", 1.0, "{}"), Report(Stream("f", "b", 1), 3, "alarm", 1.0, "{}"))
    put(0.0, telemetry("a", 2, 2, 0.5), telemetry("b", 1, 4, 1.0), telemetry("c", 1, 1, 0.0))
    ids = {each.name: each.id for each in Devices(store).all("f")}
    days = daily_trends(store, ids.values(), now)
    assert [(day.devices, dict(day.events)) for day in days] == [(2, {"alarm": 2}), (0, {}), (3, {})]
    assert [day.end for day in days] == [now - 2 * DAY_S, now - DAY_S, now]
    assert days[0].fidelity == pytest.approx((0.9, 0.9))
    assert days[1].fidelity == ()
    assert days[2].fidelity == pytest.approx((0.1, 0.5))
    (only,) = daily_trends(store, [ids["c"]], now)
    assert (only.devices, only.fidelity) == (1, (0.0, 0.0))
    assert daily_trends(store, [], now) == []


@pytest.mark.parametrize("estimate", [1e308, -1e308, 10**400])
def test_a_fidelity_that_is_none_is_not_drawn(store: FleetStore, estimate: float) -> None:
    now, reports = time.time(), Reports(store)
    with store.transaction() as transaction:
        reports.put(transaction, [telemetry("a", 1, 1, estimate)], now)
    (day,) = daily_trends(store, [each.id for each in Devices(store).all("f")], now)
    assert (day.devices, day.fidelity) == (1, ())
    assert "Fidelity of the devices, at the end of each day" not in [each.title for each in thirty_days([day]).figures]
