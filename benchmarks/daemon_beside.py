"""What planning costs the video and the memory, for benchmarks/daemon_engines.py.

A daemon on a clip, at a frame rate that leaves the float engine half of its time, until its first job has ended. The
latency, from a frame's arrival to its decoded result, in the state PLANNING is compared with that in COLLECTING before,
when the observer looks once a second, as it does all its life. Meaningful on a quiet machine only.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from rich.progress import Progress

from agent.camera.reader import read_images
from agent.camera.source import parse_source
from agent.models.model import open_model
from agent.vision.task import VisionTask
from benchmarks.daemon_process import (
    FIRST_SCENES,
    JOB_ENDED,
    JOB_LIMIT_S,
    FollowedDaemon,
    model_config,
    model_spec,
)
from benchmarks.models import DATA
from benchmarks.recalibration import Frames
from benchmarks.report import Bar, Section, at_most, times
from engines.registry import open_backend

_CLIP = "vid_one_by_one_person_768x432.mp4"  # for a model whose scene is a set of photos: the worker plays a video
_MEMORY_BYTES = 2**31  # recalibration.memory_bytes, as half of a board's 4 GB is by default
_PACED_SHARE = 0.5  # share of the float engine's time
_PACED_FRAMES = 40  # to measure it
_SETTLED_NS = 10 * 10**9  # from the job's start to when latencies count
_PLANNED = r"step=BUILDING|" + JOB_ENDED
_WEIGHED_EVERY_S = 0.2
_PLANNING_S, _PLAIN_S = {"yolox_nano": 120.0}, 15.0  # any other model plain INT8 suits


@dataclass(frozen=True)
class Beside:
    """p99 of the latency before PLANNING and in it, in ms; peaks of resident memory in PLANNING, in bytes."""

    fps: float
    before_ms: float
    planning_ms: float
    planning_s: float
    daemon_bytes: int
    child_bytes: int

    @property
    def ratio(self) -> float:
        """The latency in PLANNING, as a multiple of that before."""
        return self.planning_ms / self.before_ms


def beside(models: list[str], folder: Path, progress: Progress) -> tuple[list[Section], list[Bar]]:
    """Each model by itself."""
    task = progress.add_task("video beside planning", total=len(models))
    found: dict[str, Beside] = {}
    for name in models:
        with tempfile.TemporaryDirectory(dir=folder) as kept:
            found[name] = measure(name, Path(kept))
        progress.advance(task)
    return [beside_section(found)], beside_bars(found)


def measure(name: str, folder: Path) -> Beside:
    """Run one daemon until its first job has ended. Raises SystemExit where the job does not come to PLANNING."""
    clip = FIRST_SCENES[name] if FIRST_SCENES[name].startswith("vid_") else _CLIP
    fps = _PACED_SHARE / _inference_s(name, clip)
    config = {
        **model_config(name, {"source": "rtsp://clip"}, folder),
        "observe": {"budget": None, "alert_period_s": 1.0},
        "recalibration": {"memory_bytes": _MEMORY_BYTES},
    }
    frames = folder / "frames"
    program = ("benchmarks.workers.recorded_daemon", str(frames), str(DATA / clip), str(fps))
    with FollowedDaemon(config, folder, program) as daemon:
        if daemon.wait(r"step=PLANNING", JOB_LIMIT_S) is None:
            raise SystemExit(f"error: {name}: no job came to PLANNING: {daemon.error()}")
        memory = _Memory(daemon.process.pid)
        while daemon.process.poll() is None and daemon.wait(_PLANNED, _WEIGHED_EVERY_S) is None:
            memory.weigh()
        entered = daemon.steps()
    collected_ns, planning_ns = entered["CALIBRATING"], entered["PLANNING"]
    planned_ns = entered.get("BUILDING", max(entered.values()))
    latency = Frames.read(frames)
    return Beside(
        fps,
        latency.p99_ms(entered["COLLECTING"] + _SETTLED_NS, collected_ns),
        latency.p99_ms(planning_ns, planned_ns),
        (planned_ns - planning_ns) / 1e9,
        memory.daemon_bytes,
        memory.child_bytes,
    )


class _Memory:
    """The most resident memory of a daemon, and of all that it has started together, in bytes.

    It is read from the kernel's files: to look for children among all processes takes time that frames would wait for.
    """

    def __init__(self, daemon: int) -> None:
        self.daemon_bytes = self.child_bytes = 0
        self._daemon = daemon

    def weigh(self) -> None:
        self.daemon_bytes = max(self.daemon_bytes, _resident_bytes(self._daemon))
        self.child_bytes = max(self.child_bytes, sum(map(_resident_bytes, _descendants(self._daemon))))


def _descendants(process: int) -> Iterator[int]:
    with suppress(OSError):  # it may end meanwhile
        for file in Path(f"/proc/{process}/task").glob("*/children"):
            for child in map(int, file.read_text().split()):
                yield child
                yield from _descendants(child)


def _resident_bytes(process: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _inference_s(name: str, clip: str) -> float:
    """Return how long one frame takes the float engine on one thread: the median."""
    model = open_model(model_spec(name))
    with closing(open_backend("onnxruntime").load(model.master.SerializeToString())) as engine:
        task, taken = VisionTask(model.spec, engine.inputs, engine.outputs), list[float]()
        for _, image in islice(read_images(parse_source(str(DATA / clip))), _PACED_FRAMES):
            began_s = time.perf_counter()
            task.infer(engine, image)
            taken.append(time.perf_counter() - began_s)
    return statistics.median(taken)


def beside_section(found: Mapping[str, Beside]) -> Section:
    """One row a model."""
    columns = ("model", "frames/s", "p99 before, ms", "p99 in PLANNING, ms", "ratio", "PLANNING, s")
    table = Section("The video beside PLANNING", (*columns, "daemon, MiB", "child, MiB"))
    for name, each in found.items():
        latencies = (f"{each.before_ms:.1f}", f"{each.planning_ms:.1f}", times(each.ratio))
        memory = (f"{size / 2**20:.0f}" for size in (each.daemon_bytes, each.child_bytes))
        table.rows.append((name, f"{each.fps:.0f}", *latencies, f"{each.planning_s:.1f}", *memory))
    return table


def beside_bars(found: Mapping[str, Beside]) -> list[Bar]:
    """The bars of each model."""
    bars = list[Bar]()
    for name, each in found.items():
        memory = (each.daemon_bytes + each.child_bytes) / 2**20
        bars.append(at_most(f"{name}: p99 in PLANNING", 1.5, each.ratio))
        bars.append(at_most(f"{name}: PLANNING", _PLANNING_S.get(name, _PLAIN_S), each.planning_s, " s"))
        bars.append(at_most(f"{name}: memory of daemon and child", _MEMORY_BYTES / 2**20, memory, " MiB"))
    return bars
