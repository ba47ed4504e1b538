"""The daemon as a service: a hang is ended and mended within WatchdogSec, and what is no hang is left alone."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from service_manager import ServiceManager, Timeouts
from worlds import World, make_world

WATCHDOG_S = 3.0  # of the unit's 60; what the daemon does in the unit's time is scaled likewise, see the driver

# What the daemon's process does before it starts: its camera is the clip, and files in the folder `switches` say what
# goes wrong: `away` the camera, `hang` an inference, `deaf` to SIGABRT, `slow` and `stuck` a build.
DRIVER = """
import signal, sys, threading, time
from pathlib import Path

import cv2

import agent.camera.capture
import agent.daemon.run
from agent.common.timing import Backoff
from engines.registry import open_backend

switches = Path(sys.argv.pop(1))
clip = sys.argv.pop(1)
agent.camera.capture.Backoff = lambda first_s, cap_s: Backoff(first_s / 10, cap_s / 10)  # as WatchdogSec is scaled, too
opened = cv2.VideoCapture


class Stream:
    def __init__(self, url, *_):
        self.video = None

    def isOpened(self):
        return not (switches / "away").exists()

    def get(self, _what):
        return 0.0  # a stream that says nothing of itself

    def read(self):
        time.sleep(0.02)
        if (switches / "away").exists():
            return False, None
        played = self.video is not None and self.video.read()
        if played and played[0]:
            return played
        self.video = opened(clip)
        return self.video.read()

    def release(self):
        pass


class Hanging:
    def __init__(self, engine):
        self.engine = engine

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def infer(self, batch):
        if (switches / "hang").exists():
            (switches / "hang").unlink()
            threading.Event().wait()
        return self.engine.infer(batch)


class Slow:
    def __init__(self, backend):
        self.backend = backend

    def __getattr__(self, name):
        return getattr(self.backend, name)

    def load(self, engine):
        return Hanging(self.backend.load(engine))

    def build(self, request, progress):
        while (switches / "slow").exists():
            progress(0.5, "a tactic")
            time.sleep(0.05)
        while (switches / "stuck").exists():
            time.sleep(0.05)
        return self.backend.build(request, progress)


if (switches / "deaf").exists():
    signal.signal(signal.SIGABRT, signal.SIG_IGN)
cv2.VideoCapture = Stream
agent.daemon.run.open_backend = lambda name, options: Slow(open_backend(name, options))

from fleet.cli.main import main

sys.exit(main())
"""


@dataclass
class Installed:
    """A world as a service, whose driver looks for files in `switches`."""

    world: World
    switches: Path

    def command(self) -> list[str]:
        _, _, _, *arguments = self.world.command()
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
def test_a_hung_inference_is_ended_within_the_watchdogs_time_and_serves_again(installed: Installed, deaf: bool) -> None:
    if deaf:
        installed.switch("deaf")
    with installed.keep(watchdog_s=WATCHDOG_S, abort_s=1.0) as manager:
        manager.wait(lambda: manager.life.pings > 3)
        hang = installed.switch("hang")
        manager.wait(lambda: not hang.exists())
        hung_s = time.monotonic()
        first = manager.life
        manager.wait(lambda: first.ended_s is not None)
        assert first.reason == "watchdog"
        assert first.ended_s is not None
        assert first.ended_s - hung_s < WATCHDOG_S + 1.0 + 1.0  # to be killed, where it does not end; the machine's own
        assert hung_s - first.last_ping_s < 1.0
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
        manager.wait(lambda: "code='camera." in manager.journal)
        manager.wait(lambda: time.monotonic() > began_s + 2.5 * WATCHDOG_S)
        away.unlink()
        manager.wait(lambda: "event=camera" in manager.journal)
        pings = manager.life.pings
        manager.wait(lambda: manager.life.pings > pings + 3)
        assert manager.stop() == 0
    assert len(manager.lives) == 1


@pytest.mark.trial
def test_a_start_may_take_as_long_as_its_builder_moves(installed: Installed) -> None:
    slow, start_s = installed.switch("slow"), 12.0
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
    stuck, start_s = installed.switch("stuck"), 8.0
    with installed.keep(watchdog_s=WATCHDOG_S, start_s=start_s, stop_s=2.0) as manager:
        manager.wait(lambda: manager.life.reason == "start")
        stuck.unlink()
        manager.wait(lambda: len(manager.lives) == 2 and manager.life.pings > 3)
        assert manager.stop() == 0
    assert manager.lives[0].ready_s is None


@pytest.mark.slow
def test_a_daemon_that_is_killed_is_started_again_and_one_that_is_stopped_is_not(installed: Installed) -> None:
    with installed.keep(watchdog_s=WATCHDOG_S) as manager:
        manager.wait(lambda: manager.life.pings > 3)
        subprocess.run(["kill", "-KILL", str(manager.pid)], check=True)
        manager.wait(lambda: len(manager.lives) == 2 and manager.life.pings > 3)
        assert manager.stop() == 0
    assert len(manager.lives) == 2
