"""What a running job costs the video: latency and frame rate while a candidate is made, beside those just before.

    python -m benchmarks.recalibration [--models fastestdet yolox_nano] [--jobs 5] [--json | --markdown]

Needs ../shared/data (or $TARED_SHARED/data) and mosquitto. The daemon runs as users start it, on a real clip played as
a camera plays it. Jobs are asked for by command, one after the other; before each the video runs by itself for as long
as a job takes. *Latency* is from a frame's arrival to its decoded result, at a frame rate that leaves the engine half
of its time; *frame rate* is that of a source which always has the next frame. A ratio is of a job to the quiet time
before it, and the figure is the median over the jobs. A job is counted from the command to its end: COLLECTING, the
child at work, and probation, each also by itself.
"""

from __future__ import annotations

import argparse
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress

from agent.common.errors import AgentError
from agent.contract.topics import Topics
from agent.mqtt.client import Endpoint
from benchmarks.models import DATA, MODELS
from benchmarks.report import Bar, Section, add_output_option, at_least, at_most, bars_section, publish, times
from fleet.operator import new_command, send

CLIP = "vid_one_by_one_person_768x432.mp4"
_TOPICS = Topics("default", "board")
_FRAMES = 128  # frames of a job's calibration
_QUIET_S = 20.0
_LIMIT_S = 300.0
_PHASES = {"COLLECTING": "collecting", "PROBATION": "probation"}  # every other step is the child's
_PACED_SHARE = 0.5  # share of the engine's time, at the frame rate of the latency trial


@dataclass(frozen=True)
class Trial:
    """Quiet time and then a job, as wall-clock ns; phases: (name, begin, end) within the job."""

    quiet: tuple[int, int]
    job: tuple[int, int]
    phases: list[tuple[str, int, int]]


@contextmanager
def broker(folder: Path) -> Iterator[Endpoint]:
    """A mosquitto of its own on a free port."""
    program = shutil.which("mosquitto") or shutil.which("mosquitto", path="/usr/sbin")
    if program is None:
        raise SystemExit("error: no mosquitto; install it: apt install mosquitto")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    conf = folder / "mosquitto.conf"
    conf.write_text(f"listener {port} 127.0.0.1\nallow_anonymous true\n")
    with subprocess.Popen([program, "-c", str(conf)], stderr=subprocess.DEVNULL) as process:
        try:
            yield Endpoint("127.0.0.1", port)
        finally:
            process.terminate()


@contextmanager
def daemon(folder: Path, name: str, endpoint: Endpoint, fps: float) -> Iterator[Path]:
    """The daemon on the clip, on `name`'s model; the file of its frames. fps 0: as fast as frames are served."""
    spec = {**MODELS[name][0], "path": str(DATA / str(MODELS[name][0]["path"]))}
    config = {
        "model": spec,
        "state_dir": str(folder / "state"),
        "backend": "onnxruntime",
        "camera": {"source": "rtsp://clip", "policy": "freshest" if fps else "every-frame"},
        "calibration": {"frames": _FRAMES, "within_s": 20.0},
        "probation": {"frames": 100, "seconds": 5.0},
        "observe": {"alert_period_s": 0.1},
        "drift": {"tolerance_db": 11.0},
        "recalibration": {"max_loss": 1.0, "raise_precision": False},
        "mqtt": {"host": endpoint.host, "port": endpoint.port, "device": "board"},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    frames = folder / "frames"
    command = [sys.executable, "-m", "benchmarks.workers.recorded_daemon", str(frames), str(DATA / CLIP), str(fps)]
    command += ["run", "-c", str(folder / "config.yaml"), "--json"]
    with (folder / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            yield frames
        finally:
            process.terminate()


def work(endpoint: Endpoint) -> tuple[int, list[tuple[str, int, int]]]:
    """One job by command, from now to its end: when it ended, and its phases. Raises SystemExit where it fails.

    A candidate that is refused, as one made of the same scene may be by a hair, has cost as much up to there.
    """
    command = new_command("recalibrate", {"frames": str(_FRAMES)}, time.time())
    phase, since = "collecting", time.time_ns()
    phases = []
    for result in send(endpoint, _TOPICS, command, silence_s=_LIMIT_S):
        now = time.time_ns()
        following = _PHASES.get(result.step or "COLLECTING", "child")
        if result.final or following != phase:
            phases.append((phase, since, now))
            phase, since = following, now
        if result.error is not None and result.error.code != "recalibration.refused":
            raise SystemExit(f"error: a job that failed: {result.error}")
    return now, phases


def trials(endpoint: Endpoint, jobs: int, progress: Progress, title: str) -> list[Trial]:
    """Let the first calibration be made, then take turns between quiet and a job."""
    task = progress.add_task(title, total=jobs)
    deadline = time.monotonic() + _LIMIT_S
    while not _calibrated(endpoint):
        if time.monotonic() > deadline:
            raise SystemExit(f"error: no first engine within {_LIMIT_S:.0f} s")
        time.sleep(1.0)
    found, quiet_s = [], _QUIET_S
    for _ in range(jobs):
        began = time.time_ns()
        time.sleep(quiet_s)
        asked = time.time_ns()
        ended, phases = work(endpoint)
        found.append(Trial((began, asked), (asked, ended), phases))
        quiet_s = max(_QUIET_S, (ended - asked) / 1e9)
        progress.advance(task)
        time.sleep(2.0)  # what a job leaves to be tidied up is not quiet yet
    return found


def _calibrated(endpoint: Endpoint) -> bool:
    try:
        *_, last = send(endpoint, _TOPICS, new_command("status", {}, time.time()), silence_s=5.0)
    except AgentError:
        return False
    return last.result is not None and not last.result["degraded"] and last.result["job"] is None


@dataclass(frozen=True)
class Frames:
    """done_ns, latency_ms: of all frames answered, in order."""

    done_ns: NDArray[np.int64]
    latency_ms: NDArray[np.float64]

    @classmethod
    def read(cls, path: Path) -> Frames:
        content = path.read_bytes()
        pairs = np.frombuffer(content[: len(content) // 16 * 16], "<i8").reshape(-1, 2)
        return cls(pairs[:, 0], pairs[:, 1] / 1e6)

    def p99_ms(self, begin: int, end: int) -> float:
        return float(np.percentile(self.latency_ms[self._within(begin, end)], 99.0))

    def p50_ms(self, begin: int, end: int) -> float:
        return float(np.percentile(self.latency_ms[self._within(begin, end)], 50.0))

    def fps(self, begin: int, end: int) -> float:
        return float(np.count_nonzero(self._within(begin, end)) / ((end - begin) / 1e9))

    def _within(self, begin: int, end: int) -> NDArray[np.bool_]:
        return (self.done_ns >= begin) & (self.done_ns < end)


def measure(name: str, fps: float, jobs: int, progress: Progress) -> tuple[Frames, list[Trial]]:
    """One daemon, `jobs` jobs."""
    with tempfile.TemporaryDirectory() as kept:
        folder = Path(kept)
        with broker(folder) as endpoint:
            title = f"{name}, {'paced' if fps else 'as fast as served'}"
            with daemon(folder, name, endpoint, fps) as path:
                try:
                    found = trials(endpoint, jobs, progress, title)
                except BaseException:
                    print((folder / "log").read_text()[-2000:], file=sys.stderr)
                    raise
            return Frames.read(path), found


def run(name: str, jobs: int, progress: Progress) -> tuple[list[Section], list[Bar]]:
    """Both trials of one model."""
    fast, fast_trials = measure(name, 0.0, jobs, progress)
    rates = [fast.fps(*trial.job) / fast.fps(*trial.quiet) for trial in fast_trials]
    paced_fps = _PACED_SHARE * statistics.median(fast.fps(*trial.quiet) for trial in fast_trials)
    paced, paced_trials = measure(name, paced_fps, jobs, progress)
    tails = [paced.p99_ms(*trial.job) / paced.p99_ms(*trial.quiet) for trial in paced_trials]
    middles = [paced.p50_ms(*trial.job) / paced.p50_ms(*trial.quiet) for trial in paced_trials]
    columns = ("while", "frame rate", "latency p50", f"latency p99 at {paced_fps:.0f} fps")
    table = Section(f"{name}: a job beside the quiet time before it, median of {jobs}", columns)
    table.rows.append(("a job", *(times(statistics.median(each)) for each in (rates, middles, tails))))
    for phase in ("collecting", "child", "probation"):
        figures = (
            _of_phase(phase, fast_trials, fast.fps),
            _of_phase(phase, paced_trials, paced.p50_ms),
            _of_phase(phase, paced_trials, paced.p99_ms),
        )
        table.rows.append((phase, *map(times, figures)))
    seconds = statistics.median((trial.job[1] - trial.job[0]) / 1e9 for trial in paced_trials)
    table.note = f"a job of {_FRAMES} frames took {seconds:.0f} s at {paced_fps:.0f} fps"
    bars = [
        at_most(f"{name}: p99 while a job runs", 1.5, statistics.median(tails)),
        at_least(f"{name}: frame rate while a job runs", 0.85, statistics.median(rates)),
    ]
    return [table], bars


def _of_phase(phase: str, found: list[Trial], figure: Callable[[int, int], float]) -> float | None:
    """Median ratio of the figure in this phase to that in the quiet time."""
    ratios = [
        figure(begin, end) / figure(*trial.quiet)
        for trial in found
        for name, begin, end in trial.phases
        if name == phase and end - begin > 1e9
    ]
    return statistics.median(ratios) if ratios else None


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="What does a running job cost the video?")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["fastestdet", "yolox_nano"])
    parser.add_argument("--jobs", type=int, default=5)
    add_output_option(parser)
    options = parser.parse_args()
    sections: list[Section] = []
    bars: list[Bar] = []
    with Progress(console=Console(stderr=True)) as progress:
        for name in options.models:
            tables, found = run(name, options.jobs, progress)
            sections += tables
            bars += found
    publish([*sections, bars_section(bars)], options)


if __name__ == "__main__":
    main()
