"""The first job of a daemon, on real models and on the bundled sample, for benchmarks/daemon_engines.py.

Each model gets a daemon on a recording that is played in a loop, until its first job has ended. The engine that is
committed is then scored beside FP32 on labelled images that did not calibrate it: mAP on COCO photos, top-1 on
CIFAR-10. PLANNING is the time from that state of the job to the next, with the child's niceness on a machine that
others may use.

The sample runs with examples/street/config.yaml, but for `camera.speed`: its night has to last until the job has ended.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from rich.progress import Progress

from agent.models.model import open_model
from agent.vision.evaluation import evaluate
from benchmarks.daemon_process import (
    CIFAR_TEST,
    COCO,
    FIRST_SCENES,
    JOB_ENDED,
    JOB_LIMIT_S,
    FollowedDaemon,
    model_config,
    model_spec,
)
from benchmarks.models import DATA
from benchmarks.peers import ROOT
from benchmarks.report import Bar, Section, at_least, at_most
from engines.registry import open_backend
from engines.store.artefact import Store

SAMPLE = "the sample"
_SAMPLE_SPEED = 2
_MOST_LOSS = 0.1  # recalibration.max_loss


@dataclass(frozen=True)
class Labelled:
    """Images that score a model beside FP32: the score's name in `evaluate`'s answer, and the points it may lose."""

    images: str
    score: str
    most: float


_LABELLED = {
    "resnet20": Labelled(CIFAR_TEST, "top1", 0.4),
    "fastestdet": Labelled(COCO, "map", 0.5),
    "yolox_nano": Labelled(COCO, "map", 1.0),
}


@dataclass(frozen=True)
class FirstJob:
    """How a daemon's first job ended, and what its engine is worth elsewhere.

    outcome: COMMITTED, or the error. seconds, planning_s: of the job, and of its state PLANNING.
    scores: on labelled images, of FP32 and of the engine; None without an engine, or without images.
    """

    outcome: str
    seconds: float
    planning_s: float
    int8_macs_share: float = 0.0
    loss: float = 1.0
    plans: int = 0
    scores: tuple[float, float] | None = None


def first(models: list[str], folder: Path, progress: Progress) -> tuple[list[Section], list[Bar]]:
    """The models, each on its scene."""
    jobs: dict[str, FirstJob] = {}
    task = progress.add_task("first jobs", total=len(models))
    for name in models:
        with tempfile.TemporaryDirectory(dir=folder) as kept:
            camera = {"source": str(DATA / FIRST_SCENES[name]), "loop": True}
            job = first_job(model_config(name, camera, Path(kept)), Path(kept))
            jobs[name] = replace(job, scores=_scores(name, Path(kept)))
        progress.advance(task)
    return [jobs_section(jobs)], first_bars(jobs)


def sample(_: list[str], folder: Path, progress: Progress) -> tuple[list[Section], list[Bar]]:
    """The bundled sample, whatever the models."""
    task = progress.add_task(SAMPLE, total=2)
    render = [sys.executable, "-m", "examples.street.render", "-o", str(folder)]
    subprocess.run(render, cwd=ROOT, check=True, capture_output=True)
    progress.advance(task)
    jobs = {SAMPLE: first_job(_sample_config(folder), folder)}
    progress.advance(task)
    return [jobs_section(jobs)], first_bars(jobs)


def _sample_config(folder: Path) -> dict[str, Any]:
    sample = ROOT / "examples/street"
    config: dict[str, Any] = yaml.safe_load((sample / "config.yaml").read_text())
    camera = config["camera"]
    files = {key: str(folder / Path(camera[key]).name) for key in ("source", "labels")}
    camera = {**camera, **files, "speed": _SAMPLE_SPEED}
    return {**config, "model": str(sample / config["model"]), "state_dir": str(folder / "state"), "camera": camera}


def first_job(config: Mapping[str, Any], folder: Path) -> FirstJob:
    """Run a daemon until its first job has ended."""
    with FollowedDaemon(config, folder) as daemon:
        daemon.wait(JOB_ENDED, JOB_LIMIT_S)
        entered, error = daemon.steps(), daemon.error()
    ended_ns = max(entered.values(), default=0)
    seconds = (ended_ns - entered.get("COLLECTING", ended_ns)) / 1e9
    planning_s = (entered.get("BUILDING", ended_ns) - entered.get("PLANNING", ended_ns)) / 1e9
    artefact = Store(Path(config["state_dir"])).read("current")
    if artefact is None:
        return FirstJob(error, seconds, planning_s)
    manifest = artefact.manifest
    tried = json.loads(artefact.read_file("plan.json")).get("evidence", {}).get("candidates", [])
    loss = 1.0 - manifest["verdict"]["fidelity"]
    return FirstJob("COMMITTED", seconds, planning_s, manifest["int8_macs_share"], loss, len(tried))


def _scores(name: str, folder: Path) -> tuple[float, float] | None:
    """Return the scores of FP32 and of the engine in service."""
    artefact, labelled = Store(folder / "state").read("current"), _LABELLED.get(name)
    if artefact is None or labelled is None:
        return None
    spec, runtime = model_spec(name), open_backend("onnxruntime")

    def score(content: bytes) -> float:
        with closing(runtime.load(content)) as engine:
            return float(evaluate(engine, spec, DATA / labelled.images).scores[labelled.score])

    return score(open_model(spec).master.SerializeToString()), score(artefact.read_engine())


def jobs_section(jobs: Mapping[str, FirstJob]) -> Section:
    """One row a model."""
    table = Section(
        "The first job of a daemon",
        ("model", "scene", "outcome", "MACs in INT8", "loss", "plans tried", "PLANNING, s", "job, s", "FP32", "INT8"),
        note="loss: 1 - fidelity on held-out frames. FP32, INT8: on labelled images of other scenes.",
    )
    for name, job in jobs.items():
        scores = [f"{score:.4f}" for score in job.scores] if job.scores else ["", ""]
        figures = (
            f"{job.int8_macs_share:.3f}",
            f"{job.loss:.3f}",
            job.plans,
            f"{job.planning_s:.0f}",
            f"{job.seconds:.0f}",
        )
        table.rows.append((name, FIRST_SCENES.get(name, "its night"), job.outcome, *map(str, figures), *scores))
    return table


def first_bars(jobs: Mapping[str, FirstJob]) -> list[Bar]:
    """The bars of each first job."""
    found = []
    for name, job in jobs.items():
        found.append(at_least(f"{name}: MACs in INT8 after the first job", 0.85, job.int8_macs_share, ""))
        found.append(at_most(f"{name}: loss on held-out frames", _MOST_LOSS, job.loss, ""))
        if job.scores is not None:
            labelled, lost = _LABELLED[name], 100.0 * (job.scores[0] - job.scores[1])
            found.append(at_most(f"{name}: points of {labelled.score} lost elsewhere", labelled.most, lost, ""))
    return found
