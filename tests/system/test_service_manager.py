"""The daemon as a service: a hang is ended and mended within WatchdogSec, and what is no hang is left alone."""

from __future__ import annotations

import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from service_driver import DRIVER
from service_manager import ServiceManager, Timeouts
from worlds import World, make_world

WATCHDOG_S = 6.0  # a tenth of the unit's; what the daemon does in the unit's time is scaled likewise, see the driver


@dataclass
class Installed:
    """A world as a service, whose driver looks for files in `switches`."""

    world: World
    switches: Path

    def command(self) -> list[str]:
        arguments = self.world.arguments()
        return [sys.executable, "-c", DRIVER, str(self.switches), str(self.world.folder / "clip.avi"), *arguments]

    def keep(self, **timeouts: float) -> ServiceManager:
        return ServiceManager(self.command(), self.world.folder, Timeouts(**timeouts))

    def switch(self, name: str) -> Path:
        (self.switches / name).touch()
        return self.switches / name


@pytest.fixture
def installed(tmp_path: Path) -> Installed:
    world = make_world(tmp_path, lambda _: 0.3, 20.0, camera={"source": "rtsp://camera"})
    world.config["mqtt"] = {"host": "127.0.0.1", "port": 1, "device": "board"}
    world.config["recalibration"] = {"automatic": False}
    (tmp_path / "switches").mkdir()
    return Installed(world, tmp_path / "switches")


@pytest.mark.slow
@pytest.mark.parametrize("deaf", [False, pytest.param(True, marks=pytest.mark.trial)])
def test_the_watchdog_ends_a_hung_inference_and_the_next_process_serves(installed: Installed, deaf: bool) -> None:
    if deaf:
        installed.switch("deaf")
    with installed.keep(watchdog_s=WATCHDOG_S, abort_s=1.0) as manager:
        manager.wait(lambda: manager.life.pings > 3)
        hang = installed.switch("hang")
        manager.wait(lambda: not hang.exists())
        first = manager.life
        manager.wait(lambda: first.ended_s is not None)
        assert first.reason == "watchdog"
        assert first.signals == ([signal.SIGABRT, signal.SIGKILL] if deaf else [signal.SIGABRT])
        assert first.returncode == (-signal.SIGKILL if deaf else -signal.SIGABRT)
        manager.wait(lambda: len(manager.lives) == 2 and manager.life.pings > 3)
        assert manager.stop() == 0
    assert "in infer" in manager.journal  # the stack of the thread that hung, by faulthandler
    assert manager.refused == 0


@pytest.mark.trial
def test_a_camera_that_is_away_does_not_trip_the_watchdog(installed: Installed) -> None:
    with installed.keep(watchdog_s=WATCHDOG_S) as manager:
        manager.wait(lambda: manager.life.pings > 3)
        away, began_s = installed.switch("away"), time.monotonic()
        manager.wait(lambda: "code=camera." in manager.journal)
        manager.wait(lambda: time.monotonic() > began_s + 2.5 * WATCHDOG_S)
        away.unlink()
        manager.wait(lambda: "event=camera" in manager.journal)
        pings = manager.life.pings
        manager.wait(lambda: manager.life.pings > pings + 3)
        assert manager.stop() == 0
    assert len(manager.lives) == 1


@pytest.mark.trial
def test_a_start_may_take_as_long_as_its_builder_moves(installed: Installed) -> None:
    slow, start_s = installed.switch("slow"), 30.0
    with installed.keep(watchdog_s=WATCHDOG_S, start_s=start_s) as manager:
        manager.wait(lambda: any(line.startswith("EXTEND_TIMEOUT_USEC=") for line in manager.life.said))
        manager.wait(lambda: time.monotonic() > manager.life.started_s + start_s + 1.0)
        assert manager.life.ready_s is None
        slow.unlink()
        manager.wait(lambda: manager.life.pings > 3)
        assert manager.stop() == 0
    assert len(manager.lives) == 1


@pytest.mark.trial
def test_a_start_that_stands_still_is_ended_and_tried_again(installed: Installed) -> None:
    stuck, start_s = installed.switch("stuck"), 20.0
    with installed.keep(watchdog_s=WATCHDOG_S, start_s=start_s, stop_s=2.0) as manager:
        manager.wait(lambda: manager.life.reason == "start")
        stuck.unlink()
        manager.wait(lambda: len(manager.lives) == 2 and manager.life.pings > 3)
        assert manager.stop() == 0
    assert manager.lives[0].ready_s is None
