"""Does the loss of each task see harm? Models are damaged more and more: loss beside accuracy.

    python -m benchmarks.harm [--models espnet ...] [--every] [--by-overlap] [--json | --markdown]
    python -m benchmarks.harm --spec MODEL.yaml --frames SRC --dataset LABELLED

The models and images are those of benchmarks/tasks.py. Three kinds of damage are planted into each:

    weights      noise on the weights of every layer, of this share of their root mean square
    activations  plain INT8 whose ranges are this many times those of the calibration: below 1 they clip, above 1 they
                 round more coarsely
    layers       plain INT8 of this share of the layers, drawn at random

With --by-overlap detectors are compared as objects with shapes are: a match counts as far as the boxes overlap and the
scores are the same. Where the tasks of shapes have no data, this says how that loss goes with accuracy.

A drop is float's accuracy less the damaged model's, in points. Asked is that whatever loses five points never reads as
a fidelity above 0.98. `the loss of a point` is where the drop, as a rising function of the loss (isotonic regression),
comes to one point: the default of `max_loss` for a task is drawn from it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from onnx import ModelProto, numpy_helper
from scipy.optimize import isotonic_regression
from scipy.stats import spearmanr

from agent.vision.tasks.shapes import panoptic_quality
from benchmarks.report import Bar, Section, add_output_option, at_most, bars_section, publish
from benchmarks.task_models import TaskModel
from benchmarks.tasks import Judge, Scored, add_model_options, calibrated, chosen_models
from calibrate.plan import ALL_INT8, PrecisionPlan

WEIGHTS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4)
RANGES = (0.125, 0.25, 0.5, 0.75, 1.0, 2.0, 4.0, 8.0, 16.0)
LAYERS = (0.1, 0.2, 0.4, 0.6, 0.8)
_SEED = 0
_FALL, _MOST_FIDELITY = 5.0, 0.98  # points, and the fidelity that such a fall must not exceed
_POINT = 1.0


@dataclass(frozen=True)
class Harm:
    """One damaged model: what was done to it, the points of accuracy that it loses, and its loss."""

    kind: str
    size: float
    drop: float
    loss: float


@dataclass(frozen=True)
class Harmed:
    """A model in all its states of damage; or, where it takes no part, why."""

    name: str
    task: str = ""
    harms: Sequence[Harm] = ()
    why: str = ""

    @property
    def correlation(self) -> float:
        """Spearman's rank correlation of the loss with the drop."""
        return float(spearmanr([each.loss for each in self.harms], [each.drop for each in self.harms]).statistic)

    @property
    def highest_fidelity(self) -> float | None:
        """The highest one of all that lose five points; None where nothing does."""
        return max((1.0 - each.loss for each in self.harms if each.drop >= _FALL), default=None)

    @property
    def loss_of_a_point(self) -> float | None:
        """The loss at which the accuracy falls by a point; None where it never does."""
        ordered = sorted(self.harms, key=lambda each: each.loss)
        losses = np.array([0.0, *(each.loss for each in ordered)])
        drops = isotonic_regression([0.0, *(each.drop for each in ordered)]).x
        if drops[-1] < _POINT:
            return None
        after = int(np.searchsorted(drops, _POINT))  # at least 1: nothing is lost at a loss of 0
        share = (_POINT - drops[after - 1]) / (drops[after] - drops[after - 1])
        return float(losses[after - 1] + share * (losses[after] - losses[after - 1]))


def harmed(model: TaskModel, threads: int, folder: Path, by_overlap: bool) -> Harmed:
    """Damage a model in every way, and score it."""
    judge = Judge(model, threads, panoptic_quality) if by_overlap else Judge(model, threads)
    accuracy, harms = judge.in_float.accuracy, list[Harm]()

    def note(kind: str, size: float, scored: Scored) -> None:
        harms.append(Harm(kind, size, 100.0 * (accuracy - scored.accuracy), scored.loss))
        print(f"{model.name}: {harms[-1]}", file=sys.stderr)

    for size in WEIGHTS:
        note("weights", size, judge.score(with_noise(judge.opened.master, size).SerializeToString()))
    calibration, _ = calibrated(judge, folder)
    for size in RANGES:
        stretched = replace(calibration, amax={name: amax * size for name, amax in calibration.amax.items()})
        note("activations", size, judge.int8(ALL_INT8, stretched))
    names = sorted(judge.opened.placement.weights)
    drawn = np.random.default_rng(_SEED).permutation(names).tolist()
    for size in LAYERS:
        in_float = dict.fromkeys(drawn[round(size * len(drawn)) :], "not drawn")
        note("layers", size, judge.int8(PrecisionPlan(in_float), calibration))
    return Harmed(model.name, judge.opened.spec.task, harms)


def with_noise(model: ModelProto, share: float) -> ModelProto:
    """Return the model with normal noise on the weights of every layer, of this share of their root mean square."""
    damaged, generator = ModelProto(), np.random.default_rng(_SEED)
    damaged.CopyFrom(model)
    for weight in damaged.graph.initializer:
        values = numpy_helper.to_array(weight)
        if values.ndim < 2 or values.dtype.kind != "f":
            continue
        noise = generator.normal(size=values.shape) * share * np.sqrt(np.square(values).mean())
        weight.CopyFrom(numpy_helper.from_array((values + noise).astype(values.dtype), weight.name))
    return damaged


def sections(found: Sequence[Harmed], every: bool) -> Iterator[Section]:
    """Yield the table of all models and, if asked, one of each."""
    columns = ("model", "task", "states", "drop from", "to", "rank correlation", "highest fidelity of -5", "loss of -1")
    table = Section("Loss beside the drop of accuracy", columns)
    for each in found:
        if each.why:
            table.rows.append((each.name, each.why, *[""] * (len(columns) - 2)))
            continue
        drops = [harm.drop for harm in each.harms]
        extremes = f"{min(drops):.1f}", f"{max(drops):.1f}"
        told = (_shown(each.highest_fidelity), _shown(each.loss_of_a_point))
        table.rows.append((each.name, each.task, str(len(drops)), *extremes, f"{each.correlation:.2f}", *told))
    yield table
    for each in found if every else ():
        rows = [
            (harm.kind, f"{harm.size:g}", f"{harm.drop:.2f}", f"{harm.loss:.4f}")
            for harm in sorted(each.harms, key=lambda harm: harm.loss)
        ]
        yield Section(each.name, ("damage", "size", "points lost", "loss"), list(rows))


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def bars(found: Sequence[Harmed]) -> list[Bar]:
    return [
        at_most(f"{each.name}: fidelity of what loses five points", _MOST_FIDELITY, each.highest_fidelity, "")
        for each in found
        if not each.why
    ]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="The loss of each task beside the accuracy that is lost.")
    add_model_options(parser)
    parser.add_argument("--every", action="store_true", help="also a table of each model")
    parser.add_argument("--by-overlap", action="store_true", help="detectors by the overlap of their boxes")
    add_output_option(parser)
    options = parser.parse_args()
    found = list[Harmed]()
    with tempfile.TemporaryDirectory() as folder:
        for name, model in chosen_models(options, Path(folder)):
            if isinstance(model, str):
                found.append(Harmed(name, why=model))
            else:
                (place := Path(folder, "made", name)).mkdir(parents=True)
                found.append(harmed(model, options.threads, place, options.by_overlap))
    publish([*sections(found, options.every), bars_section(bars(found))], options)


if __name__ == "__main__":
    main()
