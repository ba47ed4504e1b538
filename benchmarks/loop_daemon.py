"""The daemon as users start it, for benchmarks/loop.py: on a clip without end, paused while others have the machine."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import yaml

from agent.mqtt.client import Endpoint
from benchmarks.models import DATA, MODELS
from benchmarks.peers import ROOT

CLIP = "vid_one_by_one_person_768x432.mp4"
# Nobody observes, and so nothing is calibrated: the frame path alone.
UNOBSERVED = {"observe": {"budget": None, "period_s": 1e9, "alert_period_s": 1e9}}
# The observer keeps within the default budget, with next to nothing to spend ahead: that is for the first minutes of a
# board's life, and at full speed a file's minutes are seconds. No job comes to its work: it would have the second core.
OBSERVED = {
    "observe": {"held_out": 8},
    "calibration": {"frames": 1, "within_s": 1.0},
    "recalibration": {"per_day": 1, "headroom": {"memory_bytes": 2**60, "max_delay_s": None}},
}
_PLAYS = 400
_START_S = 120.0
_RUN_S = 600.0  # on a machine that others use too
_END_S = 60.0


def endless(folder: Path, clip: str = CLIP) -> Path:
    """The clip, played again and again, as a file that FFmpeg reads: https://ffmpeg.org/ffmpeg-formats.html#concat-1."""
    (folder / clip).symlink_to(DATA / clip)
    playlist = folder / "endless.ffconcat"
    playlist.write_text("ffconcat version 1.0\n" + f"file {clip}\n" * _PLAYS)
    return playlist


def spec(name: str) -> dict[str, object]:
    """MODELS[name] as config.yaml has it."""
    keys = MODELS[name][0]
    return {**keys, "path": str(DATA / str(keys["path"]))}


def free_port() -> int:
    """Below those that the kernel gives to whoever asks for any: it stays free until the daemon is up."""
    while True:
        with socket.socket() as probe, suppress(OSError):
            port = random.randrange(20_000, 32_000)
            probe.bind(("127.0.0.1", port))
            return port


class Daemon:
    """A context manager. Serves as soon as it is entered, in its own folder."""

    def __init__(
        self, folder: Path, endpoint: Endpoint, config: Mapping[str, Any], program: Sequence[str] = ("fleet.cli",)
    ) -> None:
        """config: over what stands here. program: the module to run, and what stands before `run`."""
        folder.mkdir(parents=True)
        self._folder, self._port = folder, free_port()
        content = {
            "backend": "onnxruntime",
            "state_dir": str(folder / "state"),
            "mqtt": {"host": endpoint.host, "port": endpoint.port, "device": folder.name},
            "metrics": {"port": self._port},
            "commands": {"unsigned": "allow"},
            **config,
        }
        (folder / "config.yaml").write_text(yaml.safe_dump(content))
        self._command = [sys.executable, "-m", *program, "run", "-c", str(folder / "config.yaml"), "--json"]

    def __enter__(self) -> Daemon:
        with (self._folder / "out").open("wb") as out, (self._folder / "log").open("wb") as log:
            self.process = subprocess.Popen(self._command, stdout=out, stderr=log, cwd=ROOT)
        deadline_s = time.monotonic() + _START_S
        while not sum(self.frames().values()):
            if self.process.poll() is not None or time.monotonic() > deadline_s:
                self.process.kill()
                raise SystemExit(f"error: a daemon that does not serve: {self._said('log')[-2000:]}")
            time.sleep(0.05)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.go_on()
            self.process.kill()
            self.process.wait()

    @property
    def metrics(self) -> tuple[str, int]:
        """Where they are served."""
        return "127.0.0.1", self._port

    def pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def frames(self) -> dict[str, int]:
        """How many each camera has been served by now; empty before the first scrape that succeeds."""
        return {
            name: int(float(value)) for name, value in self._metric(r"tared_frames_total\{camera=\"(.*?)\"\} (\S+)")
        }

    def fps(self, seconds: float) -> float:
        """Frames per second, of all cameras, over so many seconds from now."""
        before, began_s = sum(self.frames().values()), time.monotonic()
        time.sleep(seconds)
        served = sum(self.frames().values()) - before
        return served / (time.monotonic() - began_s)

    def told(self, text: str) -> bool:
        """Whether its log has it."""
        return text in self._said("log")

    def cpu_s(self) -> float:
        """Of all its threads, by now."""
        times = psutil.Process(self.process.pid).cpu_times()
        return float(times.user + times.system)

    def rss_bytes(self) -> int:
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def wait(self) -> dict[str, Any]:
        """The summary of one that ends by itself."""
        self.process.wait(_RUN_S)
        return self._summary()

    def stop(self) -> dict[str, Any]:
        """End it; the summary."""
        self.go_on()
        self.process.terminate()
        self.process.wait(_END_S)
        return self._summary()

    def _summary(self) -> dict[str, Any]:
        lines = self._said("out").strip().splitlines()
        if not lines:
            raise SystemExit(f"error: a daemon without a summary: {self._said('log')[-2000:]}")
        summary: dict[str, Any] = json.loads(lines[-1])
        return summary

    def _metric(self, pattern: str) -> list[tuple[str, str]]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/metrics", timeout=10.0) as answer:
                return re.findall(pattern, answer.read().decode())
        except OSError:
            return []

    def _said(self, name: str) -> str:
        return (self._folder / name).read_text(errors="replace")
