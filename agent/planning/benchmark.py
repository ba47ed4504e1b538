"""Compare the engines that a model can have on this machine: every runtime in float, in plain INT8, and under a plan.

`run_benchmark` is `tared benchmark`. Every second frame calibrates and plans, and the others measure. All engines
answer the same frames in turn, so that a machine that slows down meanwhile slows all of them.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rich.bar import Bar
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agent.camera.reader import Image, read_spread
from agent.camera.source import parse_source
from agent.collection.collection import CalibrationSet
from agent.common.console import progress, stage
from agent.common.errors import AgentError
from agent.common.table import tabulate
from agent.models.build import build_int8
from agent.models.model import Model, calibrate, open_model
from agent.planning.costs import GroupCosts
from agent.planning.ladder import Ladder, LadderOptions, Scene
from agent.vision.decode import Prediction
from agent.vision.evaluation import evaluate
from agent.vision.fidelity import fidelity
from agent.vision.spec import ModelSpec, load_model_spec
from agent.vision.task import VisionTask
from calibrate.errors import TaredError
from calibrate.plan import ALL_INT8, PrecisionPlan, Repairs
from engines.calibration import Calibration
from engines.interface import Array, Backend, BackendOptions, Engine, Progress
from engines.quantise.costs import HasTime, macs_costs
from engines.quantise.fusion import Grouping
from engines.registry import BACKENDS, open_backend, open_simulator

FLOAT, PLAIN, PLANNED = "float", "plain INT8", "plan"
AS_WRITTEN = "{} of {}, as written"
_FEWEST = 16  # frames: half of them measure
_TIMED = 200  # inferences of each engine at least: the 99th percentile has two above it
_PLANNING_FRAMES = 16
_PLANNING_S = 120.0
_CHART_COLUMNS = 36


@dataclass(frozen=True)
class Entry:
    """One engine on one runtime; the figures are None for one that could not be made, for the reason in `without`.

    fidelity: to float on ONNX Runtime, mean over the frames on which either sees anything; None without one.
    score: top-1 or mAP on the data set. memory_bytes: what a process takes more once it has the runtime, the engine and
    one answer. made_s: to build the engine.
    """

    runtime: str
    engine: str
    without: str = ""
    p50_ms: float | None = None
    p99_ms: float | None = None
    fidelity: float | None = None
    score: float | None = None
    memory_bytes: int | None = None
    engine_bytes: int | None = None
    made_s: float | None = None


@dataclass(frozen=True)
class _Made:
    """An engine that was built, and the backend that loads it."""

    entry: Entry
    backend: Backend
    content: bytes


def run_benchmark(
    spec_path: Path,
    frames: str,
    count: int,
    threads: int,
    max_loss: float,
    dataset: Path | None = None,
    others: Mapping[tuple[str, str], bytes] | None = None,
    as_written: bool = False,
) -> dict[str, Any]:
    """Build all engines, measure them, and return the object that --json prints.

    Args:
        frames: A source, as `parse_source` understands it. count: Frames of it at most, evenly spread.
        max_loss: What the plan may lose, as recalibration.max_loss.
        dataset: Labelled images, as for `tared evaluate`.
        others: Engines that another tool made, by runtime and name.
        as_written: OpenVINO's INT8 graphs are run on ONNX Runtime, too, which computes them as they are written.

    Raises AgentError (`benchmark.frames`) for too few frames, and TaredError as the source and the model do.
    """
    model = open_model(load_model_spec(spec_path))
    images = list(read_spread(parse_source(frames), count))
    if len(images) < _FEWEST:
        found = f"{len(images)} frames in {frames}"
        raise AgentError("benchmark.frames", found, f"{_FEWEST} at least", "give a longer recording, or more images")
    calibrating, measured = images[::2], images[1::2]
    options = BackendOptions(threads)
    embedded = open_backend("onnxruntime", options)
    calibration, inputs = _calibrate(model, calibrating, embedded, frames)
    scene = Scene(calibration, inputs, inputs[1::4])
    entries, made = list[Entry](), list[_Made]()
    for name in BACKENDS:
        try:
            backend = open_backend(name, options)
        except TaredError as error:
            entries.append(Entry(name, FLOAT, error.found))
            continue
        with stage(f"planning for {name}") as show:
            plan = _plan(model, scene, open_simulator(backend, threads), max_loss, show)
        built, missing = _build_all(model, backend, calibration, plan)
        made += built
        entries += missing
        if as_written and name == "openvino":
            graphs = [each for each in built if each.entry.engine != FLOAT]
            names = [AS_WRITTEN.format(each.entry.engine, name) for each in graphs]
            made += [
                _Made(Entry("onnxruntime", engine, engine_bytes=len(each.content)), embedded, each.content)
                for engine, each in zip(names, graphs, strict=True)
            ]
    for (name, engine), content in (others or {}).items():
        made.append(_Made(Entry(name, engine, engine_bytes=len(content)), open_backend(name, options), content))
    entries += _measure(model, made, measured, embedded, dataset)
    rows = [asdict(entry) for entry in sorted(entries, key=lambda entry: list(BACKENDS).index(entry.runtime))]
    return {"model": spec_path.name, "frames": len(measured), "threads": threads, "engines": rows}


def _calibrate(
    model: Model, images: Sequence[Image], embedded: Backend, source: str
) -> tuple[Calibration, list[Array]]:
    """Return the calibration of these images, and some of their network inputs, to plan on."""
    collection = CalibrationSet(held_out_size=0)
    inputs = list[Array]()
    wanted = set(np.linspace(0, len(images) - 1, min(len(images), 2 * _PLANNING_FRAMES)).astype(int).tolist())
    with closing(model.open_observer(embedded)) as observer, progress("calibrating", len(images)) as bar:
        task = VisionTask(model.spec, observer.inputs, observer.outputs)
        for number, image in enumerate(images):
            tensor, _ = task.preprocess(image)
            collection.add(tensor, observer.observe(tensor))
            if number in wanted:
                inputs.append(tensor.copy())
            bar.update(number + 1)
    observed, name = collection.histograms, Path(source).name
    return calibrate(model, observed, "entropy", collection.frames, name, embedded, collection.extremes), inputs


def _plan(model: Model, scene: Scene, embedded: Backend, max_loss: float, show: Progress) -> PrecisionPlan:
    """Return the plan that a job would build first."""

    def by_work(grouping: Grouping, _: Repairs, __: Progress, ___: HasTime) -> GroupCosts:
        return GroupCosts(macs_costs(grouping), "work counts: a job would measure times")

    ladder = Ladder(model, ALL_INT8, scene, {}, embedded, LadderOptions(max_loss, _PLANNING_S), show, by_work)
    return next(iter(ladder.plans()), ALL_INT8)


def _build_all(
    model: Model, backend: Backend, calibration: Calibration, plan: PrecisionPlan
) -> tuple[list[_Made], list[Entry]]:
    """Build the engines of one runtime; return them, and an entry for each that could not be made."""
    name, made, missing = backend.name, list[_Made](), list[Entry]()
    with stage(f"building for {name}") as show:
        for engine in (FLOAT, PLAIN, PLANNED):
            started = time.monotonic()
            try:
                if engine == FLOAT:
                    request = model.build_request(model.master, backend.precisions[-1], calibration.seen)
                    content = backend.build(request, show).engine
                else:
                    under = plan if engine == PLANNED else ALL_INT8
                    content = build_int8(model, backend, under, calibration, {}, show).built.engine
            except TaredError as error:
                missing.append(Entry(name, engine, error.found))
                continue
            made_s = round(time.monotonic() - started, 3)
            made.append(_Made(Entry(name, engine, engine_bytes=len(content), made_s=made_s), backend, content))
    return made, missing


def _measure(
    model: Model, made: Sequence[_Made], images: Sequence[Image], embedded: Backend, dataset: Path | None
) -> list[Entry]:
    """Return the entries with all that is measured."""
    entries = list[Entry]()
    with ExitStack() as stack:
        engines = [stack.enter_context(closing(each.backend.load(each.content))) for each in made]
        reference = stack.enter_context(closing(embedded.load(model.master.SerializeToString())))
        times_ms, agreements = _answer(model.spec, engines, reference, images)
        with progress("scoring and weighing", len(made)) as bar:
            for number, (each, engine) in enumerate(zip(made, engines, strict=True)):
                agreement, times = agreements[number], times_ms[number]
                entry = replace(
                    each.entry,
                    p50_ms=round(float(np.percentile(times, 50)), 3),
                    p99_ms=round(float(np.percentile(times, 99)), 3),
                    fidelity=round(float(np.mean(agreement)), 4) if agreement else None,
                    memory_bytes=_memory_bytes(each, engine.inputs[0].shape),
                )
                if dataset is not None:
                    scores = evaluate(engine, model.spec, dataset).scores
                    entry = replace(entry, score=round(next(iter(scores.values())), 4))
                entries.append(entry)
                bar.update(number + 1)
    return entries


def _answer(
    spec: ModelSpec, engines: Sequence[Engine], reference: Engine, images: Sequence[Image]
) -> tuple[list[list[float]], list[list[float]]]:
    """Let all engines answer all images in turn; return by engine its times in ms, and its fidelities."""
    tasks = [VisionTask(spec, engine.inputs, engine.outputs) for engine in engines]
    of_reference = VisionTask(spec, reference.inputs, reference.outputs)
    times_ms: list[list[float]] = [[] for _ in engines]
    agreements: list[list[float]] = [[] for _ in engines]
    rounds = -(-_TIMED // len(images))
    truths: list[Prediction] = [of_reference.infer(reference, image)[0] for image in images]
    with progress("measuring", rounds * len(images)) as bar:
        for number in range(rounds):
            for shown, (image, truth) in enumerate(zip(images, truths, strict=True), start=1):
                for index, (task, engine) in enumerate(zip(tasks, engines, strict=True)):
                    answer, _ = task.infer(engine, image)
                    times_ms[index].append(1000.0 * task.inferred_s)
                    agreement = fidelity(answer, truth, spec.min_sqnr_db)
                    if number == 0 and not agreement.is_empty:
                        agreements[index].append(agreement.value)
                bar.update(number * len(images) + shown)
    return times_ms, agreements


def _memory_bytes(made: _Made, shape: Sequence[int | None]) -> int | None:
    """Return what one process takes more with the engine; None where it ended without an answer."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(_weigh, (made.backend.name, made.content, [size or 1 for size in shape]))


def _weigh(name: str, content: bytes, shape: list[int]) -> int:
    process = psutil.Process()
    before = process.memory_info().rss
    with closing(open_backend(name).load(content)) as engine:
        engine.infer(np.zeros(shape, engine.inputs[0].dtype))
        return process.memory_info().rss - before


def print_benchmark(result: Mapping[str, Any], console: Console) -> None:
    """Print the table, and a chart of the latencies; in the table they are also multiples of float on ONNX Runtime."""
    numbers = ("p50 ms", "p99 ms", "to float", "fidelity", "score", "memory MiB", "engine MiB", "made in s")
    entries = [Entry(**entry) for entry in result["engines"]]
    base = next((each.p50_ms for each in entries if (each.runtime, each.engine) == ("onnxruntime", FLOAT)), None)
    rows = [tuple(_cells(each, base)) for each in entries]
    console.print(Text(f"{result['model']}: {result['frames']} frames, {result['threads']} threads", style="italic"))
    console.print(tabulate(("runtime", "engine", *numbers), rows, console.width, prose=("engine",), right=numbers))
    timed = sorted(((each.p50_ms, each) for each in entries if each.p50_ms is not None), key=lambda row: row[0])
    chart = Table.grid(padding=(0, 1))
    for p50_ms, each in timed:
        bar = Bar(timed[-1][0], 0.0, p50_ms, width=_CHART_COLUMNS)
        chart.add_row(f"{each.runtime}, {each.engine}", bar, f"{p50_ms:.2f} ms")
    console.print("\np50, the fastest first", chart, sep="\n")


def _cells(entry: Entry, base_ms: float | None) -> Iterator[str]:
    yield entry.runtime
    yield f"{entry.engine}: {entry.without}" if entry.without else entry.engine
    yield _shown(entry.p50_ms, 2)
    yield _shown(entry.p99_ms, 2)
    yield f"{entry.p50_ms / base_ms:.2f}x" if entry.p50_ms is not None and base_ms else ""
    yield _shown(entry.fidelity, 3)
    yield _shown(entry.score, 4)
    yield _shown(entry.memory_bytes and entry.memory_bytes / 2**20, 0)
    yield _shown(entry.engine_bytes and entry.engine_bytes / 2**20, 2)
    yield _shown(entry.made_s, 1)


def _shown(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
