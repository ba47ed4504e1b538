"""What the outbox keeps until it has arrived: with a broker alone, and with a collector that acknowledges."""

from __future__ import annotations

from pathlib import Path

import pytest
from brokers import eventually
from outbox_bench import collect, numbers, opened, put, stored, taken

from agent.mqtt.message import Message
from agent.uplink import outbox as outbox_module

pytestmark = pytest.mark.usefixtures("no_thread_left")


@pytest.mark.parametrize(("confirm", "left"), [("broker", []), ("auto", []), ("collector", [(1, 1), (2, 1), (3, 0)])])
def test_the_broker_has_it_is_enough_where_there_is_no_collector(
    tmp_path: Path, confirm: str, left: list[tuple[int, int]]
) -> None:
    with opened(tmp_path, confirm=confirm) as outbox:
        put(outbox, 2)
        taken(outbox, 2)
        put(outbox, 1)
        if confirm != "collector":
            taken(outbox, 1)
    assert stored(tmp_path) == left


def test_a_collector_that_has_acknowledged_once_is_waited_for_ever_after(tmp_path: Path) -> None:
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


def test_an_ack_forgets_up_to_its_number_and_never_what_was_not_sent(tmp_path: Path) -> None:
    with opened(tmp_path, confirm="collector") as outbox:
        put(outbox, 6)
        taken(outbox, 4)
        outbox.acknowledge(outbox.epoch + 1, 10**15)
        outbox.acknowledge(outbox.epoch, 2)
        eventually(lambda: [seq for seq, _ in stored(tmp_path)] == [3, 4, 5, 6])
        outbox.acknowledge(outbox.epoch, 10**15)
        eventually(lambda: [seq for seq, _ in stored(tmp_path)] == [5, 6])
        assert numbers(taken(outbox, 2)) == [5, 6]


def test_with_a_new_connection_all_that_is_unconfirmed_is_due_again_in_order(tmp_path: Path) -> None:
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


def test_a_collector_that_falls_silent_is_sent_it_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_module, "_SILENCE_S", 0.2)
    with opened(tmp_path, confirm="collector") as outbox:
        put(outbox, 2)
        assert numbers(taken(outbox, 6)) == [1, 2, 1, 2, 1, 2]
        outbox.acknowledge(outbox.epoch, 2)
        eventually(lambda: stored(tmp_path) == [])


def test_a_collector_that_comes_back_is_sent_soon_what_it_has_not_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox_module, "_SILENCE_S", 0.2)
    with opened(tmp_path, confirm="collector") as outbox:
        outbox._silence_s = 3600.0  # nobody has answered for hours
        outbox.connection_started()
        put(outbox, 3)
        taken(outbox, 3)
        outbox.acknowledge(outbox.epoch, 1)  # which it says at its start: it has heard of no more
        assert numbers(taken(outbox, 2)) == [2, 3]


def test_a_collector_that_comes_late_is_told_what_is_gone_once_it_goes_on_asking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox_module, "_STILL_MISSING_S", 0.0)
    with opened(tmp_path) as outbox:
        put(outbox, 4)
        taken(outbox, 4)
        eventually(lambda: stored(tmp_path) == [])
        put(outbox, 1)
        taken(outbox, 1)
        for _ in range(3):  # it has seen number 5, and nothing before
            outbox.acknowledge(outbox.epoch, 0)
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


def test_what_the_broker_does_not_have_yet_no_ack_forgets(tmp_path: Path) -> None:
    with opened(tmp_path, confirm="collector") as outbox:
        put(outbox, 3)
        messages: list[Message] = []
        while len(messages) < 3:
            eventually(lambda: collect(outbox, messages))
        outbox.acknowledge(outbox.epoch, 2**62)
        outbox.delivered(messages[0])
        eventually(lambda: [seq for seq, _ in stored(tmp_path)] == [2, 3])
        outbox.delivered(messages[2])
        outbox.delivered(messages[1])
        eventually(lambda: stored(tmp_path) == [])


def test_strangers_acks_make_nobody_wait_for_a_collector(tmp_path: Path) -> None:
    with opened(tmp_path) as outbox:
        put(outbox, 1)
        taken(outbox, 1)
        for epoch, upto in ((1, 0), (1, 10**9), (outbox.epoch, 0)):
            outbox.acknowledge(epoch, upto)
        put(outbox, 1)
        taken(outbox, 1)
        eventually(lambda: stored(tmp_path) == [])


def test_what_a_broker_does_not_take_now_is_due_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_module, "_SILENCE_S", 0.1)
    with opened(tmp_path) as outbox:
        put(outbox, 1)
        messages: list[Message] = []
        eventually(lambda: collect(outbox, messages))
        outbox.refused(messages[0], for_good=False)
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
