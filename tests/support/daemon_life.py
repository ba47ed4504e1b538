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
from warm_start import WarmProcess
from worlds import World

from agent.contract.topics import Topics
from fleet.operator import new_command, send

TOPICS = Topics("default", "board")
LIMIT_S = 60.0

PLAYER = """
import sys, time
from pathlib import Path

import cv2

scene = Path(sys.argv.pop(1))  # holds the path of the clip that the camera sees; while it is empty no frame comes
opened = cv2.VideoCapture


class Stream:
    def __init__(self, url, *_):
        assert url == "rtsp://camera", url
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


cv2.VideoCapture = Stream

from fleet.cli.main import main

sys.exit(main())
"""


@dataclass
class Life:
    """One process of the daemon, from its start to its end."""

    process: WarmProcess
    log: Path
    broker: RealBroker

    def said(self, pattern: str) -> list[str]:
        return re.findall(pattern, self.log.read_text())

    def status(self) -> dict[str, Any]:
        result = list(send(self.broker.endpoint, TOPICS, new_command("status", {}, time.time())))[-1].result
        assert result is not None
        return result

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
