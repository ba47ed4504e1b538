"""Rows of the outbox until they have arrived: with a broker alone, and with a collector that acknowledges."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from brokers import eventually
from outbox_bench import numbers, opened, popped, put, stored, taken
from turned_clock import TurnedClock

from agent.uplink import outbox as outbox_module
from agent.uplink.outbox import Outbox

pytestmark = pytest.mark.usefixtures("no_thread_left")


@pytest.mark.parametrize(("confirm", "left"), [("broker", []), ("auto", []), ("collector", [(1, 1), (2, 1), (3, 0)])])
def test_without_a_collector_the_broker_confirms(tmp_path: Path, confirm: str, left: list[tuple[int, int]]) -> None:
    with opened(tmp_path, confirm=confirm) as outbox:
        put(outbox, 2)
        taken(outbox, 2)
        put(outbox, 1)
        if confirm != "collector":
            taken(outbox, 1)
    assert stored(tmp_path) == left


def test_rows_wait_for_a_collector_that_has_acknowledged_once(tmp_path: Path) -> None:
    with opened(tmp_path) as outbox:
        put(outbox, 2)
        taken(outbox, 2)
        outbox.acknowledge(outbox.epoch, 2)
        eventually(lambda: stored(tmp_path) == [])
        put(outbox, 1)
        taken(outbox, 1)
        eventually(lambda: stored(tmp_path) == [(3, 1)])
    with opened(tmp_path) as later:
        later.connection_started()
        put(later, 1)
        assert numbers(taken(later, 2)) == [3, 1]
    assert stored(tmp_path) == [(3, 1), (1, 1)]


def test_unconfirmed_rows_are_due_again_in_order_on_a_new_connection(tmp_path: Path) -> None:
    with opened(tmp_path, confirm="collector") as outbox:
        put(outbox, 5)
        taken(outbox, 3)
        taken(outbox, 1, deliver=False)
        outbox.connection_started()
        assert numbers(taken(outbox, 5)) == [1, 2, 3, 4, 5]
        outbox.acknowledge(outbox.epoch, 5)
        outbox.connection_started()
        put(outbox, 1)
        assert numbers(taken(outbox, 1)) == [6]


def waits_for(outbox: Outbox, seconds: float) -> bool:
    return not outbox.is_due and outbox.patience_s == seconds


def test_a_silent_collector_is_sent_the_rows_again_after_ever_longer_times(tmp_path: Path) -> None:
    clock = TurnedClock()
    with opened(tmp_path, clock, confirm="collector") as outbox:
        put(outbox, 2)
        for silence_s in (10.0, 20.0, 40.0):
            assert numbers(taken(outbox, 2)) == [1, 2]
            eventually(partial(waits_for, outbox, silence_s))
            clock.turn(silence_s)
        outbox.acknowledge(outbox.epoch, 2)
        eventually(lambda: stored(tmp_path) == [])


def test_a_collector_that_comes_back_soon_gets_the_rows_that_it_misses(tmp_path: Path) -> None:
    clock = TurnedClock()
    with opened(tmp_path, clock, confirm="collector") as outbox:
        outbox._silence_s = 3600.0  # nobody has answered for hours
        outbox.connection_started()
        put(outbox, 3)
        taken(outbox, 3)
        outbox.acknowledge(outbox.epoch, 1)  # as at its start, for the last row that it has
        clock.turn(10.0)
        assert numbers(taken(outbox, 2)) == [2, 3]


def test_a_late_collector_that_goes_on_asking_gets_a_range_for_the_rows_that_are_gone(tmp_path: Path) -> None:
    clock = TurnedClock()
    with opened(tmp_path, clock) as outbox:
        put(outbox, 4)
        taken(outbox, 4)
        eventually(lambda: stored(tmp_path) == [])
        put(outbox, 1)
        taken(outbox, 1)
        for _ in range(3):  # it has seen number 5, and nothing before
            outbox.acknowledge(outbox.epoch, 0)
            clock.turn(10.0)
        (gone,) = taken(outbox, 1)
        assert (gone["from"], gone["kind"], gone["n"]) == (1, "forgotten", gone["to"])
        assert gone["to"] in (4, 5)


def test_an_older_ack_that_comes_late_takes_nothing_back(tmp_path: Path) -> None:
    with opened(tmp_path, confirm="collector") as outbox:
        put(outbox, 10)
        taken(outbox, 10)
        for upto in (10, 5, 10, 5):
            outbox.acknowledge(outbox.epoch, upto)
        eventually(lambda: stored(tmp_path) == [])
        outbox.connection_started()
        put(outbox, 1)
        assert numbers(taken(outbox, 1)) == [11]
        assert outbox.dropped == {}


def test_no_ack_deletes_a_row_that_the_broker_does_not_have_yet(tmp_path: Path) -> None:
    with opened(tmp_path, confirm="collector") as outbox:
        put(outbox, 3)
        messages = popped(outbox, 3)
        outbox.acknowledge(outbox.epoch, 2**62)
        outbox.delivered(messages[0])
        eventually(lambda: [seq for seq, _ in stored(tmp_path)] == [2, 3])
        outbox.delivered(messages[2])
        outbox.delivered(messages[1])
        eventually(lambda: stored(tmp_path) == [])


def test_acks_of_strangers_make_no_row_wait_for_a_collector(tmp_path: Path) -> None:
    with opened(tmp_path) as outbox:
        put(outbox, 1)
        taken(outbox, 1)
        for epoch, upto in ((1, 0), (1, 10**9), (outbox.epoch, 0)):
            outbox.acknowledge(epoch, upto)
        put(outbox, 1)
        taken(outbox, 1)
        eventually(lambda: stored(tmp_path) == [])


def test_a_row_that_a_broker_refuses_for_now_is_due_again(tmp_path: Path) -> None:
    clock = TurnedClock()
    with opened(tmp_path, clock) as outbox:
        put(outbox, 1)
        (message,) = popped(outbox, 1)
        outbox.refused(message, for_good=False)
        clock.turn(10.0)
        assert numbers(taken(outbox, 1)) == [1]


def test_a_flood_of_acks_fills_no_memory(tmp_path: Path) -> None:
    with opened(tmp_path) as outbox:
        put(outbox, 1)
        taken(outbox, 1)
        for epoch in range(3 * outbox_module._MOST_EPOCHS):
            outbox.acknowledge(epoch, 5)
        assert len(outbox._ack_tracker._most) <= outbox_module._MOST_EPOCHS
        put(outbox, 1)
        assert taken(outbox, 1)
