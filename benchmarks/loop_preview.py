"""What the preview costs the frame path: latency with nobody looking, with one viewer, with two, with a page open.

A daemon on a camera of 1280 x 720 pixels over HTTP, with the preview at its defaults, and `tared web` beside it. A page
is open where somebody follows its changes and asks for one live picture after the other, as a browser does, which is on
another machine and costs nothing here. The states take turns, in another order each round. A round counts if others
took little of the machine in each of its turns; else it is repeated, for a limited time. `make run` makes the sample's
clip.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.request import urlopen

import numpy as np
import psutil
from rich.progress import Progress

from agent.mqtt.client import Endpoint
from benchmarks.loop_cameras import camera
from benchmarks.loop_daemon import CLIP, UNOBSERVED, Daemon, free_port, spec
from benchmarks.models import DATA
from benchmarks.peers import ROOT
from benchmarks.recalibration import Frames
from benchmarks.report import Bar, Section, at_most, times
from benchmarks.web_boards import pages

_SAMPLE, _SAMPLE_CLIP = "sample", ROOT / "var" / "sample" / "street.mp4"
_WIDTH, _HEIGHT, _FPS = 1280, 720, 30.0
_CLOSED, _PAGE = "nobody", "the page"
_STATES = {_CLOSED: 0, "1 viewer": 1, "2 viewers": 2, _PAGE: 0}  # viewers of the stream
_MOST = 1.1
_WARM_S, _START_S, _SETTLE_S, _TURN_S = 5.0, 60.0, 0.5, 4.0
_QUIET = 0.15  # share of the machine that others may take
_LIMIT_S = 20.0  # for each round, on average
_BETWEEN_S, _AGAIN_S = 0.2, 3.0  # after a picture, and after a failure, as the page's script has it
_READ_BYTES, _HEADER = 1 << 16, b"X-Frame: "


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
        end = b""  # the last bytes read before, in which a header may have begun
        while not self._ended and (content := self._stream.read1(_READ_BYTES)):
            self.pictures += (end + content).count(_HEADER)
            end = content[-len(_HEADER) + 1 :]


class PageOpen:
    """A context manager: a board's page that is open, without its browser; counts its live pictures."""

    def __init__(self, url: str, board: str) -> None:
        self.pictures = 0
        self._picture = f"{url}/boards/{board}/live.jpg"
        self._changes = urlopen(f"{url}/live/{board}", timeout=30.0)
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._follow, self._look)]

    def __enter__(self) -> PageOpen:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()
        self._changes.close()

    def _follow(self) -> None:
        while not self._ended.is_set() and self._changes.readline():
            pass

    def _look(self) -> None:
        pause_s = 0.0
        while not self._ended.wait(pause_s):
            shown = self._has_picture()
            self.pictures += shown
            pause_s = _BETWEEN_S if shown else _AGAIN_S

    def _has_picture(self) -> bool:
        with suppress(OSError), urlopen(self._picture, timeout=10.0) as answer:
            answer.read()
            return True
        return False


@dataclass(frozen=True)
class Turn:
    """Begin and end in wall-clock ns, CPU s of the daemon, pictures of each viewer a s; the share of others."""

    span: tuple[int, int]
    cpu_s: float
    pictures_per_s: float | None
    others: float


@dataclass
class Turns:
    """Those of one state."""

    spans: list[tuple[int, int]] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    pictures_per_s: list[float] = field(default_factory=list)

    def add(self, turn: Turn) -> None:
        self.spans.append(turn.span)
        self.cpu_s.append(turn.cpu_s)
        if turn.pictures_per_s is not None:
            self.pictures_per_s.append(turn.pictures_per_s)

    def latencies_ms(self, frames: Frames) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Of all turns."""
        chosen = [(frames.done_ns >= begin) & (frames.done_ns < end) for begin, end in self.spans]
        return frames.latency_ms[np.logical_or.reduce(chosen)]


def previewing(
    folder: Path, endpoint: Endpoint, models: list[str], rounds: int, progress: Progress
) -> tuple[list[Section], list[Bar]]:
    """The sample, and each model on a clip of people."""
    columns = ("model", "who looks", "frames", "p50, ms", "p99, ms", "p99 / closed", "CPU of a core", "pictures/s")
    title = f"The frame path at {_FPS:g} frames/s beside the preview, turns of {_TURN_S:g} s, {rounds} of each at most"
    table, bars = Section(title, columns), list[Bar]()
    for name in (_SAMPLE, *models):
        frames, states = _measure(folder / name, endpoint, name, rounds, progress)
        closed_ms = float(np.percentile(states[_CLOSED].latencies_ms(frames), 99.0))
        for state, turns in states.items():
            latencies = turns.latencies_ms(frames)
            p50, p99 = np.percentile(latencies, [50.0, 99.0])
            ratio = p99 / closed_ms
            cpu, pictures = statistics.median(turns.cpu_s) / _TURN_S, turns.pictures_per_s
            shown = f"{statistics.median(pictures):.1f}" if pictures else ""
            figures = (f"{p50:.2f}", f"{p99:.2f}", times(ratio), f"{cpu:.1%}", shown)
            table.rows.append((name, state, str(len(latencies)), *figures))
            if state != _CLOSED:
                bars.append(at_most(f"{name}: p99 with {state}", _MOST, ratio))
    table.note = f"of all rounds in which others took at most {_QUIET:.0%} of the machine in each turn"
    return [table], bars


def _measure(
    folder: Path, endpoint: Endpoint, name: str, rounds: int, progress: Progress
) -> tuple[Frames, dict[str, Turns]]:
    """The frames of one daemon, and its turns by who looks."""
    folder.mkdir()
    clip = _SAMPLE_CLIP if name == _SAMPLE else DATA / CLIP
    if not clip.exists():
        raise SystemExit(f"error: no {clip}; make it: make run")
    model = str(ROOT / "examples" / "street" / "model.yaml") if name == _SAMPLE else spec(name)
    address, recorded = f"127.0.0.1:{free_port()}", folder / "frames"
    states = {state: Turns() for state in _STATES}
    with camera(_WIDTH, _HEIGHT, _FPS, clip) as url, pages(endpoint) as (page, _):
        config = {
            "model": model,
            "camera": {"source": url},
            "preview": {"address": address},
            "privacy": {"preview": True},
            **UNOBSERVED,
        }
        program = ("benchmarks.workers.recorded_daemon", str(recorded), "-", "0")
        with Daemon(folder / name, endpoint, config, program) as daemon:
            time.sleep(_WARM_S)
            _wait_for_picture(f"{page}/boards/{name}/live.jpg")
            task, ends_s, number = progress.add_task(f"{name}: preview", total=rounds), time.monotonic(), 0
            ends_s += _LIMIT_S * rounds
            while len(states[_CLOSED].spans) < rounds and time.monotonic() < ends_s:
                number += 1
                order = [[*_STATES][(number + turn) % len(_STATES)] for turn in range(len(_STATES))]
                stream = f"http://{address}/stream.mjpeg"
                taken = [
                    (states[each], _take_turn(daemon, stream, _STATES[each], (page, name) if each == _PAGE else None))
                    for each in order
                ]
                if all(turn.others <= _QUIET for _, turn in taken):
                    progress.advance(task)
                    for turns, turn in taken:
                        turns.add(turn)
            daemon.stop()
    if not states[_CLOSED].spans:
        raise SystemExit("error: no quiet round; others have the machine")
    return Frames.read(recorded), states


def _take_turn(daemon: Daemon, stream: str, viewers: int, page: tuple[str, str] | None) -> Turn:
    """page: the address of the pages and the name of the board, where its page is open."""
    with ExitStack() as stack:
        looking: list[Looking | PageOpen] = [stack.enter_context(Looking(stream)) for _ in range(viewers)]
        if page is not None:
            looking.append(stack.enter_context(PageOpen(*page)))
        time.sleep(_SETTLE_S)
        begin, others_s, cpu_s = time.time_ns(), _others_s(), daemon.cpu_s()
        seen = sum(each.pictures for each in looking)
        time.sleep(_TURN_S)
        end, shown = time.time_ns(), sum(each.pictures for each in looking) - seen
        others = (_others_s() - others_s) / (_TURN_S * (os.cpu_count() or 1))
        pictures_per_s = shown / _TURN_S / len(looking) if looking else None
        return Turn((begin, end), daemon.cpu_s() - cpu_s, pictures_per_s, others)


def _wait_for_picture(url: str) -> None:
    ends_s = time.monotonic() + _START_S
    while time.monotonic() < ends_s:
        with suppress(OSError), urlopen(url, timeout=10.0):
            return
        time.sleep(0.5)
    raise SystemExit(f"error: no live picture at {url}")


def _others_s() -> float:
    """Return the CPU time of the machine but for this process and those that it has started, in s."""
    everybody = psutil.cpu_times()
    own = psutil.Process()
    family = [each.cpu_times() for each in (own, *own.children(recursive=True))]
    busy_s = sum(everybody) - everybody.idle - everybody.iowait - everybody.guest - everybody.guest_nice
    return float(busy_s - sum(each.user + each.system for each in family))
