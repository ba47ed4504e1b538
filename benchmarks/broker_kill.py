"""What a SIGKILL of the broker loses: rows that boards have sent, commands that wait, and what is retained.

    python -m benchmarks.broker_kill [--mosquitto PATH] [--sqlite PLUGIN] [--rows 1000] [--rounds 3]

A board sends numbered rows at a steady rate while the collector is away, whose session the broker keeps. In the midst
of it the broker is killed and started again; the collector comes back, and everything has time to arrive. Rows count as
acknowledged when the outbox has let go of them: after the broker's PUBACK, or after a collector's `ack` where one is
required. Beside them, messages to a session that is away, as commands in a queue, and retained documents.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import socket
import sqlite3
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from agent.contract.messages import Status
from agent.contract.topics import Topics
from agent.mqtt.client import Endpoint, MqttClient, SessionOptions
from agent.mqtt.config import OutboxConfig
from agent.mqtt.message import Message, MessageSource
from agent.mqtt.receive_queue import ReceiveQueue
from agent.uplink.outbox import Outbox
from agent.uplink.outbox_store import ALARM
from fleet.collector.collector import CLIENT_ID, Collector
from fleet.store.opening import open_store

TOPICS = Topics("fleet", "board")
_THERE = Status(state="online", session="s", boot_id="b", ts=1.0)
RATE = 200.0  # rows a second
QUEUED = 200  # messages to a session that is away, and as many retained documents
PATIENCE_S = 30.0
_SAVED_S = 2.5  # by then a broker that saves each second has saved what is there
_QUIET_S = 3.0  # without anything new, after which all has arrived


@dataclass
class Broker:
    """A mosquitto with these settings, in a folder of its own."""

    program: str
    settings: Sequence[str]
    folder: Path
    port: int = 0
    _process: subprocess.Popen[bytes] | None = None

    def __post_init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        lines = ["user root", f"listener {self.port} 127.0.0.1", "allow_anonymous true", "max_queued_messages 0"]
        lines += [each.format(folder=self.folder) for each in self.settings]
        (self.folder / "mosquitto.conf").write_text("\n".join(lines) + "\n")

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint("127.0.0.1", self.port)

    def start(self) -> None:
        command = [self.program, "-c", str(self.folder / "mosquitto.conf")]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until(self._listens)

    def kill(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0


@dataclass
class Counted(MessageSource):
    """Messages of a sender, and which of them the broker has acknowledged."""

    messages: list[Message]
    acknowledged: set[bytes] = field(default_factory=set)
    _next: int = 0

    def pop(self) -> Message | None:
        if self._next == len(self.messages):
            return None
        self._next += 1
        return self.messages[self._next - 1]

    def delivered(self, message: Message) -> None:
        self.acknowledged.add(message.payload)

    def put_back(self, messages: Sequence[Message]) -> None:
        """Sent once: what had no answer when the broker died is not counted."""


def until(holds: Callable[[], bool], within_s: float = PATIENCE_S) -> None:
    """Wait until this holds. Raises TimeoutError."""
    ends_s = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > ends_s:
            raise TimeoutError
        time.sleep(0.02)


def settled(count: Callable[[], int]) -> int:
    """Return the count once it has not changed for a while."""
    last, since_s = count(), time.monotonic()
    while time.monotonic() < since_s + _QUIET_S:
        time.sleep(0.1)
        if (now := count()) != last:
            last, since_s = now, time.monotonic()
    return last


@contextmanager
def collecting(broker: Broker, where: Path) -> Iterator[Collector]:
    stopping = threading.Event()
    collector = Collector(broker.endpoint, open_store(where))
    thread = threading.Thread(target=collector.run, args=(stopping.is_set,))
    thread.start()
    try:
        yield collector
    finally:
        stopping.set()
        thread.join()


def stored(where: Path) -> set[int]:
    with open_store(where) as store, store.transaction("read") as transaction:
        return {int(seq) for (seq,) in transaction.execute("SELECT seq FROM reports")}


def lose_rows(broker: Broker, folder: Path, confirm: Literal["broker", "collector"], rows: int) -> tuple[int, int]:
    """Return how many rows the outbox has let go of, and how many of them never arrived."""
    where = folder / "fleet.sqlite"
    session = SessionOptions(subscriptions=[f"tared/v1/+/+/{kind}" for kind in ("telemetry", "event")], session_s=3600)
    with MqttClient(broker.endpoint, CLIENT_ID, session) as keeper:
        keeper.wait_connected(PATIENCE_S)
    time.sleep(_SAVED_S)
    queue = ReceiveQueue(1 << 24)
    config = OutboxConfig(confirm=confirm, commit_s=0.0, backlog_per_s=10_000.0)
    with (
        ExitStack() as stack,
        Outbox(folder / "outbox.sqlite", TOPICS, config) as outbox,
        MqttClient(broker.endpoint, "board", SessionOptions(subscriptions=[TOPICS.ack], sources=[outbox])) as board,
    ):
        outbox.on_due = board.wake
        reader: MqttClient | None = None
        for number in range(rows):
            outbox.put("alarm", ALARM, _row)
            time.sleep(1.0 / RATE)
            if number == rows // 2:
                broker.kill()
                broker.start()
                if confirm == "broker":  # back before the board: what comes after the kill finds it there
                    reader = stack.enter_context(
                        MqttClient(broker.endpoint, CLIENT_ID, replace(session, receive_queue=queue))
                    )
                    reader.wait_connected(PATIENCE_S)
        if reader is not None:
            read: set[int] = set()

            def count() -> int:
                for arrival in queue.pop(1 << 20, 0.0, 0.0):
                    read.add(int(json.loads(arrival.payload)["seq"]))
                    queue.confirm(1)
                return len(read)

            settled(count)
            return rows - len(outbox), len(set(range(1, rows + 1)) - read) - len(outbox)
        with collecting(broker, where) as collector:
            until(lambda: all(collector.connected.values()))
            board.publish(Message(TOPICS.status, _THERE.to_json(), retain=True))  # as with each connection

            def arrived() -> int:
                while not board.inbox.empty():
                    document = json.loads(board.inbox.get().payload)
                    outbox.acknowledge(document["epoch"], document["upto"])
                return len(stored(where))

            with suppress(TimeoutError):  # an outbox sends again after a while
                until(lambda: arrived() == rows)
    with closing(sqlite3.connect(folder / "outbox.sqlite")) as db:
        kept = {int(seq) for (seq,) in db.execute("SELECT seq FROM rows")}  # it would send them again
    return rows - len(kept), len(set(range(1, rows + 1)) - stored(where) - kept)


def _row(epoch: int, seq: int) -> bytes:
    return json.dumps({"epoch": epoch, "seq": seq, "ts": time.time(), "kind": "alarm"}).encode()


def lose_queued(broker: Broker, retain: bool) -> tuple[int, int]:
    """Return how many messages the broker had acknowledged, and how many of them nobody gets after its kill."""
    topic = "retained/{}" if retain else "commands"
    options = SessionOptions(subscriptions=[topic.format("+")], session_s=3600)
    if not retain:
        with MqttClient(broker.endpoint, "away", options) as away:
            away.wait_connected(PATIENCE_S)
    time.sleep(_SAVED_S)
    messages = [Message(topic.format(n), b"%d" % n, retain=retain) for n in range(QUEUED)]
    source = Counted(messages)
    with MqttClient(broker.endpoint, "operator", SessionOptions(sources=[source])):
        until(lambda: len(source.acknowledged) == QUEUED)
        broker.kill()
    broker.start()
    got: set[bytes] = set()
    with MqttClient(broker.endpoint, "away", options) as away:

        def count() -> int:
            while not away.inbox.empty():
                got.add(away.inbox.get().payload)
            return len(got)

        away.wait_connected(PATIENCE_S)
        settled(count)
    return len(source.acknowledged), len(source.acknowledged - got)


def main() -> None:
    """Print a table: lost of acknowledged, in all rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mosquitto", default=shutil.which("mosquitto") or "/usr/sbin/mosquitto", metavar="PATH")
    parser.add_argument("--sqlite", metavar="PLUGIN", help="mosquitto_persist_sqlite.so of a mosquitto 2.1")
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    saved = ["persistence true", "persistence_location {folder}/"]
    kinds = {
        "nothing kept": ["persistence false"],
        "autosave, as it comes (1800 s)": saved,
        "autosave each second": [*saved, "autosave_interval 1"],
    }
    if options.sqlite:
        plugin = [f"global_plugin {options.sqlite}", "plugin_opt_db_file {folder}/mosquitto.sqlite"]
        kinds["persist-sqlite, as it comes"] = plugin
        kinds["persist-sqlite, flushed at once"] = [*plugin, "plugin_opt_flush_period 0", "plugin_opt_sync full"]
    print(f"{'lost of acknowledged':34} {'rows, broker':>14} {'rows, collector':>16} {'queued':>10} {'retained':>10}")
    for name, settings in kinds.items():
        totals = [[0, 0] for _ in range(4)]
        for _ in range(options.rounds):
            for total, measure in zip(totals, _measures(options.rows), strict=True):
                with tempfile.TemporaryDirectory() as folder:
                    broker = Broker(options.mosquitto, settings, Path(folder))
                    broker.start()
                    try:
                        acknowledged, lost = measure(broker, Path(folder))
                    finally:
                        broker.kill()
                    total[0] += lost
                    total[1] += acknowledged
        cells = [f"{lost}/{acknowledged}" for lost, acknowledged in totals]
        print(f"{name:34} {cells[0]:>14} {cells[1]:>16} {cells[2]:>10} {cells[3]:>10}", flush=True)


def _measures(rows: int) -> list[Callable[[Broker, Path], tuple[int, int]]]:
    return [
        lambda broker, folder: lose_rows(broker, folder, "broker", rows),
        lambda broker, folder: lose_rows(broker, folder, "collector", rows),
        lambda broker, _: lose_queued(broker, retain=False),
        lambda broker, _: lose_queued(broker, retain=True),
    ]


if __name__ == "__main__":
    main()
