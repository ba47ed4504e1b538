"""Device, broker and collector are killed and cut off under load: every row arrives, once, in its order."""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import loss_processes as processes
import pytest
from brokers import Mosquitto, RealBroker, eventually
from cutting_proxy import CuttingProxy
from places import TEST_PATH
from stored import Reports

from agent.contract.topics import Topics
from agent.mqtt.client import MqttClient, SessionOptions
from agent.mqtt.message import Message
from fleet.store.opening import open_store

_ALL_ARRIVE_S = 60.0


class Board:
    """A device and a collector in processes of their own; the broker is the test's."""

    def __init__(self, folder: Path, device_port: int, collector_port: int) -> None:
        self.folder = folder
        self._ports = {"device": device_port, "collector": collector_port}
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, role: str) -> None:
        command = [sys.executable, "-m", "loss_processes", role, str(self._ports[role]), str(self.folder)]
        self._running[role] = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": TEST_PATH})

    def kill(self, role: str, by: int = signal.SIGKILL) -> None:
        process = self._running.pop(role)
        assert process.poll() is None, f"the {role} ended by itself"
        process.send_signal(by)
        process.wait()

    def end(self) -> None:
        for role in list(self._running):
            self.kill(role)

    def waiting(self) -> int:
        """Rows that the device still keeps; not known before it has made its table."""
        with closing(sqlite3.connect(self.folder / processes.DATABASE)) as db:
            if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'rows'").fetchone():
                return 1
            return int(db.execute("SELECT (SELECT count(*) FROM rows) + (SELECT count(*) FROM runs)").fetchone()[0])

    def committed(self) -> dict[int, int]:
        """The greatest number of each epoch that the device's disk ever had."""
        path, committed = self.folder / processes.COMMITTED, dict[int, int]()
        for line in path.read_text().splitlines() if path.exists() else ():
            epoch, last = map(int, line.split())
            committed[epoch] = max(last, committed.get(epoch, 0))
        return committed

    def settle(self) -> None:
        """The device reports no more, and all that it had is confirmed."""
        (self.folder / processes.QUIET).touch()
        eventually(lambda: self.waiting() == 0, _ALL_ARRIVE_S)
        self.kill("collector", signal.SIGTERM)

    def check(self) -> int:
        """Every row that the device's disk ever had has arrived, and none that it had not; how many."""
        committed = self.committed()
        with open_store(self.folder / processes.COLLECTED) as store:
            reports = Reports(store)
            arrived: dict[int, list[int]] = {}
            assert reports.gaps_of("fleet", "board") == []
            for report in reports.reports_of("fleet", "board"):
                arrived.setdefault(report.stream.epoch, []).append(report.seq)
                told = json.loads(report.document)
                assert told == json.loads(processes.document(told["epoch"], told["seq"], report.kind))
                assert (told["epoch"], told["seq"]) == (report.stream.epoch, report.seq)
        for epoch, numbers in arrived.items():
            assert numbers == list(range(1, len(numbers) + 1)), f"epoch {epoch}"
            assert len(numbers) >= committed.get(epoch, 0)
        assert committed.keys() - arrived.keys() <= {epoch for epoch, last in committed.items() if last == 0}
        return sum(map(len, arrived.values()))

    def arrivals(self) -> list[tuple[int, int]]:
        """Epoch and number of each row, as they came to the collector for the first time."""
        with closing(sqlite3.connect(self.folder / processes.COLLECTED)) as db:
            return db.execute("SELECT epoch, seq FROM reports ORDER BY rowid").fetchall()


@pytest.fixture
def lasting(tmp_path: Path) -> Iterator[RealBroker]:
    """mosquitto with persistence on."""
    (tmp_path / "broker").mkdir()
    broker = Mosquitto(tmp_path / "broker", persistent=True)
    broker.start()
    yield broker
    broker.stop()


def until_the_collector_listens(broker: RealBroker) -> None:
    """Wait until the collector answers a board that comes online. A broker drops messages without a subscriber."""
    board = Topics("fleet", "another")
    with MqttClient(broker.endpoint, "another", SessionOptions(subscriptions=[board.ack])) as client:

        def is_answered() -> bool:
            client.publish(Message(board.status, b"{}"))
            return not client.inbox.empty()

        eventually(is_answered)


def killed(folder: Path, broker: RealBroker, kills: int, seed: int) -> int:
    """How many rows have arrived in the end."""
    rng = random.Random(seed)
    board = Board(folder, broker.port, broker.port)
    try:
        board.start("collector")
        board.start("device")
        for _ in range(kills):
            time.sleep(rng.uniform(0.05, 0.8))
            victim = rng.choice(["device", "device", "broker", "broker", "collector"])
            if victim == "broker":
                broker.stop()
                broker.start()
            else:
                board.kill(victim)
                board.start(victim)
        eventually(lambda: any(board.committed().values()))  # a busy machine starts no device between two kills
        board.settle()
        return board.check()
    finally:
        board.end()


@pytest.mark.trial
@pytest.mark.broker
def test_killed_at_random_thirty_times_nothing_is_lost(tmp_path: Path, lasting: RealBroker) -> None:
    assert killed(tmp_path, lasting, kills=30, seed=1) > 0


@pytest.mark.soak
@pytest.mark.broker
@pytest.mark.timeout(3600)
def test_killed_at_random_a_thousand_times_nothing_is_lost(tmp_path: Path, lasting: RealBroker) -> None:
    assert killed(tmp_path, lasting, kills=1000, seed=2) > 20_000


@pytest.mark.trial
@pytest.mark.broker
@pytest.mark.parametrize("trouble", ["delay", "cut", "half_open", "truncate"])
def test_whatever_the_network_does_nothing_is_lost(tmp_path: Path, lasting: RealBroker, trouble: str) -> None:
    rng = random.Random(trouble)
    with CuttingProxy(lasting.port) as proxy:
        board = Board(tmp_path, proxy.port, lasting.port)
        try:
            board.start("collector")
            until_the_collector_listens(lasting)
            board.start("device")
            for _ in range(5):
                eventually(proxy.carries)
                time.sleep(rng.uniform(0.1, 0.5))
                proxy.trouble(trouble, rng)
            board.settle()
            assert board.check() > 100
            assert board.arrivals() == sorted(board.arrivals()), "a broker that lives keeps the order they are sent in"
        finally:
            board.end()
