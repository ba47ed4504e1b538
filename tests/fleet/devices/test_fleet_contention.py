"""Several writers of one store at once: no row goes back, and no writer is refused for another's sake."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from brokers import eventually
from stored import Reports, store_results

from agent.contract.commands import CommandResult
from agent.contract.messages import Birth, Status
from benchmarks.postgres import Postgres
from fleet.collector.batch import Batch
from fleet.collector.writer import BatchWriter
from fleet.devices.devices import Devices
from fleet.devices.reports import Gap, Report, Stream
from fleet.store.opening import open_store
from fleet.store.transaction import FleetStore, Transaction, write_with_retries
from fleet.untrusted import Warnings

NAME = "fleet", "board"
STREAM = Stream(*NAME, 7)
Write = Callable[[FleetStore, Transaction], object]


@pytest.fixture
def database(postgres: Postgres) -> str:
    """Of PostgreSQL, where two may write at once."""
    where = postgres.new_database()
    with open_store(where) as store:
        Reports(store).add([Report(STREAM, 1, "telemetry", 1.0, "{}")])
    return where


def result(status: str) -> Write:
    stored = CommandResult.model_validate({"id": "c1", "status": status})
    return lambda store, transaction: store_results(store, transaction, NAME, stored)


def event(seq: int) -> Write:
    news = [Report(STREAM, seq, "regime", 1.0, f'{{"seq": {seq}}}')]
    return lambda store, transaction: Reports(store).put(transaction, news, 1.0)


def samples(*seqs: int) -> Write:
    news = [Report(STREAM, seq, "telemetry", 1.0, "{}") for seq in seqs]
    return lambda store, transaction: Reports(store).put(transaction, news, 1.0)


def gap(last: int) -> Write:
    news = [Gap(STREAM, 3, last, "telemetry", last - 2)]
    return lambda store, transaction: Reports(store).put(transaction, news, 1.0)


@pytest.mark.parametrize(
    ("newer", "older", "query", "found"),
    [
        (result("SUCCEEDED"), result("IN_PROGRESS"), "SELECT status FROM results", "SUCCEEDED"),
        (result("IN_PROGRESS"), result("ACCEPTED"), "SELECT status FROM results", "IN_PROGRESS"),
        (event(9), event(8), "SELECT document FROM newest_events", '{"seq": 9}'),
        (gap(9), gap(5), "SELECT last FROM dropped", 9),
        (samples(3), samples(2, 4), "SELECT upto FROM progress", 4),
    ],
)
def test_a_late_writer_does_not_undo_a_newer_row(
    database: str, newer: Write, older: Write, query: str, found: object
) -> None:
    """The older one looks while the newer is not committed yet, and writes behind it."""
    with open_store(database) as ahead, open_store(database) as behind, ThreadPoolExecutor(1) as threads:
        with ahead.transaction() as transaction:
            newer(ahead, transaction)
            late = threads.submit(write_with_retries, behind, lambda transaction: older(behind, transaction))
            eventually(lambda: _waits(database))
        late.result(10.0)
        with ahead.transaction("read") as transaction:
            assert transaction.execute(query) == [(found,)]


def _waits(database: str) -> bool:
    """Return True if a writer waits for another's lock."""
    query = "SELECT count(*) FROM pg_locks WHERE NOT granted"
    with open_store(database) as store, store.transaction("read") as transaction:
        return bool(transaction.execute(query)[0][0])


def test_two_writers_in_a_deadlock_both_succeed_in_the_end(database: str) -> None:
    with open_store(database) as one, open_store(database) as other:
        Reports(one).add([Report(Stream("fleet", "another", 1), 1, "alarm", 1.0, "{}")])
        ids = [device.id for device in Devices(one).all("fleet")]
        met, attempts = threading.Barrier(2), list[tuple[int, int]]()

        def write(store: FleetStore, order: tuple[int, int]) -> None:
            def both(transaction: Transaction) -> None:
                attempts.append(order)
                transaction.execute("UPDATE devices SET state = 'a' WHERE id = ?", order[:1])
                if attempts.count(order) == 1:
                    met.wait(10.0)
                transaction.execute("UPDATE devices SET state = 'b' WHERE id = ?", order[1:])

            write_with_retries(store, both)

        with ThreadPoolExecutor(2) as threads:
            orders = (ids[0], ids[1]), (ids[1], ids[0])
            for each in [threads.submit(write, *what) for what in zip((one, other), orders, strict=True)]:
                each.result(20.0)
        assert len(attempts) == 3


def test_two_collectors_never_wait_for_each_other_in_a_circle(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has the states of all boards, and begins the streams of half of them, in another order each."""
    monkeypatch.setattr("fleet.store.transaction._ATTEMPTS", 1)
    names = [("fleet", f"board-{number}") for number in range(40)]
    birth, together = Birth(agent_version="1"), threading.Barrier(2)

    def keep(which: int) -> None:
        with open_store(database) as store:
            writer = BatchWriter(store, Warnings(logging.getLogger(), "test"))
            for turn in range(1, 30):
                ordered = names[::-1] if (turn + which) % 2 else names
                news = [Report(Stream(*name, turn), 1, "alarm", 1.0, "{}") for name in names[which::2]]
                batch = Batch(entries=list(news), seen=set(ordered))
                for name in ordered[: 20 + which]:
                    batch.statuses[name] = Status(state="online", session=f"{turn}", boot_id="b", ts=float(turn))
                for name in ordered[10:]:
                    batch.births[name] = birth, birth.to_json().decode()
                together.wait(20.0)
                writer.write(batch)

    with ThreadPoolExecutor(2) as threads:
        for each in [threads.submit(keep, which) for which in (0, 1)]:
            each.result(60.0)


def test_many_that_open_one_new_store_at_once_all_can(where: str) -> None:
    many = 6
    together = threading.Barrier(many)

    def begin(number: int) -> None:
        together.wait(10.0)
        with open_store(where) as store:
            Reports(store).add([Report(STREAM, number, "alarm", 1.0, "{}")])

    with ThreadPoolExecutor(many) as threads:
        for each in [threads.submit(begin, number) for number in range(1, many + 1)]:
            each.result(30.0)
    with open_store(where) as store:
        assert Reports(store).position(*NAME) == (7, many)


def test_a_refusal_that_anybody_can_provoke_does_not_stand_for_the_commands_end(where: str) -> None:
    error = {"code": "command.unsigned", "message": "no signature"}
    provoked = CommandResult.model_validate({"id": "c1", "status": "REJECTED", "error": error})

    def statuses(store: FleetStore, stored: list[CommandResult]) -> str:
        for each in stored:
            write_with_retries(store, lambda t, each=each: store_results(store, t, NAME, each))  # type: ignore[misc]  # a default
        with store.transaction("read") as transaction:
            return str(transaction.execute("SELECT status FROM results")[0][0])

    with open_store(where) as store:
        accepted, done = (CommandResult.model_validate({"id": "c1", "status": s}) for s in ("ACCEPTED", "SUCCEEDED"))
        assert statuses(store, [provoked]) == "REJECTED"
        assert statuses(store, [accepted]) == "ACCEPTED"
        assert statuses(store, [provoked]) == "ACCEPTED"
        assert statuses(store, [done, provoked]) == "SUCCEEDED"
        assert statuses(store, [accepted]) == "SUCCEEDED"
