"""The outbox: numbered without gaps, on the disk before it is sent, kept until it has arrived, bounded, and told of."""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from bench import fill, small_file_system
from brokers import eventually

from agent import acknowledging, outbox_store
from agent import outbox as outbox_module
from agent.errors import AgentError
from agent.mqtt_config import OutboxConfig
from agent.outbox import Outbox
from agent.outbox_rows import ALARM, NEWS, SAMPLE
from agent.publishing import Message
from agent.sending import TELEMETRY, WINDOW
from agent.topics import Topics

pytestmark = pytest.mark.usefixtures("no_thread_left")
TOPICS = Topics("fleet", "board")
AT_ONCE = {"commit_s": 0.0, "backlog_per_s": 10_000.0}


@contextmanager
def opened(folder: Path, **config: Any) -> Iterator[Outbox]:
    with Outbox(folder / "outbox.sqlite", TOPICS, OutboxConfig(**{**AT_ONCE, **config})) as outbox:
        yield outbox


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """What the disk waits for until the test sets it."""
    event, commit = threading.Event(), outbox_store.OutboxStore.commit

    def slowly(store: Any, *work: Any) -> None:
        assert event.wait(20.0)
        commit(store, *work)

    monkeypatch.setattr(outbox_store.OutboxStore, "commit", slowly)
    return event


def put(outbox: Outbox, count: int, kind: str = "alarm", rank: int = ALARM, size: int = 0) -> None:
    for _ in range(count):
        outbox.put(kind, rank, lambda epoch, seq: json.dumps({"epoch": epoch, "seq": seq, "x": "x" * size}).encode())


def taken(outbox: Outbox, count: int, deliver: bool = True) -> list[dict[str, Any]]:
    """The next so many documents; PUBACKed at once, or not."""
    messages: list[Message] = []
    while len(messages) < count:
        eventually(lambda: collect(outbox, messages))
    if deliver:
        for message in messages:
            outbox.delivered(message)
    return [json.loads(message.payload) for message in messages]


def collect(outbox: Outbox, into: list[Message]) -> bool:
    message = outbox.take()
    if message is not None:
        into.append(message)
    return message is not None


def numbers(documents: list[dict[str, Any]]) -> list[int]:
    return [document["seq"] for document in documents]


def stored(folder: Path) -> list[tuple[int, int]]:
    """Number, and whether a broker has it, of each row on the disk."""
    with closing(sqlite3.connect(folder / "outbox.sqlite")) as db:
        return db.execute("SELECT seq, sent FROM rows ORDER BY epoch, seq").fetchall()


def test_telemetry_and_events_are_numbered_together_on_topics_of_their_own(tmp_path: Path) -> None:
    with opened(tmp_path) as outbox:
        put(outbox, 1, TELEMETRY, SAMPLE)
        put(outbox, 1, "job", NEWS)
        put(outbox, 1, "alarm", ALARM)
        messages: list[Message] = []
        eventually(lambda: (collect(outbox, messages) and len(messages) == 3) or len(messages) == 3)
        assert [message.topic for message in messages] == [TOPICS.telemetry, TOPICS.event, TOPICS.event]
        assert numbers([json.loads(message.payload) for message in messages]) == [1, 2, 3]
        assert {json.loads(message.payload)["epoch"] for message in messages} == {outbox.epoch}


def test_what_was_not_sent_comes_after_a_restart_first_and_in_its_order(tmp_path: Path) -> None:
    with opened(tmp_path) as first:
        put(first, 3)
    with opened(tmp_path) as second:
        assert second.epoch > first.epoch
        put(second, 2)
        documents = taken(second, 5)
    assert [(document["epoch"], document["seq"]) for document in documents] == [
        *((first.epoch, seq) for seq in (1, 2, 3)),
        *((second.epoch, seq) for seq in (1, 2)),
    ]


def test_nothing_is_sent_that_is_not_on_the_disk(tmp_path: Path, written: threading.Event) -> None:
    with opened(tmp_path) as outbox:
        put(outbox, 1)
        for _ in range(50):
            assert outbox.take() is None
            time.sleep(0.001)
        written.set()
        assert numbers(taken(outbox, 1)) == [1]


def test_samples_share_a_commit_and_an_alarm_does_not_wait(tmp_path: Path) -> None:
    with opened(tmp_path, commit_s=60.0) as outbox:
        put(outbox, 5, TELEMETRY, SAMPLE)
        time.sleep(0.05)
        assert stored(tmp_path) == []
        put(outbox, 1, "alarm", ALARM)
        eventually(lambda: len(stored(tmp_path)) == 6)
        assert numbers(taken(outbox, 6)) == [1, 2, 3, 4, 5, 6]


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
        later.renew()
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
        outbox.renew()
        assert numbers(taken(outbox, 5)) == [1, 2, 3, 4, 5]
        outbox.acknowledge(outbox.epoch, 5)
        outbox.renew()
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
        outbox.renew()
        put(outbox, 3)
        taken(outbox, 3)
        outbox.acknowledge(outbox.epoch, 1)  # which it says at its start: it has heard of no more
        assert numbers(taken(outbox, 2)) == [2, 3]


def test_more_than_the_window_holds_comes_in_order(tmp_path: Path) -> None:
    with opened(tmp_path) as outbox:
        put(outbox, 3 * WINDOW)
        assert numbers(taken(outbox, 3 * WINDOW)) == list(range(1, 3 * WINDOW + 1))
        eventually(lambda: len(outbox) == 0)


def test_a_backlog_is_sent_no_faster_than_allowed(tmp_path: Path) -> None:
    with opened(tmp_path, backlog_per_s=50.0) as outbox:
        put(outbox, 100)
        taken(outbox, 50)
        began = time.monotonic()
        taken(outbox, 25)
        assert time.monotonic() - began > 0.3


def test_samples_are_dropped_before_alarms_and_each_range_is_a_message(tmp_path: Path) -> None:
    with opened(tmp_path, confirm="collector", bytes=100_000) as outbox:
        for _ in range(10):
            put(outbox, 20, TELEMETRY, SAMPLE, size=1000)
            put(outbox, 1, "alarm", ALARM, size=1000)
            eventually(lambda: not outbox._work)
        eventually(lambda: outbox.dropped.total() > 100)
        assert set(outbox.dropped) == {TELEMETRY}
        outbox.renew()
        told: dict[int, str] = {}
        while len(told) < 210:
            (document,) = taken(outbox, 1)
            if "seq" in document:
                told[document["seq"]] = "row"
            else:
                assert document["kind"] == TELEMETRY
                assert document["n"] == document["to"] - document["from"] + 1
                told.update(dict.fromkeys(range(document["from"], document["to"] + 1), "gap"))
        assert sorted(told) == list(range(1, 211))
        assert all(told[seq] == "row" for seq in range(21, 211, 21))  # the alarms
        assert list(told.values()).count("gap") == outbox.dropped[TELEMETRY]
    assert (tmp_path / "outbox.sqlite").stat().st_size < 200_000


def test_what_is_too_old_goes_and_a_clock_that_is_set_makes_nothing_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, aged = [1000.0], [0.0]
    monkeypatch.setattr(outbox_store.time, "time", lambda: now[0])
    monkeypatch.setattr(outbox_store, "_AGED_EVERY_S", aged[0])
    with opened(tmp_path, confirm="collector", days=1.0) as outbox:
        put(outbox, 2)
        eventually(lambda: len(stored(tmp_path)) == 2)
        now[0] = 1_800_000_000.0  # the board has heard what time it is
        put(outbox, 1)
        eventually(lambda: len(stored(tmp_path)) == 3)
        assert outbox.dropped.total() == 0
    with opened(tmp_path, confirm="collector", days=1.0) as outbox:
        now[0] += 2 * 86400.0
        monkeypatch.setattr(outbox_store, "_CLOCK_JUMP_S", 1e12)  # so much time has really passed
        put(outbox, 1)
        eventually(lambda: len(stored(tmp_path)) == 1)
        assert outbox.dropped == {"alarm": 3}


def test_a_collector_that_comes_late_is_told_what_is_gone_once_it_goes_on_asking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acknowledging, "_LACKING_S", 0.0)
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
        outbox.renew()
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


def test_a_document_that_is_too_long_for_any_reader_is_dropped_and_told(tmp_path: Path) -> None:
    with opened(tmp_path) as outbox:
        put(outbox, 1, size=70_000)
        put(outbox, 1)
        gap, row = taken(outbox, 2)
        assert (gap["from"], gap["to"], row["seq"]) == (1, 1, 2)


def test_what_a_broker_does_not_take_now_is_due_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_module, "_SILENCE_S", 0.1)
    with opened(tmp_path) as outbox:
        put(outbox, 1)
        messages: list[Message] = []
        eventually(lambda: collect(outbox, messages))
        outbox.refused(messages[0], for_good=False)
        assert numbers(taken(outbox, 1)) == [1]


def test_what_lay_on_a_disk_that_refused_for_a_while_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox_store, "_RETRY_S", 0.05)
    monkeypatch.setattr(acknowledging, "_LACKING_S", 0.0)
    with small_file_system(tmp_path / "disk", "2m") as disk, opened(disk, confirm="collector") as outbox:
        put(outbox, 100)
        eventually(lambda: len(stored(disk)) == 100)
        fill(disk / "ballast")
        put(outbox, 30, size=10_000)
        assert outbox.errors.get(timeout=5.0).code == "outbox.write"
        put(outbox, 5)
        outbox.renew()
        memory = taken(outbox, 35)
        assert max(numbers(memory)) == 135
        for _ in range(5):  # a collector that has nothing of what lies on the disk
            outbox.acknowledge(outbox.epoch, 0)
        (disk / "ballast").unlink()
        arrived = set(numbers(memory))
        while arrived < set(range(1, 136)):
            (document,) = taken(outbox, 1)
            assert "seq" in document, document
            arrived.add(document["seq"])
        outbox.acknowledge(outbox.epoch, 135)
        eventually(lambda: stored(disk) == [])
        assert outbox.dropped == {}


def test_a_damaged_file_is_moved_aside_told_and_begun_anew(tmp_path: Path) -> None:
    (tmp_path / "outbox.sqlite").write_bytes(b"no outbox at all" * 99)
    with opened(tmp_path) as outbox:
        assert outbox.errors.get(timeout=5.0).code == "outbox.damaged"
        put(outbox, 1)
        assert numbers(taken(outbox, 1)) == [1]
    assert (tmp_path / "outbox.sqlite.damaged.1").exists()


def test_a_newer_file_is_refused_and_left_alone(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "outbox.sqlite")) as db:
        db.execute("PRAGMA user_version = 9")
    before = (tmp_path / "outbox.sqlite").read_bytes()
    with pytest.raises(AgentError, match=r"outbox\.schema"), opened(tmp_path):
        pass
    assert (tmp_path / "outbox.sqlite").read_bytes() == before


def test_while_the_disk_is_full_memory_stands_in_and_then_the_disk_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox_store, "_RETRY_S", 0.05)
    with small_file_system(tmp_path / "disk") as disk:
        with opened(disk, confirm="collector") as outbox:
            put(outbox, 1)
            eventually(lambda: len(stored(disk)) == 1)
            fill(disk / "ballast")
            put(outbox, 30, size=3000)
            assert outbox.errors.get(timeout=5.0).code == "outbox.write"
            assert numbers(taken(outbox, 31)) == list(range(1, 32))
            (disk / "ballast").unlink()
            time.sleep(0.1)
            put(outbox, 1)
            eventually(lambda: {seq for seq, _ in stored(disk)} >= set(range(2, 33)))
            assert outbox.errors.empty()
        with opened(disk, confirm="collector") as later:
            later.renew()
            assert numbers(taken(later, 32)) == list(range(1, 33))


def test_where_the_writing_takes_minutes_memory_is_bounded_and_what_is_lost_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: threading.Event
) -> None:
    monkeypatch.setattr(outbox_module, "_MOST_PENDING", 10)
    with opened(tmp_path) as outbox:
        put(outbox, 1)
        eventually(lambda: not outbox._work)  # it is being written
        put(outbox, 25)
        written.set()
        documents = taken(outbox, 12)
        assert numbers([document for document in documents if "seq" in document]) == list(range(1, 12))
        (gap,) = [document for document in documents if "from" in document]
        assert (gap["from"], gap["to"], gap["kind"], gap["n"]) == (12, 26, "alarm", 15)


def test_a_flood_of_acks_fills_no_memory(tmp_path: Path) -> None:
    with opened(tmp_path) as outbox:
        put(outbox, 1)
        taken(outbox, 1)
        for epoch in range(3 * acknowledging._MOST_EPOCHS):
            outbox.acknowledge(epoch, 5)
        assert len(outbox._acknowledgements._most) <= acknowledging._MOST_EPOCHS
        put(outbox, 1)
        assert taken(outbox, 1)


def test_a_bug_in_the_thread_is_found_by_who_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(outbox_store.OutboxStore, "commit", broken)
    with opened(tmp_path) as outbox:
        put(outbox, 1)
        eventually(lambda: isinstance(outbox.error, ZeroDivisionError))


def test_what_no_broker_takes_is_dropped_and_told(tmp_path: Path) -> None:
    with opened(tmp_path, confirm="collector") as outbox:
        put(outbox, 3)
        messages: list[Message] = []
        while len(messages) < 3:
            eventually(lambda: collect(outbox, messages))
        outbox.delivered(messages[0])
        outbox.refused(messages[1], for_good=True)
        outbox.delivered(messages[2])
        (gap,) = taken(outbox, 1)
        assert (gap["from"], gap["to"], gap["kind"], gap["n"]) == (2, 2, "alarm", 1)
        eventually(lambda: stored(tmp_path) == [(1, 1), (3, 1)])
        assert outbox.dropped == {"alarm": 1}
