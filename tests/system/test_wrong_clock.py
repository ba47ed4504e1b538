"""Clocks that are years wrong, and jump while a daemon and a collector run: nothing is lost, and nothing is rash."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from brokers import RealBroker, Watcher, eventually
from daemon_life import LIMIT_S, PLAYER, TOPICS, order
from stored import Reports
from worlds import World
from wrong_clock import WrongClock

from fleet.store.opening import open_store

JUMPS = (3650.0, 0.0, -3650.0, 36_500.0, -20_000.0, 0.0)  # days

pytestmark = [pytest.mark.trial, pytest.mark.broker]


def test_clocks_that_jump_cost_nothing(
    calibrated_world: World, any_broker: RealBroker, wrong_clock: WrongClock, tmp_path: Path
) -> None:
    where, log = tmp_path / "fleet.sqlite", tmp_path / "log"
    mqtt = {"host": any_broker.host, "port": any_broker.port, "telemetry_period_s": 0.5, "outbox": {"commit_s": 0.1}}
    calibrated_world.change(
        mqtt={**mqtt, "outbox": {"commit_s": 0.1, "confirm": "collector"}},
        camera={"source": "rtsp://camera"},
        observe={"period_s": 0.2, "alert_period_s": 0.1},
    )
    scene = calibrated_world.folder / "scene"
    scene.write_text(str(calibrated_world.folder / "clip.avi"))
    collect = ["-m", "fleet.cli", "fleet", "collect", "--db", str(where), "--port", str(any_broker.port)]
    collect += ["--keep-days", "1", "--forget-days", "1"]
    commands = [["-c", PLAYER, str(scene), *calibrated_world.arguments()], collect]
    with Watcher(any_broker.endpoint) as watcher, log.open("wb") as output:
        processes = [
            subprocess.Popen([sys.executable, *each], env=wrong_clock.environment, stdout=output, stderr=output)
            for each in commands
        ]
        try:
            watcher.expect(TOPICS.ack)
            observed = 0
            for days in JUMPS:
                wrong_clock.set(days)
                watcher.all()
                for _ in range(6):
                    sample = watcher.expect(TOPICS.telemetry)
                    assert sample["cameras"]["camera"]["fps"] > 0.0
                assert abs(sample["ts"] - time.time() - days * 86_400.0) < 60.0
                assert sample["cameras"]["camera"]["fidelity"]["n"] > observed, "the observer goes on"
                observed = sample["cameras"]["camera"]["fidelity"]["n"]
            assert order(any_broker, "recalibrate", frames="8").status == "SUCCEEDED"
            wrong_clock.set(JUMPS[0])
            assert order(any_broker, "recalibrate", frames="8").status == "EXPIRED"
            wrong_clock.set(0.0)
            watcher.all()
            last = watcher.expect(TOPICS.telemetry)
            eventually(lambda: _position(where) >= (last["epoch"], last["seq"]), LIMIT_S)
        finally:
            for process in processes:
                process.send_signal(signal.SIGTERM)
            codes = [process.wait(LIMIT_S) for process in processes]
    text = log.read_text()
    assert codes == [0, 0], text
    assert "Traceback" not in text
    assert "event=alarm" not in text, "a clock is no drift"
    with open_store(where) as store:
        reports = Reports(store)
        epoch, upto = reports.position(*TOPICS_NAME)
        numbers = sorted(each.seq for each in reports.reports_of(*TOPICS_NAME) if each.stream.epoch == epoch)
        assert numbers == [*range(1, len(numbers) + 1)], "none was lost, and none deleted"
        assert len(numbers) >= upto
        assert not [*reports.gaps_of(*TOPICS_NAME)]


TOPICS_NAME = (TOPICS.fleet, TOPICS.device)


def _position(where: Path) -> tuple[int, int]:
    with open_store(where) as store:
        return Reports(store).position(*TOPICS_NAME)
