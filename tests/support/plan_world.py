"""A small world to plan in: a net of which one branch alone bears no INT8, its calibration, and searches for a plan."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import yaml
from onnx import ModelProto
from runtime_under_test import RUNTIME
from worlds import FPS, SPEC, make_world
from zoo import Net

from agent.camera.source import parse_source
from agent.cli.offline_runs import run_calibrate
from agent.common.clock import SYSTEM_CLOCK, Clock
from agent.common.state_files import Journal
from agent.models.model import open_model
from agent.planning.costs import PlanBuilder
from agent.planning.frames import RandomFrames
from agent.planning.search import PlanOptions, PlanSearch
from agent.vision.spec import load_model_spec
from engines.calibration import load_calibration
from engines.interface import Backend, Progress
from engines.registry import open_backend

LOUD, QUIET = "Conv_t0", "Conv_t2"  # layers of `two_branches`
RAW = {**SPEC, "task": "raw", "min_sqnr_db": 65.0}  # LOUD in INT8 leaves 54, QUIET in INT8 83
MACS = PlanOptions(max_loss=0.2, costs="macs")  # a certificate takes 24 frames


def two_branches(shape: tuple[int | str, ...] = (1, 3, 8, 8)) -> ModelProto:
    """The sum of two convolutions of the image, of which the first is 30 times as loud."""
    net = Net(shape)
    loud = net.node("Mul", net.conv("image", 3, 8), net.constant(np.array(30.0, np.float32)))
    return net.model(net.node("Add", loud, net.conv("image", 3, 8)))


def plan_world(folder: Path, model: ModelProto | None = None, frames: int = 120, **spec: Any) -> Path:
    """A folder with model.onnx, model.yaml, clip.avi and calibration.json of all its frames."""
    make_world(folder, lambda _: 0.5, frames / FPS)
    onnx.save(model or two_branches(), folder / "model.onnx")
    (folder / "model.yaml").write_text(yaml.safe_dump({**RAW, **spec}))
    with contextlib.redirect_stderr(io.StringIO()):
        output, runtime = folder / "calibration.json", open_backend("onnxruntime")
        run_calibrate(folder / "model.yaml", str(folder / "clip.avi"), frames, "entropy", output, runtime)
    return folder


@contextmanager
def silent_stage(_name: str) -> Iterator[Progress]:
    yield lambda _fraction, _doing: None


def planner(
    folder: Path,
    options: PlanOptions = MACS,
    backend: Backend | None = None,
    sources: Sequence[str] = ("clip.avi",),
    clock: Clock = SYSTEM_CLOCK,
) -> PlanSearch:
    """A search in a world; every call is a new one, as a new process would make it."""
    embedded = open_backend("onnxruntime")
    model = open_model(load_model_spec(folder / "model.yaml"))
    builder = PlanBuilder(model, load_calibration(folder / "calibration.json"), backend or open_backend(RUNTIME))
    frames = [RandomFrames(parse_source(str(folder / source)), options.seed) for source in sources]
    return PlanSearch(builder, frames, embedded, options, silent_stage, clock)


def journal(folder: Path) -> Journal:
    return Journal(folder / "plan.json.journal", "one search")
