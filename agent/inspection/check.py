"""Check a model spec on frames: measure it beside its likeliest mistakes, round by round, and give a verdict.

A round measures the surest spec so far beside all that differ from it in one more kind, and goes on from one that is
surer. So two mistakes at a time are found too, as long as correcting one of them alone helps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from agent.camera.reader import read_spread, source_length
from agent.camera.source import parse_source
from agent.common.console import progress
from agent.common.table import tabulate
from agent.inspection.alternatives import Alternative, alternatives, unchanged
from agent.inspection.channel_values import unlike_scores
from agent.inspection.graph_facts import read_facts
from agent.inspection.inspect import inspect_model
from agent.inspection.spec_guess import Head, fitting_heads
from agent.inspection.sureness import FEW, LEAST, NO_SURENESS, Finding, Sureness, compare, measure
from agent.models.model import open_model
from agent.vision.answer import Answer
from agent.vision.preprocess import Geometry
from agent.vision.spec import ModelSpec, load_model_spec
from agent.vision.task import VisionTask
from agent.vision.tasks.opening import open_task
from engines.interface import Array, BackendOptions, Engine
from engines.registry import open_backend

_ROUNDS = 3
_COLUMNS = 80  # width of the table, in characters
_TOP_CLASSES = 5

Image = NDArray[np.uint8]


@dataclass(frozen=True)
class Answered:
    """The network's input for one frame, and its answer.

    Args:
        tensor: the network input, of one frame.
        classes: of a classifier, its surest classes by name, with their probabilities.
    """

    tensor: Array
    outputs: Mapping[str, Array]
    prediction: Answer
    geometry: Geometry
    classes: Sequence[tuple[str, float]] = ()


@dataclass(frozen=True)
class Row:
    """A spec that was tried.

    Args:
        sureness: nothing where nothing says it.
        finding: compared with the surest spec of the rounds before; empty for the spec as written.
    """

    alternative: Alternative
    sureness: Sureness
    finding: Finding | None = None


@dataclass(frozen=True)
class Check:
    """The result of a check.

    Args:
        rows: the spec as written first.
        surest: one of `rows`; the first unless another one is surer.
        frame: the frame with the most to see in it, BGR uint8 (H, W, 3).
        answers: to that frame, one for each row.
        faults: what is wrong with the outputs under the spec as written.
    """

    target: Path
    frames: int
    rows: tuple[Row, ...]
    surest: Row
    frame: Image
    answers: tuple[Answered, ...]
    faults: tuple[str, ...]

    @property
    def written(self) -> ModelSpec:
        return self.rows[0].alternative.spec

    @property
    def is_compared(self) -> bool:
        """False where nothing says how sure the model is."""
        return open_task(self.written).can_be_sure

    @property
    def lines(self) -> list[str]:
        """The lines of YAML to change; none where no other spec is surer."""
        return self.surest.alternative.lines(self.written)

    @property
    def verdict(self) -> str:
        """One sentence for people."""
        if not self.is_compared:
            return (
                f"a {self.written.task} model does not say how sure it is, so nothing is compared: look at its pictures"
            )
        if self.surest is not self.rows[0]:
            figures = f"{self.surest.sureness.mean:.2f} against {self.rows[0].sureness.mean:.2f}"
            found = f"with {self.surest.alternative.name} the model is surer ({figures}): try it"
            equals = [row.alternative.name for row in self.equals]
            return f"{found}; {' and '.join(equals)} {'do' if len(equals) > 1 else 'does'} as well" if equals else found
        if all(row.sureness.mean < LEAST for row in self.rows):
            return "nothing is found in these frames, whatever the spec: give frames that show what the model looks for"
        return _unchanged_verdict(self.rows, self.frames)

    @property
    def equals(self) -> list[Row]:
        """The other specs that are surer than the one as written, and that the surest is not surer than."""
        surest = self.surest
        return [
            row
            for row in self.rows
            if row is not surest
            and row.alternative.kinds == surest.alternative.kinds
            and row.finding == "surer"
            and compare(surest.sureness, row.sureness, row.alternative.kinds[-1] == "resize") == "no difference"
        ]

    def caption(self, row: Row) -> str:
        """Return how sure the model is under one of `rows`, in words that say no more than the verdict.

        A row's finding compares it with a round before; the verdict is about all rows.
        """
        figure = f"sureness {row.sureness.mean:.2f}"
        if row.finding is None:
            return figure
        words: str = row.finding
        if row is self.surest:
            words = "the surest"
        elif row.finding == "surer":
            words = "as sure as the surest" if row in self.equals else "surer, but not the surest"
        elif row.finding == "no difference":
            words = "no difference beyond chance"
        return f"{figure}: {words}"

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON object of `--json`."""
        rows = [
            {
                "name": row.alternative.name,
                "kinds": list(row.alternative.kinds),
                "yaml": row.alternative.lines(self.written),
                "sureness": _figure(row.sureness.mean) if self.is_compared else None,
                "top": _figure(row.sureness.top) if self.is_compared else None,
                "finding": row.finding,
            }
            for row in self.rows
        ]
        first = self.answers[0]
        has_answer = self.is_compared or open_task(self.written).can_be_drawn
        return {
            "model": str(self.target),
            "task": self.written.task,
            "frames": self.frames,
            "verdict": self.verdict,
            "surest": self.surest.alternative.name,
            "yaml": self.lines,
            "specs": rows,
            "outputs": [dict(zip(("name", "shape", *_RANGE), row, strict=True)) for row in self.ranges],
            "faults": list(self.faults),
            "answer": first.prediction.in_frame(first.geometry).as_dict(self.written) if has_answer else None,
        }

    @property
    def ranges(self) -> list[tuple[str, list[int], float | None, float | None, float | None]]:
        """Name, shape, least, mean and largest value of each output for the frame; None for what is not finite."""
        return [(name, list(output.shape), *_range(output)) for name, output in self.answers[0].outputs.items()]


_RANGE = ("least", "mean", "largest")


def _range(output: Array) -> tuple[float | None, float | None, float | None]:
    """Return the least, mean and largest value; None for each that is not finite, and of an empty output."""
    values = output.astype(np.float64)
    if not values.size:
        return None, None, None
    return _figure(values.min()), _figure(values.mean()), _figure(values.max())


def _figure(value: float) -> float | None:
    return round(float(value), 4) if np.isfinite(value) else None


def _unchanged_verdict(rows: Sequence[Row], frames: int) -> str:
    """Return the verdict where nothing is surer than the spec as written."""
    written, *others = rows
    if not others:
        return "no other spec fits this model, so there is nothing to compare"
    open_kinds = dict.fromkeys(row.alternative.kinds[-1] for row in others if row.finding == "no difference")
    name = written.alternative.name
    verdict = f"{name} is the surest"
    if open_kinds:
        verdict = f"nothing is surer than {name}; these frames do not decide {', '.join(open_kinds)}"
    for row in others:
        if row.finding == "finds more":
            return f"{verdict}; with {row.alternative.name} more is found, but nothing surer"
    return verdict if frames >= FEW else f"{verdict}; {FEW} frames or more would say more"


def run_check(target: Path, frames: str, count: int | None, threads: int) -> Check:
    """Check a MODEL.yaml, or a MODEL.onnx by its guessed spec, on frames; its float reference runs on ONNX Runtime.

    Args:
        frames: a source, as `parse_source` understands it; a single photo too.
        count: frames at most, spread evenly over a recording; None: enough for a verdict on most models.

    Raises what reading the spec, the model and the frames raises; ConfigError where the spec does not fit the model.
    """
    source = parse_source(frames)
    is_guessed = target.suffix == ".onnx"
    spec = inspect_model(target).spec() if is_guessed else load_model_spec(target)
    model = open_model(spec)
    task = open_task(spec)
    count = count or task.frames_to_check
    images = []
    with progress("reading frames", min(count, source_length(source) or count)) as bar:
        for image in read_spread(source, count):
            images.append(image)
            bar.update(len(images))
    heads = fitting_heads(read_facts(spec.path, spec.inputs)) if task.decoders else ()
    heads = tuple(head for head in heads if head.task == spec.task)
    written = unchanged(spec, is_guessed)
    with closing(open_backend("onnxruntime", BackendOptions(threads)).load(model.master.SerializeToString())) as engine:
        if not task.can_be_sure:
            surest = Row(written, NO_SURENESS)
            rows = [surest]
        else:
            rows, surest = _measure_rounds(engine, written, images, heads)
        shown = images[int(np.argmax(np.sum([row.sureness.sums for row in rows], axis=0)))]
        answers = tuple(_answer(engine, row.alternative.spec, shown) for row in rows)
    faults = [
        f"output '{name}' is not finite" for name, each in answers[0].outputs.items() if not np.isfinite(each).all()
    ]
    faults += filter(None, [unlike_scores(spec, answers[0].outputs)])
    return Check(target, len(images), tuple(rows), surest, shown, answers, tuple(faults))


def _measure_rounds(
    engine: Engine, written: Alternative, images: Sequence[Image], heads: Sequence[Head]
) -> tuple[list[Row], Row]:
    """Return every spec that was tried, the one as written first, and the surest of them."""
    (sureness,) = _measure(engine, [written], images, "measuring the spec")
    surest = Row(written, sureness)
    rows = [surest]
    is_bytes = engine.inputs[0].dtype == np.uint8
    for number in range(1, _ROUNDS + 1):
        base = surest
        others = [
            other
            for other in alternatives(base.alternative, heads, is_bytes)
            if not _same_input(engine, base.alternative.spec, other.spec, images)
        ]
        figures = _measure(engine, others, images, f"measuring alternatives, round {number}")
        for other, figure in zip(others, figures, strict=True):
            row = Row(other, figure, compare(figure, base.sureness, other.kinds[-1] == "resize"))
            rows.append(row)
            if row.finding == "surer" and figure.mean > surest.sureness.mean:
                surest = row
        if surest is base:
            break
    return rows, surest


def _measure(engine: Engine, specs: Sequence[Alternative], images: Sequence[Image], title: str) -> list[Sureness]:
    with progress(title, len(specs) * len(images)) as bar:

        def counted(index: int) -> Iterator[Image]:
            for done, image in enumerate(images, start=index * len(images)):
                bar.update(done, specs[index].name)
                yield image

        return [measure(engine, each.spec, counted(index)) for index, each in enumerate(specs)]


def _same_input(engine: Engine, first: ModelSpec, second: ModelSpec, images: Sequence[Image]) -> bool:
    """Return True where the network gets the same of these frames, as of frames with its own proportions, however."""
    if first.decoder != second.decoder:
        return False
    by_size = {image.shape: image for image in images}
    tasks = [VisionTask(spec, engine.inputs, engine.outputs) for spec in (first, second)]
    return all(
        np.array_equal(tasks[0].preprocess(image)[0], tasks[1].preprocess(image)[0]) for image in by_size.values()
    )


def _answer(engine: Engine, spec: ModelSpec, image: Image) -> Answered:
    task = VisionTask(spec, engine.inputs, engine.outputs)
    tensor, geometry = task.preprocess(image)
    outputs = engine.infer(tensor)
    each = np.nan_to_num(open_task(spec).probabilities(outputs))
    classes = [(spec.label(int(index)), float(each[index])) for index in (-each).argsort()[:_TOP_CLASSES]]
    return Answered(tensor.copy(), outputs, task.answer(outputs, tensor), geometry, classes)


def print_check(check: Check, console: Console) -> None:
    """Print a check for people: a table of at most 80 columns, the verdict, and the lines of YAML to change."""
    if check.is_compared:
        finds_objects = open_task(check.written).finds_objects
        objects = ("surest object",) if finds_objects else ()
        heads: tuple[str, ...] = (f"frames: {check.frames}", "sureness", *objects, "than the surest above")
        rows = []
        for row in check.rows:
            top = [f"{row.sureness.top:.2f}"] if finds_objects else []
            rows.append([row.alternative.name, f"{row.sureness.mean:.2f}", *top, row.finding or ""])
    else:
        heads = ("output", "shape", *_RANGE)
        rows = [
            [name, " x ".join(map(str, shape)), *("not finite" if each is None else f"{each:.4g}" for each in figures)]
            for name, shape, *figures in check.ranges
        ]
    width = min(console.width, _COLUMNS)
    console.print(tabulate(heads, rows, width, prose=heads[:1], right=("sureness", "surest object")), width=width)
    for text in (*check.faults, check.verdict, *(f"  {line}" for line in check.lines)):
        console.print(text, soft_wrap=True, markup=False, highlight=False, emoji=False)
