"""Read metrics from the fleet's store: its devices by state, and its rollouts with their boards by step.

The store is opened again for each reading, beside the process that writes. A store that cannot be read is a metric
itself, and hides no other one. Names of fleets and rollouts are limited: everyone who may publish at the broker may
invent fleets.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from agent.common.clock import SYSTEM_CLOCK, Clock
from agent.common.metrics import gauges
from agent.common.timing import Backoff, RetryState
from calibrate.errors import TaredError
from fleet.devices.devices import Devices
from fleet.devices.facts import SILENT_S
from fleet.devices.records import count_audited
from fleet.rollout import rows
from fleet.rollout.rows import BoardStage, RolloutState
from fleet.rollout.stepper import GATE_FAILED
from fleet.store.opening import open_existing
from fleet.store.transaction import FleetStore

log = logging.getLogger(__package__)

_KEPT_S = 10.0  # for so long scrapes get the same reading: counting a million devices takes seconds
_CACHE_KIB = 1024
_MOST_GROUPS = 200  # pairs of fleet and state, the largest ones
_MOST_ROLLOUTS = 50  # that are under way, the newest


class StoreMetrics(Collector):
    """The metrics that `read` takes from the store at `db`, at a Unix time in s; called in the metrics' thread."""

    def __init__(self, db: str, read: Callable[[FleetStore, float], list[Metric]], clock: Clock = SYSTEM_CLOCK) -> None:
        self._db, self._read, self._clock = db, read, clock
        self._reading = RetryState(_report, Backoff(), 1)
        self._kept: list[Metric] = []
        self._next_s = -math.inf  # when the store is read again; monotonic

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics; those of the store only while it can be read."""
        if self._clock.monotonic_s() >= self._next_s:
            try:
                with open_existing(self._db, _CACHE_KIB) as store:
                    self._kept = self._read(store, self._clock.wall_s())
                self._reading.note_success()
            except TaredError as error:
                self._kept = []
                self._reading.note_failure(error)
            self._next_s = self._clock.monotonic_s() + _KEPT_S
        up = float(not self._reading.code)
        yield GaugeMetricFamily("tared_fleet_store_up", "Whether the fleet's store can be read.", value=up)
        yield from self._kept


def device_metrics(store: FleetStore, now: float) -> list[Metric]:
    """Count the devices. now: Unix time in s. Raises AgentError as the store does."""
    labels = ["fleet", "state"]
    groups = Devices(store).census(now - SILENT_S, _MOST_GROUPS)
    devices = {(fleet, state): count for fleet, state, count, _ in groups}
    heard = {(fleet, state): recent for fleet, state, _, recent in groups}
    text = f"Devices from which a message has arrived within {SILENT_S:.0f} s."
    return [
        gauges("tared_fleet_devices", "Devices by the state that they last reported.", labels, devices),
        gauges("tared_fleet_heard_devices", text, labels, heard),
    ]


def rollout_metrics(store: FleetStore, now: float) -> list[Metric]:
    """Count the rollouts, and the boards of those under way. Raises AgentError as the store does."""
    with store.transaction("read") as transaction:
        counts = rows.rollout_counts(transaction)
        under_way = rows.unfinished_rollouts(transaction, _MOST_ROLLOUTS)
        by_wave = {each.id: rows.board_counts(transaction, each.id) for each in under_way}
        failures = count_audited(transaction, GATE_FAILED)
    states = {(each.value,): counts[each] for each in RolloutState}
    labels = ["fleet", "rollout", "op"]
    wave = {(each.fleet, each.id, each.op): each.wave + 1 for each in under_way}
    waves = {(each.fleet, each.id, each.op): each.waves for each in under_way}
    boards: dict[tuple[str, str, str], int] = {}
    for each in under_way:
        steps = sum(by_wave[each.id].values(), Counter[BoardStage]())
        boards |= {(each.fleet, each.id, step.value): steps[step] for step in BoardStage}
    unheld = sum(not each.is_held(now) for each in under_way)
    failed = "Waves whose gates have failed, since the store was made."
    return [
        gauges("tared_rollouts", "Rollouts by state.", ["state"], states),
        GaugeMetricFamily("tared_rollouts_unheld", "Rollouts under way that no controller holds.", value=unheld),
        gauges("tared_rollout_wave", "Present wave of a rollout under way, from 1.", labels, wave),
        gauges("tared_rollout_waves", "Number of waves of a rollout under way.", labels, waves),
        gauges("tared_rollout_boards", "Boards of a rollout under way, by step.", ["fleet", "rollout", "step"], boards),
        CounterMetricFamily("tared_rollout_gate_failures", failed, value=failures),
    ]


def _report(error: TaredError | None) -> None:
    if error is None:
        log.info("store=readable")
    else:
        log.warning("store=unreadable error=%r", str(error))
