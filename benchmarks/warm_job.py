"""A recalibration whose plan still suits, here and in another tree: the second job of a daemon on the same scene.

    python -m benchmarks.warm_job --against TREE [--models resnet20 fastestdet] [--rounds 3] [--json | --markdown]

TREE is a built checkout, such as one of the commit before jobs planned. Needs ../shared/data (or $TARED_SHARED/data)
and mosquitto. In each round the two trees take turns: a daemon makes its first engine of a clip, and is then commanded
to recalibrate. Few frames calibrate, so that collecting hides nothing. A job is counted from the command to its result;
*child* is its child process at work, and *CPU* what that used, which other load hardly changes. A ratio is of medians
over the jobs that were committed; here these are all.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import cv2
import psutil
import yaml
from rich.console import Console
from rich.progress import Progress

from agent.camera.reader import read_images
from agent.camera.source import parse_source
from agent.common.errors import AgentError
from agent.contract.topics import Topics
from agent.mqtt.client import Endpoint
from benchmarks.models import DATA, MODELS
from benchmarks.peers import ROOT, WORKERS
from benchmarks.recalibration import broker
from benchmarks.report import Bar, Section, add_output_option, at_most, bars_section, publish
from fleet.operator import new_command, send

_SCENES = {"resnet20": "img_cifar10_train_calib_500.zip", "fastestdet": "vid_one_by_one_person_768x432.mp4"}
_FPS = 20.0
_FRAMES = 48  # that calibrate
_LIMIT_S = 600.0
_MOST = 1.3
_TOPICS = Topics("default", "board")
_PARENTS = {"COLLECTING", "PROBATION"}  # every other step is the child's


@dataclass(frozen=True)
class WarmJob:
    """A daemon's second job. outcome: COMMITTED, or the code of its error. wall_s: of it all; cpu_s: of the child."""

    outcome: str
    wall_s: float
    child_s: float
    cpu_s: float


Jobs = Mapping[tuple[str, str], Sequence[WarmJob]]  # by model and tree


@contextmanager
def _daemon(folder: Path, name: str, endpoint: Endpoint, tree: Path) -> Iterator[psutil.Process]:
    keys, _ = MODELS[name]
    config = {
        "model": {**keys, "path": str(DATA / str(keys["path"]))},
        "state_dir": str(folder / "state"),
        "backend": "onnxruntime",
        "camera": {"source": "rtsp://clip"},
        "calibration": {"frames": _FRAMES, "within_s": 5.0},
        "probation": {"frames": 20, "seconds": 1.0},
        "drift": {"tolerance_db": 11.0},  # no job begins by itself after the first
        "mqtt": {"host": endpoint.host, "port": endpoint.port, "device": "board"},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    clip = _film(DATA / _SCENES[name], folder)
    module = "fleet.cli" if (tree / "fleet" / "cli").is_dir() else "agent.cli"  # the second in trees before the move
    command = [sys.executable, str(WORKERS / "clip_camera.py"), str(clip), str(_FPS), module]
    command += ["run", "-c", str(folder / "config.yaml"), "--json"]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    with (
        (folder / "log").open("wb") as log,
        subprocess.Popen(command, stdout=log, stderr=log, cwd=tree, env=environment) as process,
    ):
        try:
            yield psutil.Process(process.pid)
        finally:
            process.terminate()


def _film(scene: Path, folder: Path) -> Path:
    """Return a clip as it is, and images as a clip without loss."""
    if scene.suffix != ".zip":
        return scene
    clip, film = folder / "scene.mkv", None
    for _, image in read_images(parse_source(str(scene))):
        if film is None:
            film = cv2.VideoWriter(str(clip), cv2.VideoWriter.fourcc(*"FFV1"), _FPS, image.shape[1::-1])
        film.write(image)
    assert film is not None
    film.release()
    return clip


def warm_job(name: str, tree: Path) -> WarmJob:
    """Let a daemon of this tree make its first engine, and return what the job after that takes."""
    with (
        tempfile.TemporaryDirectory() as folder,
        broker(Path(folder)) as endpoint,
        _daemon(Path(folder), name, endpoint, tree) as daemon,
    ):
        _wait_for_engine(endpoint, daemon)
        return _commanded(endpoint, daemon)


def _wait_for_engine(endpoint: Endpoint, daemon: psutil.Process) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while time.monotonic() < deadline and daemon.status() != psutil.STATUS_ZOMBIE:
        try:
            *_, last = send(endpoint, _TOPICS, new_command("status", {}, time.time()), silence_s=5.0)
        except AgentError:
            continue
        if last.result is not None and not last.result["degraded"] and last.result["job"] is None:
            return
        time.sleep(1.0)
    raise SystemExit(f"error: no first engine within {_LIMIT_S:.0f} s")


def _commanded(endpoint: Endpoint, daemon: psutil.Process) -> WarmJob:
    used_s, began_s, child_s = _children_s(daemon), time.monotonic(), 0.0
    step, since_s = "COLLECTING", began_s
    command = new_command("recalibrate", {"frames": str(_FRAMES)}, time.time())
    for result in send(endpoint, _TOPICS, command, silence_s=_LIMIT_S):
        now_s = time.monotonic()
        child_s += (now_s - since_s) * (step not in _PARENTS)
        step, since_s = result.step or step, now_s
    outcome = result.error.code if result.error is not None else "COMMITTED"
    return WarmJob(outcome, since_s - began_s, child_s, _children_s(daemon) - used_s)


def _children_s(daemon: psutil.Process) -> float:
    """Return the CPU seconds of the children that have ended."""
    times = daemon.cpu_times()
    return float(times.children_user + times.children_system)


def jobs_section(jobs: Jobs) -> Section:
    """One row a model and tree."""
    table = Section(
        "A recalibration whose plan still suits",
        ("model", "tree", "outcomes", "job, s", "child, s", "CPU, s"),
        note="Medians of the rounds.",
    )
    for (name, tree), found in jobs.items():
        figures = (f"{median(getattr(job, part) for job in found):.1f}" for part in ("wall_s", "child_s", "cpu_s"))
        table.rows.append((name, tree, ", ".join(sorted({job.outcome for job in found})), *figures))
    return table


def bars(jobs: Jobs) -> list[Bar]:
    """The bar of each model."""
    found = []
    for name in dict.fromkeys(name for name, _ in jobs):
        here, there = (
            [job.child_s for job in jobs[name, tree] if job.outcome == "COMMITTED"] for tree in ("here", "there")
        )
        is_whole = len(here) == len(jobs[name, "here"]) and there  # the other tree refuses an engine now and then
        ratio = median(here) / median(there) if is_whole else float("inf")
        found.append(at_most(f"{name}: the child's work here, against that there", _MOST, ratio, ""))
    return found


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="A recalibration whose plan still suits, here and in another tree.")
    parser.add_argument("--against", type=Path, required=True, metavar="TREE", help="a built checkout")
    parser.add_argument("--models", nargs="+", choices=_SCENES, default=list(_SCENES))
    parser.add_argument("--rounds", type=int, default=3)
    add_output_option(parser)
    options = parser.parse_args()
    trees = {"here": ROOT, "there": options.against}
    jobs: dict[tuple[str, str], list[WarmJob]] = {(name, tree): [] for name in options.models for tree in trees}
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("jobs", total=len(jobs) * options.rounds)
        for _ in range(options.rounds):
            for name, tree in jobs:
                jobs[name, tree].append(warm_job(name, trees[tree]))
                progress.advance(task)
    publish([jobs_section(jobs), bars_section(bars(jobs))], options)


if __name__ == "__main__":
    main()
