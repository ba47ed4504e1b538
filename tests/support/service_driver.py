"""A program that runs the daemon as systemd would."""

from __future__ import annotations

# What the daemon's process does before it starts: its camera is the clip, and files in the folder `switches` say what
# goes wrong: `away` the camera, `hang` an inference, `slow` and `stuck` a build.
DRIVER = """
import sys, threading, time
from pathlib import Path

import cv2

import agent.camera.capture
import agent.daemon.run
from agent.common.timing import Backoff
from engines.registry import ChosenBackend, choose_backend

switches = Path(sys.argv.pop(1))
clip = sys.argv.pop(1)
# As WatchdogSec is scaled, too.
agent.camera.capture.Backoff = lambda first_s, cap_s, **more: Backoff(first_s / 10, cap_s / 10, **more)
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


cv2.VideoCapture = Stream
agent.daemon.run.choose_backend = lambda *opened: ChosenBackend(Slow(choose_backend(*opened).backend))

from fleet.cli.main import main

sys.exit(main())
"""
