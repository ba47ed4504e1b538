"""The engine that a daemon comes to by itself: its first job on real models, and what the engine is worth elsewhere.

    python -m benchmarks.daemon_engines [--models resnet20 fastestdet ultraface yolox_nano] [--json | --markdown]

Needs ../shared/data (or $TARED_SHARED/data). Each model gets a daemon as a process of its own: `tared run` with its
defaults, but for fewer frames, on a recording that is played in a loop, until its first job has ended. ONNX Runtime,
one thread. The engine that is committed is then scored beside FP32 on labelled images that did not calibrate it: mAP
on COCO photos, top-1 on CIFAR-10.

PLANNING is the time from that state of the job to the next, with the child's niceness on a machine that others may use.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.progress import Progress

from agent.models.model import Model, open_model
from agent.vision.evaluation import evaluate
from agent.vision.spec import ModelSpec
from benchmarks.models import DATA, MODELS
from benchmarks.peers import ROOT
from benchmarks.report import Bar, Section, add_output_option, at_least, at_most, bars_section, publish
from engines.interface import Engine
from engines.registry import open_backend
from engines.store.artefact import Store

_FRAMES = 96  # that calibrate; beside them 32 are held out, as by default
_LIMIT_S = 900.0  # for a first job

_COCO, _CIFAR = "img_coco_train2017_first128_labelled.zip", "img_cifar10_test_A_3000.zip"

_CIFAR_CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


@dataclass(frozen=True)
class Case:
    """A model, the scene that its daemon sees, and what its engine is scored on beside FP32.

    labelled: images, empty where there are none. score: its name in `evaluate`'s answer. most: points of it that the
        engine may lose, in hundredths.
    """

    scene: str
    labelled: str
    score: str
    most: float


CASES = {
    "resnet20": Case("img_cifar10_train_calib_500.zip", _CIFAR, "top1", 0.4),
    "fastestdet": Case("vid_one_by_one_person_768x432.mp4", _COCO, "map", 1.0),
    "ultraface": Case("vid_face_asl_walk_640x480.mkv", "", "", 0.0),
    "yolox_nano": Case("vid_vehicle_surveillance_640x352.mp4", _COCO, "map", 1.0),
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
    int8_macs_share: float
    loss: float
    plans: int
    scores: tuple[float, float] | None


def first_job(name: str, folder: Path) -> FirstJob:
    """Run a daemon on the model's scene until its first job has ended."""
    case, spec = CASES[name], _spec(name)
    state = folder / "state"
    config: dict[str, Any] = {
        "model": {**spec.model_dump(mode="json"), "path": str(spec.path)},
        "camera": {"source": str(DATA / case.scene), "loop": True},
        "calibration": {"frames": _FRAMES, "within_s": 10.0},
        "probation": {"frames": 30, "seconds": 1.0},
        "mqtt": {"host": None},
        "state_dir": str(state),
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    entered = _follow([sys.executable, "-m", "fleet.cli", "run", "-c", str(path), "--json"], folder / "log")
    began_s, ended_s = entered["COLLECTING"], max(entered.values())
    planned_s = entered.get("BUILDING", ended_s) - entered.get("PLANNING", ended_s)
    artefact = Store(state).read("current")
    if artefact is None:
        return FirstJob(_error(folder / "log"), ended_s - began_s, planned_s, 0.0, 1.0, 0, None)
    manifest = artefact.manifest
    tried = json.loads(artefact.read_file("plan.json")).get("evidence", {}).get("tried", [])
    scores = _scores(open_model(spec), case, artefact.read_engine()) if case.labelled else None
    loss = 1.0 - manifest["verdict"]["fidelity"]
    return FirstJob("COMMITTED", ended_s - began_s, planned_s, manifest["int8_macs_share"], loss, len(tried), scores)


def _spec(name: str) -> ModelSpec:
    keys, _ = MODELS[name]
    labels = {"labels": _CIFAR_CLASSES} if name == "resnet20" else {}
    return ModelSpec.model_validate({**keys, **labels, "path": DATA / str(keys["path"])})


def _follow(command: list[str], log: Path) -> Mapping[str, float]:
    """Run a daemon until a first job has ended; return when it entered which state, in monotonic seconds."""
    entered: dict[str, float] = {}
    deadline_s = time.monotonic() + _LIMIT_S
    with log.open("w") as kept:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=ROOT)
        assert process.stderr is not None
        for line in process.stderr:
            kept.write(line)
            step = re.search(r"event=job .*step='(\w+)'", line)
            if step is not None:
                entered.setdefault(step[1], time.monotonic())
            over = entered.keys() & {"COMMITTED", "FAILED"} or re.search(r"step='FAILED'", line)
            if over or time.monotonic() > deadline_s:
                break
        process.send_signal(signal.SIGTERM)
        kept.write(process.stderr.read())
        process.wait(60.0)
    return entered


def _error(log: Path) -> str:
    found = re.findall(r"event=error code='([\w.]+)' message='(.*?)'", log.read_text())
    return ": ".join(found[-1]) if found else "no end in time"


def _scores(model: Model, case: Case, engine: bytes) -> tuple[float, float]:
    runtime = open_backend("onnxruntime")

    def score(content: bytes) -> float:
        with closing(runtime.load(content)) as loaded:
            return _score(loaded, model.spec, case)

    return score(model.master.SerializeToString()), score(engine)


def _score(engine: Engine, spec: ModelSpec, case: Case) -> float:
    return float(evaluate(engine, spec, DATA / case.labelled).scores[case.score])


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
        table.rows.append((name, CASES[name].scene, job.outcome, *map(str, figures), *scores))
    return table


def bars(jobs: Mapping[str, FirstJob]) -> list[Bar]:
    """The bars of each first job."""
    found = []
    for name, job in jobs.items():
        found.append(at_least(f"{name}: MACs in INT8 after the first job", 0.85, job.int8_macs_share, ""))
        found.append(at_most(f"{name}: loss on held-out frames", 0.1, job.loss, ""))
        if job.scores is not None:
            lost = 100.0 * (job.scores[0] - job.scores[1])
            found.append(at_most(f"{name}: points of {CASES[name].score} lost elsewhere", CASES[name].most, lost, ""))
    return found


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="The engine that a daemon comes to by itself.")
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES))
    add_output_option(parser)
    options = parser.parse_args()
    jobs: dict[str, FirstJob] = {}
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("first jobs", total=len(options.models))
        for name in options.models:
            with tempfile.TemporaryDirectory() as folder:
                jobs[name] = first_job(name, Path(folder))
            progress.advance(task)
    publish([jobs_section(jobs), bars_section(bars(jobs))], options)


if __name__ == "__main__":
    main()
