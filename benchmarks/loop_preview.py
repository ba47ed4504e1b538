"""What the preview costs the frame path: latency with nobody looking, with one viewer and with two.

A daemon on a camera of 1280 x 720 pixels over HTTP, with the preview at its defaults. The three states take turns, in
another order each round; a ratio is of a state to the closed one of the same round. The sample's clip is made by
`make run`.
"""

from __future__ import annotations

import statistics
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.request import urlopen

import numpy as np
from rich.progress import Progress

from agent.mqtt.client import Endpoint
from benchmarks.loop_cameras import camera
from benchmarks.loop_daemon import CLIP, UNOBSERVED, Daemon, free_port, spec
from benchmarks.models import DATA
from benchmarks.peers import ROOT
from benchmarks.recalibration import Frames
from benchmarks.report import Bar, Section, at_most, times

_SAMPLE, _SAMPLE_CLIP = "sample", ROOT / "var" / "sample" / "street.mp4"
_WIDTH, _HEIGHT, _FPS = 1280, 720, 30.0
_VIEWERS = (0, 1, 2)
_MOST = 1.1
_WARM_S, _SETTLE_S, _TURN_S = 5.0, 1.0, 10.0
_READ_BYTES = 1 << 16


class Looking:
    """A context manager: a viewer that reads a stream, and counts its pictures."""

    def __init__(self, url: str) -> None:
        self.pictures = 0
        self._stream = urlopen(url, timeout=10.0)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._ended = False

    def __enter__(self) -> Looking:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended = True
        self._thread.join()
        self._stream.close()

    def _read(self) -> None:
        while not self._ended and (content := self._stream.read1(_READ_BYTES)):
            self.pictures += content.count(b"X-Frame: ")


@dataclass
class Turns:
    """Of one state: begin and end of each turn in wall-clock ns, CPU s of the daemon, pictures of each viewer a s."""

    spans: list[tuple[int, int]] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    pictures_per_s: list[float] = field(default_factory=list)

    def p99_ms(self, frames: Frames) -> list[float]:
        """Of each turn."""
        return [frames.p99_ms(*span) for span in self.spans]

    def all_ms(self, frames: Frames) -> np.ndarray[Any, np.dtype[np.float64]]:
        """The latencies of all turns."""
        chosen = [(frames.done_ns >= begin) & (frames.done_ns < end) for begin, end in self.spans]
        return frames.latency_ms[np.logical_or.reduce(chosen)]


def previewing(
    folder: Path, endpoint: Endpoint, models: list[str], rounds: int, progress: Progress
) -> tuple[list[Section], list[Bar]]:
    """The sample, and each model on a clip of people."""
    columns = ("model", "viewers", "frames", "p50, ms", "p99, ms", "p99 / closed", "CPU of a core", "pictures/s")
    title = f"The frame path at {_FPS:g} frames/s beside the preview, {rounds} turns of {_TURN_S:g} s for each state"
    table, bars = Section(title, columns), list[Bar]()
    for name in (_SAMPLE, *models):
        frames, states = _measure(folder / name, endpoint, name, rounds, progress)
        closed = states[0].p99_ms(frames)
        for viewers, turns in states.items():
            ratio = statistics.median(
                each / reference for each, reference in zip(turns.p99_ms(frames), closed, strict=True)
            )
            latencies = turns.all_ms(frames)
            p50, p99 = np.percentile(latencies, [50.0, 99.0])
            cpu, pictures = statistics.median(turns.cpu_s) / _TURN_S, turns.pictures_per_s
            shown = f"{statistics.median(pictures):.1f}" if pictures else ""
            figures = (f"{p50:.2f}", f"{p99:.2f}", times(ratio), f"{cpu:.1%}", shown)
            table.rows.append((name, str(viewers), str(len(latencies)), *figures))
            if viewers:
                bars.append(at_most(f"{name}: p99 with {viewers} viewer{'s' * (viewers > 1)}", _MOST, ratio))
    table.note = "a ratio is the median over the rounds; p50 and p99 are of all turns of a state together"
    return [table], bars


def _measure(
    folder: Path, endpoint: Endpoint, name: str, rounds: int, progress: Progress
) -> tuple[Frames, dict[int, Turns]]:
    """The frames of one daemon, and its turns by the number of viewers."""
    folder.mkdir()
    clip = _SAMPLE_CLIP if name == _SAMPLE else DATA / CLIP
    if not clip.exists():
        raise SystemExit(f"error: no {clip}; make it: make run")
    model = str(ROOT / "examples" / "street" / "model.yaml") if name == _SAMPLE else spec(name)
    address, recorded = f"127.0.0.1:{free_port()}", folder / "frames"
    states = {viewers: Turns() for viewers in _VIEWERS}
    with camera(_WIDTH, _HEIGHT, _FPS, clip) as url:
        config = {
            "model": model,
            "camera": {"source": url},
            "preview": {"address": address},
            "privacy": {"preview": True},
            **UNOBSERVED,
        }
        program = ("benchmarks.workers.recorded_daemon", str(recorded), "-", "0")
        with Daemon(folder / "daemon", endpoint, config, program) as daemon:
            time.sleep(_WARM_S)
            for number in progress.track(range(rounds), description=f"{name}: preview"):
                for turn in range(len(_VIEWERS)):
                    viewers = _VIEWERS[(number + turn) % len(_VIEWERS)]
                    _take_turn(daemon, f"http://{address}/stream.mjpeg", viewers, states[viewers])
            daemon.stop()
    return Frames.read(recorded), states


def _take_turn(daemon: Daemon, url: str, viewers: int, turns: Turns) -> None:
    with ExitStack() as stack:
        looking = [stack.enter_context(Looking(url)) for _ in range(viewers)]
        time.sleep(_SETTLE_S)
        begin, cpu_s, seen = time.time_ns(), daemon.cpu_s(), sum(each.pictures for each in looking)
        time.sleep(_TURN_S)
        turns.spans.append((begin, time.time_ns()))
        turns.cpu_s.append(daemon.cpu_s() - cpu_s)
        if looking:
            shown = sum(each.pictures for each in looking) - seen
            turns.pictures_per_s.append(shown / _TURN_S / viewers)
