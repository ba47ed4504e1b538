"""How many rows of telemetry a collector stores and acknowledges, beside what the broker relays: `python -m benchmarks.fleet`.

Eight publishers send telemetry of about 300 bytes at QoS 1 as fast as the broker takes it, through one mosquitto: first to
one mosquitto_sub, then to one collector, in turns on the same machine. A rate is all messages over the time from the first
publisher's start until the last one has arrived, or is acknowledged to its board. The databases wait for the disk.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Empty

from agent.messages import Ack, CameraTelemetry, Fidelity, Latency, Status, Telemetry
from agent.mqtt import Endpoint, MqttClient
from agent.publishing import Message
from agent.topics import Topics
from benchmarks.postgres import Postgres

_PUBLISHERS = 8
_EPOCH = 1_760_000_000
_BROKER = "user root\nlistener {port} 127.0.0.1\nallow_anonymous true\nmax_queued_messages 0\n"
_PATH = os.environ.get("PATH", "") + ":/usr/sbin"
_PATIENCE_S = 300.0


def main() -> None:
    """Print each round, and the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=20_000, help="of each of the eight publishers (20000)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--stores", nargs="*", default=["sqlite", "postgresql"])
    parser.add_argument("--port", type=int, default=18_993)
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as name,
        _broker(Path(name), options.port) as endpoint,
        _databases(Path(name), options.stores) as new,
    ):
        folder = Path(name)
        size = write_rows(folder, options.rows)
        print(
            f"{platform.machine()}, {os.cpu_count()} cores, {cpu()}; {_PUBLISHERS} x {options.rows} rows of {size} bytes"
        )
        ratios: dict[str, list[float]] = {store: [] for store in options.stores}
        for round_ in range(options.rounds):
            for store in options.stores:
                relayed = relay(folder, endpoint, options.rows)
                stored = collect(folder, endpoint, options.rows, new(store))
                ratios[store].append(stored / relayed)
                print(
                    f"round {round_ + 1}: relayed {relayed:7.0f}/s, {store} {stored:7.0f}/s, {stored / relayed:.2f} of it",
                    flush=True,
                )
        for store, found in ratios.items():
            print(
                f"{store}: median {statistics.median(found):.2f} of what is relayed, from {min(found):.2f} to {max(found):.2f}"
            )


def write_rows(folder: Path, rows: int) -> int:
    """A file of documents for each publisher; the size of one in bytes."""
    fidelity = Fidelity(estimate=0.989, low=0.918, high=1.0, n=98)
    camera = CameraTelemetry(
        fps=29.97,
        dropped={"late": 2},
        latency_ms=Latency(p50=4.02, p99=10.71),
        drift={"state": "calm", "gain_db": 0.21},
        fidelity=fidelity,
    )
    health = {"memory_bytes": 812345344, "cpu": 0.42}
    size = 0
    for number in range(_PUBLISHERS):
        with (folder / f"{number}.jsonl").open("wb") as file:
            for seq in range(1, rows + 1):
                sample = Telemetry(
                    epoch=_EPOCH, seq=seq, ts=_EPOCH + seq / 8, cameras={"street": camera}, health=health
                )
                size = file.write(sample.to_json() + b"\n") - 1
    return size


def relay(folder: Path, endpoint: Endpoint, rows: int) -> float:
    """Messages per second from the publishers to one mosquitto_sub."""
    listener = [
        "mosquitto_sub",
        "-p",
        str(endpoint.port),
        "-q",
        "1",
        "-t",
        "tared/v1/+/+/telemetry",
        "-C",
        str(rows * _PUBLISHERS),
    ]
    with (folder / "relayed").open("wb") as output, subprocess.Popen(listener, stdout=output) as process:
        time.sleep(0.5)  # nobody tells when it listens
        with publishing(folder, endpoint, "relay"):
            started = time.monotonic()
            process.wait(_PATIENCE_S)
            return rows * _PUBLISHERS / (time.monotonic() - started)


def collect(folder: Path, endpoint: Endpoint, rows: int, database: str) -> float:
    """Rows per second from the publishers into the database, and acknowledged."""
    command = [sys.executable, "-m", "agent.cli", "fleet", "collect", "--db", database, "--port", str(endpoint.port)]
    fleet = f"bench{time.monotonic_ns()}"
    with (
        MqttClient(endpoint, "benchmark", subscriptions=[f"tared/v1/{fleet}/+/ack"]) as watcher,
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as collector,
    ):
        heard = follow(watcher)
        until(lambda: _greeted(watcher, fleet, heard), pause_s=0.2)
        with publishing(folder, endpoint, fleet):
            started = time.monotonic()
            until(lambda: sum(upto == rows for upto in heard().values()) == _PUBLISHERS, pause_s=0.005)
            seconds = time.monotonic() - started
        collector.terminate()
    return rows * _PUBLISHERS / seconds


def follow(watcher: MqttClient) -> Callable[[], dict[str, int]]:
    """By topic, up to which number the newest acknowledgement goes."""
    heard: dict[str, int] = {}

    def newest() -> dict[str, int]:
        with suppress(Empty):
            while True:
                message = watcher.inbox.get_nowait()
                heard[message.topic] = Ack.from_json(message.payload).upto
        return heard

    return newest


def _greeted(watcher: MqttClient, fleet: str, heard: Callable[[], dict[str, int]]) -> bool:
    """Whether the collector answers who comes online."""
    topics = Topics(fleet, "greeter")
    watcher.publish(Message(topics.status, Status(state="online", session="s", boot_id="b", ts=0.0).to_json()))
    return topics.ack in heard()


def until(holds: Callable[[], bool], pause_s: float) -> None:
    give_up_at = time.monotonic() + _PATIENCE_S
    while not holds():
        if time.monotonic() > give_up_at:
            raise TimeoutError("it did not happen in time")
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
def _broker(folder: Path, port: int) -> Iterator[Endpoint]:
    found = shutil.which("mosquitto", path=_PATH)
    if found is None:
        raise SystemExit("mosquitto is not installed: apt-get install mosquitto mosquitto-clients")
    (folder / "mosquitto.conf").write_text(_BROKER.format(port=port))
    with subprocess.Popen([found, "-c", str(folder / "mosquitto.conf")], stderr=subprocess.DEVNULL) as process:
        try:
            endpoint = Endpoint("127.0.0.1", port)
            with MqttClient(endpoint, "probe") as probe:
                probe.wait_connected(10.0)
            yield endpoint
        finally:
            process.terminate()


@contextmanager
def _databases(folder: Path, stores: list[str]) -> Iterator[Callable[[str], str]]:
    """What makes the address of a new one, of each kind."""
    if "postgresql" not in stores:
        yield lambda _: str(folder / f"{time.monotonic_ns()}.sqlite")
        return
    with Postgres(durable=True) as server:
        yield (
            lambda store: (
                server.new_database() if store == "postgresql" else str(folder / f"{time.monotonic_ns()}.sqlite")
            )
        )


def cpu() -> str:
    """The processor's name."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return json.dumps(platform.processor())


if __name__ == "__main__":
    main()
