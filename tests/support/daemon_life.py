"""A daemon in a process of its own, from its start to its end."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from brokers import RealBroker
from warm_start import TalkingProcess, WarmProcess
from worlds import World, make_world

from agent.contract.commands import CommandResult
from agent.contract.topics import Topics
from fleet.operator import new_command, send

TOPICS = Topics("default", "board")
LIMIT_S = 180.0  # time limit of each wait: two cores may serve six workers

PLAYER = """
import sys, time
from pathlib import Path

import cv2

scene = Path(sys.argv.pop(1))  # holds the path of the clip that the camera sees; while it is empty no frame comes
opened = cv2.VideoCapture


class Stream:
    def __init__(self, url):
        self.clip, self.video = "", None

    def isOpened(self):
        return True

    def read(self):
        time.sleep(0.02)
        while not (clip := scene.read_text()):
            time.sleep(0.02)
        played = self.video is not None and self.video.read()
        if clip == self.clip and played[0]:
            return played
        self.clip, self.video = clip, opened(clip)
        return self.video.read()

    def get(self, _what):
        return 0.0  # a stream that says nothing of itself

    def release(self):
        pass


cv2.VideoCapture = lambda url, *more: Stream(url) if url == "rtsp://camera" else opened(url, *more)

from fleet.cli.main import main

sys.exit(main())
"""


def order(broker: RealBroker, op: str, version: int | None = None, **arguments: Any) -> CommandResult:
    """The final result of a command."""
    command = new_command(op, arguments, time.time(), valid_s=LIMIT_S, version=version)
    return list(send(broker.endpoint, TOPICS, command, silence_s=LIMIT_S))[-1]


def answer(broker: RealBroker, op: str, **arguments: Any) -> dict[str, Any]:
    """The result of a command. Fails without one."""
    last = order(broker, op, **arguments)
    assert last.result is not None, last
    return last.result


def code(result: CommandResult) -> str:
    """The code of the error of a command; empty without one."""
    return result.error.code if result.error is not None else ""


class LiveCamera:
    """A world on a live camera that shows a night or a day, as the test decides. changes: as World's."""

    def __init__(self, folder: Path, night: float = 0.06, **changes: Any) -> None:
        settings: dict[str, Any] = {
            "camera": {"source": "rtsp://camera"},
            "observe": {"period_s": 0.05, "alert_period_s": 0.05},
            "drift": {"block_s": 0.5},
            **changes,
        }
        make_world(folder / "night", lambda _: night, 20.0)
        self.world = make_world(folder / "day", lambda _: 1.0, 20.0, **settings)
        self.folder, self.scene = folder, folder / "scene"
        self.show("night")

    def show(self, light: str) -> None:
        new = self.folder / "new"
        new.write_text(str(self.folder / light / "clip.avi"))
        new.replace(self.scene)

    def process(self, *arguments: str, driver: str = "", first: str = "") -> TalkingProcess:
        """The daemon. driver: Python that its process runs first, with `first` as its argument."""
        words = [first, str(self.scene)] if first else [str(self.scene)]
        return TalkingProcess([*words, *self.world.arguments(*arguments)], driver + PLAYER)

    @contextmanager
    def running(self) -> Iterator[TalkingProcess]:
        """The daemon; killed at the end if it still runs."""
        with self.process() as process:
            try:
                yield process
            finally:
                process.kill()


@dataclass
class Life:
    """One process of the daemon, from its start to its end."""

    process: WarmProcess
    log: Path
    broker: RealBroker

    def said(self, pattern: str) -> list[str]:
        return re.findall(pattern, self.log.read_text())

    def status(self) -> dict[str, Any]:
        return answer(self.broker, "status")

    def wait_served(self) -> None:
        """Wait until it has answered a frame."""
        self.wait(lambda: self.status()["frames"] > 0)

    def wait(self, until: Callable[[], object]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not until():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.1)


@contextmanager
def living(
    world: World, scene: Path, broker: RealBroker, name: str, driver: str = "", player: str = PLAYER, **observe: float
) -> Iterator[Life]:
    """The daemon, alive until the end of the block, and then killed.

    name: of its NAME.log and of NAME.out, which has what it prints. driver: Python that its process runs first.
    """
    world.config["observe"].update(observe)
    log, output = (world.folder / f"{name}.{ending}" for ending in ("log", "out"))
    with log.open("wb") as errors, output.open("wb") as printed:
        process = WarmProcess([str(scene), *world.arguments()], printed.fileno(), errors.fileno(), driver + player)
    try:
        yield Life(process, log, broker)
    finally:
        process.kill()
        process.wait()
