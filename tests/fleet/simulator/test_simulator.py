"""Simulated boards at a real broker: reports arrive, commands are carried out, and boards come back."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from brokers import RealBroker, Watcher, eventually
from collector_bench import collecting
from simulator_bench import FLEET, ask, simulating, topics, wait_for_collector
from stored import Reports
from warm_start import tared

from agent.common.errors import ConfigError
from fleet.cli.main import main
from fleet.operator import new_command, send
from fleet.simulator.options import Faults
from fleet.simulator.scene import Drift
from fleet.simulator.simulation import allow_files
from fleet.store.opening import open_store

pytestmark = [pytest.mark.broker, pytest.mark.slow]


def stored(database: Path, number: int) -> list[tuple[int, int]]:
    """Return (epoch, seq) of all reports of a board."""
    with open_store(database) as store:
        return [(each.stream.epoch, each.seq) for each in Reports(store).reports_of(FLEET, topics(number).device)]


def test_all_that_boards_make_is_stored_once_though_each_message_comes_twice(
    mosquitto: RealBroker, tmp_path: Path
) -> None:
    with collecting(mosquitto, tmp_path / "db") as collector:
        wait_for_collector(mosquitto)
        with simulating(mosquitto, 20, faults=Faults(duplicate=1.0)) as simulation:
            eventually(lambda: simulation.outcome.confirmed >= 200, 30.0)
        assert simulation.outcome.made == simulation.outcome.confirmed
        eventually(lambda: collector.counts["report"] > 1.5 * simulation.outcome.made)
    for number in range(20):
        epoch, last = simulation.made[topics(number).device]
        assert stored(tmp_path / "db", number) == [(epoch, seq) for seq in range(1, last + 1)]


def test_a_storm_brings_all_back_and_not_at_once(mosquitto: RealBroker, caplog: pytest.LogCaptureFixture) -> None:
    """A storm cuts those that have arrived by then: on a busy machine not yet all."""
    with simulating(mosquitto, 30, storms=(3.0, 10.0, 20.0)) as simulation:
        outcome = simulation.outcome
        eventually(lambda: len(outcome.arrivals) > 45 and outcome.connected == 30, 60.0)
    assert sorted(outcome.arrivals)[-15] >= 3.0
    waits_s = [float(wait) for wait in re.findall(r"retry_s=(\S+)", caplog.text)]
    assert max(waits_s) - min(waits_s) > 0.2  # drawn from a second; a busy machine may start several at once


def test_a_job_that_fails_says_so_and_one_that_is_cancelled_too(mosquitto: RealBroker) -> None:
    with simulating(mosquitto, 1, failures=1.0) as simulation:
        failed = ask(mosquitto, 0, "recalibrate")
        assert (failed.status, failed.error.code) == ("FAILED", "simulation.failure")
    assert simulation.outcome.results == {"FAILED": 1}
    with simulating(mosquitto, 1, job_s=600.0):
        stream = send(mosquitto.endpoint, topics(0), new_command("recalibrate", {}, time.time()))
        assert next(stream).status == "ACCEPTED"
        assert ask(mosquitto, 0, "cancel").status == "SUCCEEDED"
        *_, last = stream
        assert last.error is not None
        assert last.error.code == "recalibration.cancelled"


@pytest.fixture(scope="module")
def one_board(module_broker: RealBroker) -> Iterator[RealBroker]:
    """A broker with a board that has got no command yet."""
    with simulating(module_broker, 1):
        yield module_broker


@pytest.mark.parametrize(
    ("op", "arguments", "code"),
    [
        ("rollback", {}, "command.rollback"),
        ("cancel", {}, "command.nothing"),
        ("switch", {"regime": "0123"}, "command.switch"),
        ("snapshot", {}, "command.privacy"),
        ("recalibrate", {"method": "guess"}, "threshold.method"),
        ("set", {"camera.source": "x"}, "command.set"),
    ],
)
def test_an_impossible_command_fails_as_on_a_board(
    one_board: RealBroker, op: str, arguments: dict[str, Any], code: str
) -> None:
    result = ask(one_board, 0, op, **arguments)
    assert (result.status, result.error.code) == ("FAILED", code)


def test_a_setting_holds_and_a_restart_begins_another_epoch(mosquitto: RealBroker) -> None:
    with Watcher(mosquitto.endpoint) as watcher, simulating(mosquitto, 1):
        first = watcher.expect(topics(0).telemetry)["epoch"]
        result = ask(mosquitto, 0, "set", **{"mqtt.telemetry_period_s": "0.5"}).result
        assert result["values"]["mqtt.telemetry_period_s"] == 0.5
        assert ask(mosquitto, 0, "restart").status == "SUCCEEDED"
        watcher.expect(topics(0).status, state="offline")
        watcher.expect(topics(0).status, state="online")
        eventually(lambda: watcher.expect(topics(0).telemetry)["epoch"] > first)
        assert watcher.retained(topics(0).reported)["values"]


def test_drift_comes_to_one_group_after_the_other_and_is_answered(mosquitto: RealBroker) -> None:
    drift = Drift(db=6.0, after_s=0.5, spread_s=2.0, ramp_s=0.01, groups=2)
    with Watcher(mosquitto.endpoint) as watcher, simulating(mosquitto, 2, drift=drift):
        alarms: list[int] = []
        while len(alarms) < 2:
            message = watcher.next()
            alarms += [n for n in (0, 1) if message.topic == topics(n).event and b'"alarm"' in message.payload]
            alarms = list(dict.fromkeys(alarms))
        assert alarms == [0, 1]
        watcher.expect(topics(1).event, kind="job", trigger="alarm", step="COMMITTED")
        eventually(lambda: ask(mosquitto, 1, "status").result["drift"]["state"] == "calm")


def test_a_command_that_a_power_cut_interrupts_has_failed(mosquitto: RealBroker) -> None:
    faults = Faults(crash=1.0, every_s=2.0)
    with simulating(mosquitto, 1, faults=faults, down_s=(0.1, 0.2), job_s=600.0):
        result = ask(mosquitto, 0, "recalibrate")
        assert (result.status, result.error.code) == ("FAILED", "command.interrupted")


@pytest.fixture
def no_files_left() -> Iterator[None]:
    """The limit is as it was."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("no_files_left")
def test_more_boards_than_a_process_may_have_files_are_refused_before_any_connects() -> None:
    with pytest.raises(ConfigError, match=r"simulation\.files"):
        allow_files(10**9)


def test_the_command_simulates_and_prints_the_outcome(mosquitto: RealBroker) -> None:
    wanted = ["--devices", 5, "--seconds", 2, "--period", 0.2, "--port", mosquitto.port]
    printed = json.loads(tared("fleet", "simulate", *wanted, "--json").stdout)
    assert (printed["device_count"], printed["connected"], printed["admitted"]) == (5, 5, 5)
    assert printed["made"] >= 20


@pytest.mark.parametrize("faults", ["crash=often", "meteor=1", "crash"])
def test_unknown_faults_are_refused(faults: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fleet", "simulate", "--devices", "1", "--seconds", "1", "--faults", faults]) == 2
    assert capsys.readouterr().err.startswith("error: cli.arguments: ")
