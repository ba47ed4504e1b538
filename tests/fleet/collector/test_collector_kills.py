"""Several collectors, collectors that are killed, databases that go away: what is acknowledged is stored."""

from __future__ import annotations

import contextlib
from itertools import count
from pathlib import Path
from queue import Empty

import pytest
from brokers import RealBroker, Watcher, eventually, running_mosquitto
from collector_bench import a_process, alarm, collecting, online, result, stored, stores_results
from device import TOPICS
from stored import Reports

from agent.contract.messages import Ack
from agent.mqtt.client import Endpoint, MqttClient, SessionOptions
from agent.mqtt.message import Message
from agent.mqtt.receive_queue import ReceiveQueue
from benchmarks.postgres import Postgres
from fleet.collector import collector as collector_module
from fleet.store.opening import open_store


class Board:
    """Sends unacknowledged reports again, as a board's outbox does."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._client = MqttClient(endpoint, "board", SessionOptions(subscriptions=[TOPICS.ack]))
        self.acknowledged = 0

    def __enter__(self) -> Board:
        self._client.__enter__()
        assert self._client.wait_connected(10.0)
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def send(self, upto: int) -> None:
        for seq in range(self.acknowledged + 1, upto + 1):
            self._client.publish(alarm(seq))

    def read_acks(self) -> int:
        """Return the number up to which all is acknowledged."""
        with contextlib.suppress(Empty):
            while True:
                ack = Ack.from_json(self._client.inbox.get_nowait().payload)
                if ack.epoch == 7:
                    self.acknowledged = max(self.acknowledged, ack.upto)
        return self.acknowledged


@pytest.mark.broker
@pytest.mark.trial
def test_a_collector_that_is_killed_at_any_time_loses_nothing(mosquitto: RealBroker, where: str) -> None:
    """Reports are sent again by their board, results are said once each, until the very end of each life."""
    per_life, numbers = 400, count(1)
    with Board(mosquitto.endpoint) as board, MqttClient(mosquitto.endpoint, "answering") as answering:

        def sent_until_some(upto: int) -> bool:
            answering.publish(result(next(numbers)))
            return _sent_until_some(board, upto)

        with a_process(mosquitto, where):
            eventually(lambda: stores_results(answering, where), 30.0)  # from now on the broker keeps them
        for life in range(1, 4):
            with a_process(mosquitto, where) as process:
                eventually(lambda upto=life * per_life: sent_until_some(upto), 30.0)  # type: ignore[misc]  # a default
                process.kill()
                process.wait()
            with open_store(where) as store:
                assert Reports(store).position("fleet", "board")[1] >= board.read_acks()
        with a_process(mosquitto, where):
            eventually(lambda: _sent_until_some(board, 3 * per_life) and board.read_acks() == 3 * per_life, 30.0)
            said = {f"c{number}" for number in range(next(numbers))}
            eventually(lambda: stored(where) == said, 30.0)
    with open_store(where) as store:
        assert [each.seq for each in Reports(store).reports_of("fleet", "board")] == list(range(1, 3 * per_life + 1))


def _sent_until_some(board: Board, upto: int) -> bool:
    before = board.read_acks()
    if before < upto:
        board.send(min(upto, before + 100))
    return board.read_acks() > before or before == upto


@pytest.mark.broker
def test_while_the_database_is_down_nothing_is_acknowledged_and_then_all_is(
    mosquitto: RealBroker, postgres: Postgres, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    del postgres  # which skips this where there is none; it is the others' too, so it is not stopped
    monkeypatch.setattr(collector_module, "_RETRY_S", 0.05)
    with (
        Postgres() as server,
        Board(mosquitto.endpoint) as board,
        Watcher(mosquitto.endpoint) as watcher,
        collecting(mosquitto, server.new_database()),
        MqttClient(mosquitto.endpoint, "state") as state,
    ):
        online(state, watcher)
        board.send(10)
        eventually(lambda: board.read_acks() == 10)
        server.stop()
        board.send(300)
        eventually(lambda: "collector=unreachable" in caplog.text)
        assert board.read_acks() == 10
        server.start()
        eventually(lambda: board.read_acks() == 300)


@pytest.mark.broker
def test_a_payload_that_is_too_long_is_cut_and_what_follows_it_is_not(tmp_path: Path) -> None:
    intake = ReceiveQueue(most_bytes=1 << 30)
    with running_mosquitto(tmp_path) as broker:
        endpoint = Endpoint(broker.host, broker.port, protocol="3.1.1")
        with (
            MqttClient(endpoint, "taker", SessionOptions(subscriptions=[TOPICS.event], receive_queue=intake)) as taker,
            MqttClient(endpoint, "board") as board,
        ):
            assert taker.wait_connected(10.0)
            sizes = [10, 65_536, 65_537, 3_000_000, 127, 128, 0, 20_000]
            for size in sizes:
                board.publish(Message(TOPICS.event, bytes([size % 251]) * size))
            received: list[bytes] = []
            while len(received) < len(sizes):
                more = intake.pop(1 << 30, 10.0, 0.0)
                assert more
                received += [each.payload for each in more]
    assert [len(each) for each in received] == [min(size, 65_537) for size in sizes]
    assert all(set(each) <= {size % 251} for each, size in zip(received, sizes, strict=True))
