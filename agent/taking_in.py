"""From one connection's socket to an intake, and back to the broker the word that it may forget."""

from __future__ import annotations

import contextlib
import logging

from agent.bulk import BulkSocket
from agent.intake import Intake

log = logging.getLogger(__name__)


class TakingIn:
    """Made as the connection begins: what the one before has put into the intake is acknowledged on no other, where
    packet ids mean something else.

    holds: PUBACK waits until the reader has settled what came, for as long as that takes; the broker keeps it, has only
    so much under way, and sends it again on the next connection of a session that lasts. Else PUBACK waits for room.
    """

    def __init__(self, intake: Intake, holds: bool) -> None:
        self._intake = intake
        self._holds = holds
        if holds and not intake.has_room:  # else each connection that is lost would leave as much as is under way
            intake.clear()
        self._before = intake.arrived
        self._told_dropped = 0

    def advance(self, bulk: BulkSocket) -> None:
        """Hand over what came, and acknowledge what may be."""
        if arrived := bulk.take():
            self._intake.put(arrived)
        bulk.has_room = self._intake.has_room
        if bulk.dropped > 2 * self._told_dropped:  # a flood is told each time that it has doubled
            log.warning("mqtt=no_room qos=0 dropped=%d", bulk.dropped)
            self._told_dropped = bulk.dropped
        settled = self._intake.settled - self._before if self._holds else bulk.taken if bulk.has_room else 0
        with contextlib.suppress(OSError):  # which paho finds, too
            bulk.acknowledge(settled)
