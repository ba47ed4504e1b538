"""Does INT8 keep the accuracy of each task? The trained models with labels: float, plain INT8, and a job's plan.

    python -m benchmarks.tasks [--models espnet ...] [--max-loss 0.05] [--json | --markdown]
    python -m benchmarks.tasks --spec MODEL.yaml --frames SRC --dataset LABELLED

Needs ../shared/data (or $TARED_SHARED/data), but for a model of one's own. Each is calibrated, planned as a job of the
daemon would, built and scored by tared's own functions, on ONNX Runtime, which computes the graphs as they are written.
The accuracy is the first score of `tared evaluate`. The loss is 1 - the mean fidelity to float, on the same images.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from agent.camera.reader import read_spread
from agent.camera.source import parse_source
from agent.cli.benchmark import FLOAT, PLAIN, PLANNED, plan_by_work
from agent.cli.offline_runs import run_calibrate
from agent.models.build import build_int8
from agent.models.model import Model, open_model
from agent.planning.ladder import Scene
from agent.vision.answer import Answer
from agent.vision.fidelity import fidelity
from agent.vision.registry import accepted_loss
from agent.vision.spec import load_model_spec
from agent.vision.task import VisionTask
from agent.vision.tasks.opening import open_task
from benchmarks.report import Bar, Section, add_output_option, at_least, at_most, bars_section, publish
from benchmarks.task_models import RECIPES, TaskModel, prepare
from calibrate.plan import ALL_INT8, PrecisionPlan
from engines.calibration import Calibration, load_calibration
from engines.interface import BackendOptions, Engine, silent
from engines.quantise.fusion import int8_macs_share
from engines.registry import open_backend

_COUNT = 128  # frames that calibrate, at most
_PLANNED = 32  # frames for plans: every other one proposes repairs, the others try
_POINTS, _SHARE = 2.0, 85.0  # the accuracy that may be lost, and the MACs in INT8 in %


@dataclass(frozen=True)
class Scored:
    """What one engine came to on the labelled images.

    accuracy: The task's first score. fidelity: The mean over the images on which it or float sees anything; None
    without one. share: of the multiply-accumulates in INT8.
    """

    accuracy: float
    fidelity: float | None
    share: float = 0.0

    @property
    def loss(self) -> float:
        return 1.0 - self.fidelity if self.fidelity is not None else float("nan")


@dataclass
class Judge:
    """Score engines of one model on its labelled images, beside the float engine's answers.

    compare: Returns the fidelity of an answer to float's.
    """

    model: TaskModel
    threads: int = 1
    compare: Callable[[Any, Any], float] = lambda served, reference: fidelity(served, reference).value
    _truths: list[Answer] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.opened: Model = open_model(load_model_spec(self.model.spec))
        self.task = open_task(self.opened.spec)
        self.backend = open_backend("onnxruntime", BackendOptions(self.threads))

    @cached_property
    def in_float(self) -> Scored:
        """The score of the float engine, whose answers are kept."""
        return self.score(self.opened.master.SerializeToString())

    def score(self, engine: bytes, share: float = 0.0) -> Scored:
        """Return the score of a graph. The first one that is scored is float's, with which others are compared."""
        losses = list[float]()
        with closing(self.backend.load(engine)) as loaded:
            scores = self.task.evaluation(self._answered(loaded, losses)).scores
        mean = float(np.mean(losses)) if losses else None
        return Scored(scores.get(self.model.score) or next(iter(scores.values())), mean, share)

    def _answered(self, engine: Engine, fidelities: list[float]) -> Iterator[tuple[Answer, Any]]:
        spec = self.opened.spec
        seeing, scoring = (
            VisionTask(each, engine.inputs, engine.outputs) for each in (spec, self.task.evaluation_spec)
        )
        is_float = not self._truths
        for number, (image, truth) in enumerate(self.task.labelled_images(self.model.dataset)):
            tensor, geometry = seeing.preprocess(image)
            outputs = engine.infer(tensor)
            answer = seeing.decode(outputs, tensor.shape)
            if is_float:
                self._truths.append(answer)
            reference = self._truths[number]
            if not (answer.is_empty and reference.is_empty):
                fidelities.append(self.compare(answer, reference))
            scored = answer if self.task.evaluation_spec == spec else scoring.decode(outputs, tensor.shape)
            yield scored.in_frame(geometry), truth

    def int8(self, plan: PrecisionPlan, calibration: Calibration) -> Scored:
        """Build INT8 under a plan, and score it."""
        built = build_int8(self.opened, self.backend, plan, calibration, {}, silent)
        share = int8_macs_share(self.opened.master, built.placement)
        return self.score(built.built.engine, share)


def calibrated(judge: Judge, folder: Path) -> tuple[Calibration, Scene]:
    """Calibrate a model as `tared calibrate` does; return that, and the frames on which a job tries plans."""
    path, source = folder / "calibration.json", str(judge.model.calibrate)
    run_calibrate(judge.model.spec, source, _COUNT, "entropy", path, judge.backend)
    with closing(judge.backend.load(judge.opened.master.SerializeToString())) as engine:
        task = VisionTask(judge.opened.spec, engine.inputs, engine.outputs)
        inputs = [task.preprocess(image)[0].copy() for image in read_spread(parse_source(source), _PLANNED)]
    calibration = load_calibration(path)
    return calibration, Scene(calibration, inputs[::2], [inputs[1::2]])


@dataclass(frozen=True)
class Outcome:
    """A model's three engines; or, where it takes no part, why."""

    name: str
    task: str = ""
    scored: Mapping[str, Scored] = field(default_factory=dict)
    max_loss: float = 0.0
    why: str = ""


def measure(model: TaskModel, max_loss: float | None, threads: int, folder: Path) -> Outcome:
    """Score a model in float, in plain INT8 and under a job's plan. max_loss: None for its task's own."""
    judge = Judge(model, threads)
    accepted = accepted_loss(judge.opened.spec.task, max_loss)
    scored = {FLOAT: judge.in_float}
    calibration, scene = calibrated(judge, folder)
    scored[PLAIN] = judge.int8(ALL_INT8, calibration)
    plan = plan_by_work(judge.opened, scene, judge.backend, accepted, silent)
    scored[PLANNED] = judge.int8(plan, calibration)
    return Outcome(model.name, judge.opened.spec.task, scored, accepted)


def section(outcomes: Iterable[Outcome]) -> Section:
    columns = ("model", "task", "float", "INT8", "its loss", "MACs", "plan", "its loss", "MACs", "loss asked for")
    table = Section("Accuracy of each task, in float, plain INT8 and under a plan", columns)
    for each in outcomes:
        if each.why:
            table.rows.append((each.name, each.why, *[""] * (len(columns) - 2)))
            continue
        cells = [each.name, each.task, f"{each.scored[FLOAT].accuracy:.4f}"]
        for engine in (each.scored[PLAIN], each.scored[PLANNED]):
            cells += [f"{engine.accuracy:.4f}", f"{engine.loss:.3f}", f"{engine.share:.1%}"]
        table.rows.append((*cells, f"{each.max_loss:g}"))
    return table


def bars(outcome: Outcome) -> list[Bar]:
    """What is asked of each plan: two points of accuracy at most, or 2 % of it, whichever is more."""
    if outcome.why:
        return []
    in_float, planned = (outcome.scored[each] for each in (FLOAT, PLANNED))
    lost = 100.0 * (in_float.accuracy - planned.accuracy)
    return [
        at_most(f"{outcome.name}: accuracy that the plan loses", _POINTS, lost, " points"),
        at_least(f"{outcome.name}: MACs of the plan in INT8", _SHARE, 100.0 * planned.share, " %"),
    ]


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose the models."""
    parser.add_argument("--models", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--spec", type=Path, help="a model of your own, with --frames and --dataset")
    parser.add_argument("--frames", type=Path, help="what calibrates it")
    parser.add_argument("--dataset", type=Path, help="its labelled images")
    parser.add_argument("--threads", type=int, default=1)


def chosen_models(options: argparse.Namespace, folder: Path) -> Iterator[tuple[str, TaskModel | str]]:
    """Yield each chosen model by its name, or why it takes no part, with a folder of its own."""
    if options.spec is not None:
        yield options.spec.stem, TaskModel(options.spec.stem, options.spec, options.frames, options.dataset)
        return
    for name in options.models:
        (place := folder / name).mkdir()
        try:
            yield name, prepare(name, place)
        except LookupError as error:
            yield name, str(error)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Float, plain INT8 and a plan of each task, by accuracy.")
    add_model_options(parser)
    parser.add_argument("--max-loss", type=float, help="for all models; by default each has its task's own")
    add_output_option(parser)
    options = parser.parse_args()
    outcomes = list[Outcome]()
    with tempfile.TemporaryDirectory() as folder:
        for name, model in chosen_models(options, Path(folder)):
            print(name, file=sys.stderr)
            if isinstance(model, str):
                outcomes.append(Outcome(name, why=model))
            else:
                (place := Path(folder, "made", name)).mkdir(parents=True)
                outcomes.append(measure(model, options.max_loss, options.threads, place))
                print(outcomes[-1], file=sys.stderr)
    publish([section(outcomes), bars_section([bar for each in outcomes for bar in bars(each)])], options)


if __name__ == "__main__":
    main()
