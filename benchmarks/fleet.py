"""How much telemetry a collector stores and acknowledges, beside what the broker relays.

    python -m benchmarks.fleet [--rows 20000] [--rounds 5] [--json | --markdown]

Needs mosquitto with its clients, and PostgreSQL. Eight publishers send telemetry of about 300 bytes at QoS 1 as fast as
the broker takes it, through one mosquitto: to one mosquitto_sub, then to one collector, in turns on one machine. A rate
is all messages over the time from the first publisher's start until the last has arrived, or is acknowledged to its
board. Both databases wait for the disk at each commit. CPU time says what a row takes of each process, also where
others keep the machine busy: the bars are on it. Two collectors carry twice what one does if a row takes no more of
them together, and if the broker gives each its half; on two cores their rate is limited by everybody's CPU time.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from queue import Empty

import psutil
from pydantic import JsonValue

from agent.contract.messages import Ack, CameraTelemetry, FidelityReport, Latency, Status, Telemetry
from agent.contract.topics import Topics
from agent.mqtt.client import Endpoint, MqttClient, SessionOptions
from agent.mqtt.message import Message
from benchmarks.postgres import Postgres
from benchmarks.report import Section, add_output_option, at_least, bars_section, publish

_PUBLISHERS = 8
_EPOCH = 1_760_000_000
_STORES = "SQLite", "PostgreSQL", "PostgreSQL, two collectors"
_ROWS_OF_A_CORE = 8000  # a second
_OF_ONE = 0.9  # rows a second of a core, two collectors beside one
_LESSER_HALF = 0.4  # the part of the rows that the less busy of two collectors gets, by CPU time
# Nothing is dropped for a reader that is slower than the publishers: what is sent is what arrives.
_BROKER = "user root\nlistener {port} 127.0.0.1\nallow_anonymous true\nmax_queued_messages 0\n"
_PATH = os.environ.get("PATH", "") + ":/usr/sbin"
_PATIENCE_S = 300.0


def main() -> None:
    """Print each round's rates, and the bars."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000, help="of each of the eight publishers (20000)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--port", type=int, default=18_993)
    add_output_option(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, Postgres(durable=True) as server:
        folder = Path(name)
        size = write_rows(folder, options.rows)
        with broker(folder, options.port) as (endpoint, broker_pid):
            spent = Spent({"mosquitto": broker_pid, "PostgreSQL": server.pid}, options.rows * _PUBLISHERS)
            found = [_round(folder, endpoint, options.rows, server, spent) for _ in range(options.rounds)]
    title = f"{_PUBLISHERS} publishers, {options.rows} rows of {size} bytes each"
    table = Section(title, ["round", *(name for store in _STORES for name in ("relayed", store))])
    for number, rates in enumerate(found, start=1):
        cells = (f"{rate:.0f}/s" for pair in rates.values() for rate in pair)
        table.rows.append([str(number), *cells])
    costs = Section("CPU time of a row, microseconds, median", ["run", "mosquitto", "PostgreSQL", "collectors"])
    medians = spent.medians()
    for run, each in medians.items():
        costs.rows.append([run, *(f"{each[name]:.1f}" for name in costs.columns[1:])])
    of_a_core = {store: 1e6 / medians[f"stored in {store}"]["collectors"] for store in _STORES}
    one, two = _STORES[1:]
    bars = [
        at_least(f"{store}: rows/s of a collector's core", _ROWS_OF_A_CORE, of_a_core[store], "/s") for store in _STORES
    ]
    bars.append(at_least("two collectors: rows/s of a core, of what one has", _OF_ONE, of_a_core[two] / of_a_core[one]))
    bars.append(at_least("two collectors: CPU time of the less busy one", _LESSER_HALF, spent.lesser_part(two)))
    publish([table, costs, bars_section(bars)], options)


class Spent:
    """CPU time of these processes and their children, by the rows of a run."""

    def __init__(self, pids: Mapping[str, int], rows: int) -> None:
        self._pids = pids
        self._rows = rows
        self._found: dict[str, list[dict[str, float]]] = {}
        self._lesser_parts: dict[str, list[float]] = {}

    @contextmanager
    def during(self, run: str, collectors: Sequence[int] = ()) -> Iterator[None]:
        """collectors: the processes that count as such, from now on: their start is not part of a row."""
        before = {name: _cpu_s(pid) for name, pid in self._pids.items()}
        started = {pid: _cpu_s(pid) for pid in collectors}
        yield
        spent = {name: _cpu_s(pid) - before[name] for name, pid in self._pids.items()}
        by_collector = [_cpu_s(pid) - since for pid, since in started.items()]
        spent["collectors"] = sum(by_collector)
        if by_collector:
            self._lesser_parts.setdefault(run, []).append(min(by_collector) / sum(by_collector))
        self._found.setdefault(run, []).append({name: each / self._rows * 1e6 for name, each in spent.items()})

    def medians(self) -> dict[str, dict[str, float]]:
        """By run and process, in microseconds."""
        return {
            run: {name: statistics.median(each[name] for each in found) for name in found[0]}
            for run, found in self._found.items()
        }

    def lesser_part(self, store: str) -> float:
        """The part of the collectors' CPU time that the less busy one had, the median of all rounds."""
        return statistics.median(self._lesser_parts[f"stored in {store}"])


def _cpu_s(pid: int) -> float:
    process = psutil.Process(pid)
    times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def _round(
    folder: Path, endpoint: Endpoint, rows: int, server: Postgres, spent: Spent
) -> dict[str, tuple[float, float]]:
    """By store: what is relayed, and then stored, per second."""
    rates = {}
    for store in _STORES:
        place = str(folder / f"{time.monotonic_ns()}.sqlite") if store == "SQLite" else server.new_database()
        relayed = relay(folder, endpoint, rows, spent)
        rates[store] = relayed, collect(endpoint, folder, rows, (store, place), spent)
    return rates


def write_rows(folder: Path, rows: int) -> int:
    """A file of documents for each publisher; the size of one in bytes."""
    camera = CameraTelemetry(
        fps=29.97,
        dropped={"late": 2},
        latency_ms=Latency(p50=4.02, p99=10.71),
        drift={"state": "calm", "gain_db": 0.21},
        fidelity=FidelityReport(estimate=0.989, low=0.918, high=1.0, n=98),
    )
    size = 0
    for number in range(_PUBLISHERS):
        with (folder / f"{number}.jsonl").open("wb") as file:
            for seq in range(1, rows + 1):
                health: dict[str, JsonValue] = {"memory_bytes": 812345344, "cpu": 0.42}
                row = Telemetry(epoch=_EPOCH, seq=seq, ts=_EPOCH + seq / 8, cameras={"street": camera}, health=health)
                size = file.write(row.to_json() + b"\n") - 1
    return size


def relay(folder: Path, endpoint: Endpoint, rows: int, spent: Spent) -> float:
    """Messages per second from the publishers to one mosquitto_sub."""
    count = rows * _PUBLISHERS
    listener = ["mosquitto_sub", "-p", str(endpoint.port), "-q", "1", "-t", "tared/v1/+/+/telemetry", "-C", str(count)]
    with (folder / "relayed").open("wb") as output, subprocess.Popen(listener, stdout=output) as process:
        time.sleep(0.5)  # nothing announces that it listens
        with spent.during("relayed"), publishing(folder, endpoint, "relay"):
            started = time.monotonic()
            process.wait(_PATIENCE_S)
            return count / (time.monotonic() - started)


def collect(endpoint: Endpoint, folder: Path, rows: int, store: tuple[str, str], spent: Spent) -> float:
    """Rows per second from the publishers into a database, and acknowledged. store: its name, and where it is."""
    name, database = store
    command = [sys.executable, "-m", "fleet.cli", "fleet", "collect", "--db", database, "--port", str(endpoint.port)]
    command += ["--share", "benchmark"] if "two" in name else []
    fleet = f"bench{time.monotonic_ns()}"
    count = 2 if "two" in name else 1
    with (
        MqttClient(endpoint, "benchmark", SessionOptions(subscriptions=[f"tared/v1/{fleet}/+/ack"])) as watcher,
        ExitStack() as stack,
    ):
        ears, collectors = Ears(watcher), []
        for _ in range(count):
            collectors.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
            stack.enter_context(collectors[-1])
            stack.callback(collectors[-1].terminate)
        until(lambda: ears.greeted_by(fleet, count), pause_s=0.1)
        pids = [each.pid for each in collectors]
        with spent.during(f"stored in {name}", pids), publishing(folder, endpoint, fleet):
            started = time.monotonic()
            until(lambda: sum(upto == rows for upto in ears.hear().upto.values()) == _PUBLISHERS, pause_s=0.005)
            seconds = time.monotonic() - started
    return rows * _PUBLISHERS / seconds


class Ears:
    """What collectors acknowledge. upto: by topic, up to which number; answers: how many there were."""

    def __init__(self, watcher: MqttClient) -> None:
        self.upto: dict[str, int] = {}
        self.answers: Counter[str] = Counter()
        self._watcher = watcher

    def hear(self) -> Ears:
        with suppress(Empty):
            while True:
                message = self._watcher.inbox.get_nowait()
                upto = Ack.from_json(message.payload).upto
                self.upto[message.topic] = max(upto, self.upto.get(message.topic, 0))  # two collectors overtake
                self.answers[message.topic] += 1
        return self

    def greeted_by(self, fleet: str, collectors: int) -> bool:
        """Whether so many answer who comes online, within a second."""
        topics = Topics(fleet, "greeter")
        self.answers.clear()
        there = Status(state="online", session="s", boot_id="b", ts=0.0)
        self._watcher.publish(Message(topics.status, there.to_json()))
        give_up_at = time.monotonic() + 1.0
        while time.monotonic() < give_up_at and self.hear().answers[topics.ack] < collectors:
            time.sleep(0.02)
        return self.answers[topics.ack] >= collectors


def until(holds: Callable[[], bool], pause_s: float) -> None:
    """Wait for it. Raises TimeoutError."""
    give_up_at = time.monotonic() + _PATIENCE_S
    while not holds():
        if time.monotonic() > give_up_at:
            raise TimeoutError(f"it did not happen within {_PATIENCE_S:.0f} s")
        time.sleep(pause_s)


@contextmanager
def publishing(folder: Path, endpoint: Endpoint, fleet: str) -> Iterator[None]:
    """Eight mosquitto_pub, a document per line."""
    publishers = []
    for number in range(_PUBLISHERS):
        topic = Topics(fleet, f"board{number}").telemetry
        command = ["mosquitto_pub", "-p", str(endpoint.port), "-q", "1", "-t", topic, "-l"]
        with (folder / f"{number}.jsonl").open("rb") as rows:
            publishers.append(subprocess.Popen(command, stdin=rows))
    try:
        yield
    finally:
        for publisher in publishers:
            publisher.wait(_PATIENCE_S)


@contextmanager
def broker(folder: Path, port: int) -> Iterator[tuple[Endpoint, int]]:
    """A mosquitto on this port, and its process."""
    found = shutil.which("mosquitto", path=_PATH)
    if found is None:
        raise SystemExit("mosquitto is not installed: apt-get install mosquitto mosquitto-clients")
    (folder / "mosquitto.conf").write_text(_BROKER.format(port=port))
    with subprocess.Popen([found, "-c", str(folder / "mosquitto.conf")], stderr=subprocess.DEVNULL) as process:
        try:
            with MqttClient(Endpoint("127.0.0.1", port), "probe") as probe:
                probe.wait_connected(10.0)
            yield Endpoint("127.0.0.1", port), process.pid
        finally:
            process.terminate()


if __name__ == "__main__":
    main()
