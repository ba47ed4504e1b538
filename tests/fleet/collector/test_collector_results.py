"""Results of commands, which no board sends again by itself: the broker keeps each until it is stored."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from brokers import RealBroker, Watcher, eventually, running_mosquitto
from collector_bench import ONLINE, a_process, alarm, collecting, result, stored, stores_results

from agent.mqtt.client import MqttClient
from agent.mqtt.endpoint import Protocol
from fleet.collector.batch import Part
from fleet.collector.collector import client_id_for
from fleet.store.opening import open_store

_PROTOCOLS = ["5", "3.1.1"]
_UNDER_WAY = 20  # publications that mosquitto sends before the first of them is acknowledged


@contextmanager
def unwritable(where: str) -> Iterator[None]:
    """Keep all others from committing results."""
    with open_store(where) as store, store.transaction("write") as transaction:
        if where.startswith("postgresql"):
            transaction.execute("LOCK TABLE results IN ACCESS EXCLUSIVE MODE")
        yield


class Log:
    """The log of a mosquitto about the collector's connection for results."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "mosquitto.log"
        self.settings = f"log_dest file {self._path}", "log_type all"

    def count(self, what: str) -> int:
        text = self._path.read_text(encoding="utf-8", errors="replace")
        return sum(what in line and "collector" in line and "-results" in line for line in text.splitlines())

    @property
    def listens(self) -> bool:
        return self.count("Sending SUBACK to") > 0

    @property
    def sent(self) -> int:
        return self.count("Sending PUBLISH to")

    @property
    def acknowledged(self) -> int:
        return self.count("Received PUBACK from")


def everything_was_read(port: int) -> bool:
    """Return True if no connection to this port of this machine has unread bytes (proc(5), net/tcp)."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]]
    return all(row[4].endswith(":00000000") for row in rows if row[2].endswith(f":{port:04X}"))


@pytest.mark.broker
@pytest.mark.parametrize("protocol", _PROTOCOLS)
def test_results_that_a_killed_collector_had_and_had_not_stored_come_again_by_themselves(
    where: str, tmp_path: Path, protocol: str
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(f'mqtt: {{protocol: "{protocol}"}}\n')
    options = "-c", str(config), "--fleet", "fleet"
    expected = {f"c{number}" for number in range(50)}
    log = Log(tmp_path)
    with running_mosquitto(tmp_path, *log.settings) as broker, MqttClient(broker.endpoint, "board") as board:
        with a_process(broker, where, *options) as process:
            eventually(lambda: log.listens, 30.0)
            with unwritable(where):
                for number in range(50):
                    board.publish(result(number))
                eventually(lambda: log.sent >= _UNDER_WAY and everything_was_read(broker.port))
                assert log.acknowledged == 0
                process.kill()
                process.wait()
        assert not stored(where)
        with a_process(broker, where, *options):
            eventually(lambda: stored(where) == expected, 30.0)
            eventually(lambda: log.acknowledged == 50)


@pytest.mark.broker
@pytest.mark.parametrize("protocol", _PROTOCOLS)
@pytest.mark.parametrize("client_id", ["collector", None])
def test_the_broker_keeps_results_for_a_collector_that_returns_under_its_name(
    mosquitto: RealBroker, tmp_path: Path, protocol: Protocol, client_id: str | None
) -> None:
    where = str(tmp_path / "fleet.sqlite")
    mosquitto.protocol = protocol
    with MqttClient(mosquitto.endpoint, "board") as board, Watcher(mosquitto.endpoint) as watcher:
        with collecting(mosquitto, where, client_id):
            eventually(lambda: stores_results(board, where))
        board.publish(result(1))
        watcher.expect(result(1).topic)
        with collecting(mosquitto, where, client_id):
            eventually(lambda: stores_results(board, where, 2))
    assert ("c1" in stored(where)) == (client_id is not None)


@pytest.mark.broker
def test_collectors_of_a_group_share_reports_and_each_gets_all_results(mosquitto: RealBroker, where: str) -> None:
    open_store(where).close()
    with ExitStack() as stack:
        board = stack.enter_context(MqttClient(mosquitto.endpoint, "board"))
        ours = [stack.enter_context(collecting(mosquitto, where, name, "group")) for name in ("one", None)]
        eventually(lambda: stores_results(board, where) and min(each.counts["result"] for each in ours) > 0)
        before = [each.counts["result"] for each in ours]
        for number in range(1, 31):
            board.publish(alarm(number))
            board.publish(result(number))
        board.publish(ONLINE)  # which each gets, behind all alarms that are for it
        eventually(lambda: all(each.counts["result"] >= was + 30 for each, was in zip(ours, before, strict=True)))
        eventually(lambda: all(each.counts["status"] for each in ours))
        eventually(lambda: sum(each.counts["report"] for each in ours) >= 30)
        assert min(each.counts["report"] for each in ours) < 30  # one that connects anew may get some of them again
        eventually(lambda: stored(where) == {f"c{number}" for number in range(31)})


def test_the_only_collector_of_a_part_has_the_same_client_id_at_each_start() -> None:
    names = [client_id_for(part, fleet) for part in (Part(), Part(1, 4), Part(4, 4)) for fleet in (None, "a")]
    assert names[:3] == ["tared-collector", "tared-collector-a", "tared-collector-1-of-4"]
    assert len(set(names)) == len(names)
