"""A collector that runs, and what a board reports to it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from brokers import RealBroker, Watcher
from device import TOPICS
from warm_start import WarmProcess

from agent.contract.commands import CommandResult
from agent.contract.messages import Status
from agent.mqtt.client import Endpoint, MqttClient
from agent.mqtt.message import Message
from fleet.collector.collector import Collector
from fleet.devices.reports import Report, Stream
from fleet.store.opening import open_store

STREAM = Stream("fleet", "board", 7)
_THERE = Status(state="online", session="s", boot_id="b", ts=1.0)
ONLINE = Message(TOPICS.status, _THERE.to_json(), retain=True)  # a client that gets it has got all before it


def report(seq: int, stream: Stream = STREAM) -> Report:
    return Report(stream, seq, "alarm", 1.5, json.dumps({"seq": seq}))


def alarm(seq: int, **fields: Any) -> Message:
    return Message(TOPICS.event, json.dumps({"epoch": 7, "seq": seq, "ts": 0.0, "kind": "alarm", **fields}).encode())


def result(number: int) -> Message:
    """Return the result of the command of this number, `c1` and so on."""
    name = f"c{number}"
    return Message(f"{TOPICS.command}/{name}/result", CommandResult(id=name, status="SUCCEEDED").to_json())


def stored(where: str) -> set[str]:
    """Return the ids of the commands whose results are in the store."""
    with open_store(where) as store, store.transaction("read") as transaction:
        return {str(name) for (name,) in transaction.execute("SELECT command FROM results")}


def stores_results(board: MqttClient, where: str, number: int = 0) -> bool:
    """Publish this result; return True once a collector has stored it."""
    board.publish(result(number))
    return f"c{number}" in stored(where)


def online(board: MqttClient, watcher: Watcher) -> None:
    """Wait until a collector has acknowledged: from here on it is subscribed."""
    board.publish(ONLINE)
    watcher.expect(TOPICS.ack, epoch=0, upto=0)


@contextmanager
def a_process(broker: RealBroker, where: str, *options: str) -> Iterator[WarmProcess]:
    arguments = ["fleet", "collect", "--db", where, "--port", str(broker.port), *options]
    process = WarmProcess(arguments)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextmanager
def collecting(
    endpoint: RealBroker | Endpoint, where: str | Path, client_id: str | None = "collector", share: str | None = None
) -> Iterator[Collector]:
    stopping = threading.Event()
    at = endpoint if isinstance(endpoint, Endpoint) else endpoint.endpoint
    made = Collector(at, open_store(where), client_id, share=share)
    thread = threading.Thread(target=made.run, args=(stopping.is_set,))
    thread.start()
    try:
        yield made
    finally:
        stopping.set()
        thread.join(10.0)
        assert not thread.is_alive()


@contextmanager
def collected(broker: RealBroker, where: str | Path) -> Iterator[tuple[MqttClient, Watcher, Collector]]:
    """Run a collector, once it has acknowledged the status of a board; yield the board's client, a watcher, and it."""
    with (
        Watcher(broker.endpoint) as watcher,
        MqttClient(broker.endpoint, "board") as board,
        collecting(broker, where) as made,
    ):
        online(board, watcher)
        yield board, watcher, made
