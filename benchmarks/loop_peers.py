"""The whole loop beside what else people run: frames per second on a file, latency on a camera."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import Progress

from agent.mqtt.client import Endpoint
from benchmarks.loop_cameras import camera
from benchmarks.loop_daemon import OBSERVED, UNOBSERVED, Daemon, endless, spec
from benchmarks.peers import INFERENCE, SUPERVISION, Peer, PeerError, Worker
from benchmarks.report import Bar, Section

PEERS: dict[str, tuple[Peer, str]] = {
    "supervision 0.31.2, ONNX Runtime, OpenCV": (SUPERVISION, "benchmarks.workers.loop_supervision"),
    "InferencePipeline, inference 1.8.3": (INFERENCE, "benchmarks.workers.loop_inference"),
}
OURS: dict[str, Mapping[str, Any]] = {"tared run": UNOBSERVED, "tared run, observed": OBSERVED}
_WARM_S = 3.0
_SECONDS = 8.0
_CAMERA = (768, 432, 25.0)
_ROUNDS_EACH = 3  # one round for so many of `--rounds`: each takes a minute and a half

Figures = dict[str, float]  # fps, p50_ms, p99_ms, cpu_ms of all threads per frame, found: objects per frame
Contender = Callable[[str, bool], Figures]  # arguments: a source, and whether it is a camera


def beside_peers(
    folder: Path, endpoint: Endpoint, models: list[str], rounds: int, progress: Progress
) -> tuple[list[Section], list[Bar]]:
    """One contender at a time, each on a file as fast as it can and on a camera."""
    sections = []
    width, height, fps = _CAMERA
    for name in models:
        (folder / name).mkdir()
        clip = str(endless(folder / name))
        columns = (
            "",
            "file: fps",
            "CPU per frame",
            "objects",
            f"{fps:g} fps camera: fps",
            "latency p50",
            "p99",
            "objects",
        )
        rounds_here = max(1, rounds // _ROUNDS_EACH)
        table = Section(f"{name} at {width}x{height}, one thread each, median of {rounds_here}", columns)
        with ExitStack() as stack:
            url = stack.enter_context(camera(width, height, fps))
            contenders, absent = _contenders(folder / name, endpoint, name, stack)
            found: dict[str, list[tuple[Figures, Figures]]] = {contender: [] for contender in contenders}
            for _ in progress.track(range(rounds_here), description=f"{name}: beside peers"):
                for title, run in contenders.items():
                    found[title].append((run(clip, False), run(url, True)))
        table.rows += [(title, *_row(pairs)) for title, pairs in found.items()]
        table.rows += [(title, reason, *["-"] * 6) for title, reason in absent.items()]
        sections.append(table)
    return sections, []


def _row(pairs: list[tuple[Figures, Figures]]) -> tuple[str, ...]:
    def median(index: int, key: str) -> float:
        return statistics.median(pair[index][key] for pair in pairs)

    latency = (f"{median(1, 'p50_ms'):.1f} ms", f"{median(1, 'p99_ms'):.1f} ms")
    return (
        f"{median(0, 'fps'):.1f}", f"{median(0, 'cpu_ms'):.2f} ms", f"{median(0, 'found'):.2f}",
        f"{median(1, 'fps'):.1f}", *latency, f"{median(1, 'found'):.2f}",
    )  # fmt: skip


def _contenders(
    folder: Path, endpoint: Endpoint, name: str, stack: ExitStack
) -> tuple[dict[str, Contender], dict[str, str]]:
    """What can run by title, and why the others cannot."""
    contenders: dict[str, Contender] = {title: _ours(folder, endpoint, name, over) for title, over in OURS.items()}
    absent = {}
    for title, (peer, script) in PEERS.items():
        try:
            worker = Worker(peer, script)
        except PeerError as error:
            absent[title] = str(error)
            continue
        stack.callback(worker.close)
        contenders[title] = _theirs(worker, name)
    return contenders, absent


def _theirs(worker: Worker, name: str) -> Contender:
    def run(source: str, _is_camera: bool) -> Figures:
        figures: Figures = worker.call("run", name, spec(name)["path"], source, _WARM_S, _SECONDS).value
        return figures

    return run


def _ours(folder: Path, endpoint: Endpoint, name: str, over: Mapping[str, Any]) -> Contender:
    """A daemon for each run, with its answers in a file: they tell each frame's latency."""

    def run(source: str, is_camera: bool) -> Figures:
        home = folder / f"daemon{time.monotonic_ns()}"
        results = home / "results.jsonl"
        of_its_kind = {"policy": "freshest"} if is_camera else {"policy": "every-frame", "speed": 0}
        config = {
            "model": spec(name),
            "camera": {"source": source, **of_its_kind},
            "results": {"file": str(results)},
            **over,
        }
        with Daemon(home, endpoint, config) as daemon:
            time.sleep(_WARM_S)
            before, cpu_s = sum(daemon.frames().values()), daemon.cpu_s()
            fps = daemon.fps(_SECONDS)
            served, cpu_s = sum(daemon.frames().values()) - before, daemon.cpu_s() - cpu_s
            daemon.stop()
        answers = [json.loads(line) for line in results.read_text().splitlines()]
        counted = [answer for answer in answers if answer["frame"] >= before]
        p50_ms, p99_ms = np.percentile([answer["latency_ms"] for answer in counted], (50.0, 99.0))
        objects = statistics.fmean(len(answer["detections"]) for answer in counted)
        cpu_ms = 1e3 * cpu_s / served
        return {"fps": fps, "p50_ms": float(p50_ms), "p99_ms": float(p99_ms), "cpu_ms": cpu_ms, "found": objects}

    return run
