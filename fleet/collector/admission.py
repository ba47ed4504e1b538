"""Bound how many new devices a store takes: a broker lets whoever may publish invent names.

MQTT shows no sender to a subscriber, so no bound for each of them is possible: what can be seen is bounded, the devices
in all and the new ones a minute. Devices that the store knows are never turned away.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

from agent.common.clock import SYSTEM_CLOCK, Clock
from fleet.devices.devices import Devices, Name
from fleet.store.transaction import Transaction

log = logging.getLogger(__package__)

_COUNTED_S = 10.0  # for so long a count of all devices holds, beside what is added here
_WELL_AFTER_S = 60.0  # without a device that is turned away


@dataclass(frozen=True)
class NewDevices:
    """most: devices in a store. per_minute: new ones that a collector takes; as many may come at once."""

    most: int = 100_000
    per_minute: int = 6000


USUAL = NewDevices()


class Admitted(NamedTuple):
    """new: how many unknown names become devices. refused: those that do not, for this limit."""

    new: int = 0
    refused: Set[Name] = frozenset()
    limit: str = ""


class Admission:
    """Decide which names become devices; for the collector's thread.

    `admit` decides within a transaction, which may be tried again; `note` counts what was committed.

    Attributes:
        turned_away: How many names were refused so far, each once a batch.
        state: Why the latest ones were: "most-devices" or "new-devices-per-minute"; empty a minute after.
    """

    def __init__(self, devices: Devices, limits: NewDevices, clock: Clock = SYSTEM_CLOCK) -> None:
        self.turned_away = 0
        self.state = ""
        self._devices = devices
        self._limits = limits
        self._clock = clock
        self._tokens, self._earned_s = float(limits.per_minute), clock.monotonic_s()
        self._total, self._count_again_s = 0, clock.monotonic_s()
        self._refused_s = clock.monotonic_s()

    def admit(self, transaction: Transaction, names: Sequence[Name]) -> Admitted:
        """Decide on the names of a batch, in the order of their arrival. Raises AgentError as the store does."""
        unknown = self._devices.unknown(transaction, set(names))
        if not unknown:
            return Admitted()
        now_s = self._clock.monotonic_s()
        self._tokens = min(
            self._limits.per_minute, self._tokens + (now_s - self._earned_s) / 60.0 * self._limits.per_minute
        )
        self._earned_s = now_s
        if now_s >= self._count_again_s:
            self._total, self._count_again_s = self._devices.total(transaction), now_s + _COUNTED_S
        room = self._limits.most - self._total
        most = max(0, min(room, int(self._tokens)))
        new = [name for name in names if name in unknown]
        limit = "most-devices" if room <= self._tokens else "new-devices-per-minute"
        return Admitted(len(new[:most]), frozenset(new[most:]), limit)

    def note(self, admitted: Admitted) -> None:
        """Count the devices of a batch that was stored."""
        self._tokens -= admitted.new
        self._total += admitted.new
        now_s, refused, limit = self._clock.monotonic_s(), len(admitted.refused), admitted.limit
        if refused:
            self.turned_away += refused
            self._refused_s = now_s
            if self.state != limit:
                self.state = limit
                remedy = "check who may publish at the broker, run 'tared fleet forget', or raise the limit"
                log.error("collector=devices_refused limit=%s refused=%d remedy=%r", limit, refused, remedy)
        elif self.state and now_s > self._refused_s + _WELL_AFTER_S:
            self.state = ""
            log.warning("collector=devices_taken refused=%d", self.turned_away)
