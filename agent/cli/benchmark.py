"""Compare the engines that a model can have on this machine: every runtime in float, in plain INT8, and under a plan.

`run_benchmark` is `tared benchmark`. Every second frame calibrates and plans, and the others measure. All engines
answer the same frames in turn, so that a machine that slows down meanwhile slows all of them.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rich.bar import Bar
from rich.console import Console
from rich.table import Table

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
from agent.vision.answer import Answer
from agent.vision.evaluation import evaluate
from agent.vision.fidelity import fidelity
from agent.vision.registry import accepted_loss
from agent.vision.spec import ModelSpec, load_model_spec
from agent.vision.task import VisionTask
from calibrate.errors import TaredError
from calibrate.plan import ALL_INT8, PrecisionPlan, Repairs
from engines.calibration import Calibration
from engines.interface import Array, Backend, BackendOptions, Engine, Progress
from engines.quantise.costs import HasTime, macs_costs
from engines.quantise.fusion import Grouping, int8_macs_share
from engines.registry import BACKENDS, open_backend, open_simulator

FLOAT, PLAIN, PLANNED = "fp32", "int8", "plan"
AS_WRITTEN = "{} of {}, as written"
_FEWEST = 16  # frames: half of them measure
_TIMED = 200  # inferences of each engine at least: the 99th percentile has two above it
_PLANNING_FRAMES = 16
_PLANNING_S = 120.0
_CHART_COLUMNS = 36
_COLUMNS = (
    *("runtime", "engine", "p50\nms", "p99\nms", "to\nfp32", "fidelity", "metric"),
    *("memory\nMiB", "engine\nMiB", "made\nin s"),
)


@dataclass(frozen=True)
class Entry:
    """A row: one engine on one runtime. The figures are None for one that could not be made; `reason` says why.

    precision: FLOAT, PLAIN or PLANNED; fp16 where that is the runtime's fastest float; or the name of another tool.
    latency_ms: p50 and p99 of inference, without preprocessing. fidelity: to float on ONNX Runtime, mean over the
    frames on which either sees anything; None without one. metric: top-1 or mAP on the data set. int8_macs_share: of
    the multiply-accumulates; None for an engine of another tool. peak_rss_bytes: of a process that only loads the
    engine and answers once; memory_bytes: what that adds to it, the runtime's libraries included. seconds: to build it.
    """

    backend: str
    precision: str
    reason: str = ""
    latency_ms: Mapping[str, float] | None = None
    fidelity: float | None = None
    metric: float | None = None
    int8_macs_share: float | None = None
    memory_bytes: int | None = None
    peak_rss_bytes: int | None = None
    engine_bytes: int | None = None
    seconds: float | None = None

    @property
    def p50_ms(self) -> float | None:
        """The median latency; None where there is none."""
        return self.latency_ms["p50"] if self.latency_ms is not None else None


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
    max_loss: float | None,
    dataset: Path | None = None,
    others: Mapping[tuple[str, str], bytes] | None = None,
    as_written: bool = False,
    only: Sequence[str] = (),
) -> dict[str, Any]:
    """Build all engines, measure them, and return the object that --json prints.

    Args:
        frames: A source, as `parse_source` understands it. count: Frames of it at most, evenly spread.
        max_loss: What the plan may lose, as recalibration.max_loss; None: that of the model's task.
        dataset: Labelled images, as for `tared evaluate`.
        others: Engines that another tool made, by runtime and name.
        as_written: OpenVINO's INT8 graphs are run on ONNX Runtime, too, which computes them as they are written.
        only: The classes of the data set that count, by name; empty: all.

    Raises AgentError (`benchmark.frames`) for too few frames, and TaredError as the source and the model do.
    """
    model = open_model(load_model_spec(spec_path))
    images = list(read_spread(parse_source(frames), count))
    if len(images) < _FEWEST:
        found = f"{len(images)} frames in {frames}"
        raise AgentError("benchmark.frames", found, f"at least {_FEWEST}", "give a longer recording, or more images")
    calibrating, measured = images[::2], images[1::2]
    options = BackendOptions(threads)
    embedded = open_backend("onnxruntime", options)
    calibration, inputs = _calibrate(model, calibrating, embedded, frames)
    scene = Scene(calibration, inputs, [inputs[1::4]])
    accepted = accepted_loss(model.spec.task, max_loss)
    entries, made = list[Entry](), list[_Made]()
    for name in BACKENDS:
        try:
            backend = open_backend(name, options)
        except TaredError as error:
            entries.append(Entry(name, FLOAT, error.found))
            continue
        with stage(f"planning for {name}") as show:
            plan = plan_by_work(model, scene, open_simulator(backend, threads), accepted, show)
        built, missing = _build_all(model, backend, calibration, plan)
        made += built
        entries += missing
        if as_written and name == "openvino":
            graphs = [each for each in built if each.entry.precision != FLOAT]
            names = [AS_WRITTEN.format(each.entry.precision, name) for each in graphs]
            made += [
                _Made(Entry("onnxruntime", precision, engine_bytes=len(each.content)), embedded, each.content)
                for precision, each in zip(names, graphs, strict=True)
            ]
    for (name, tool), content in (others or {}).items():
        made.append(_Made(Entry(name, tool, engine_bytes=len(content)), open_backend(name, options), content))

    def score(engine: Engine) -> float | None:
        return next(iter(evaluate(engine, model.spec, dataset, only).scores.values())) if dataset is not None else None

    entries += _measure(model, made, measured, embedded, score)
    rows = [asdict(entry) for entry in sorted(entries, key=lambda entry: list(BACKENDS).index(entry.backend))]
    return {"model": spec_path.name, "frames": len(measured), "threads": threads, "rows": rows}


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


def plan_by_work(model: Model, scene: Scene, embedded: Backend, max_loss: float, show: Progress) -> PrecisionPlan:
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
    in_float = backend.precisions[-1]
    with stage(f"building for {name}") as show:
        for precision, under in ((in_float, None), (PLAIN, ALL_INT8), (PLANNED, plan)):
            started, share = time.monotonic(), 0.0
            try:
                if under is None:
                    request = model.build_request(model.master, in_float, calibration.seen)
                    content = backend.build(request, show).engine
                else:
                    int8 = build_int8(model, backend, under, calibration, {}, show)
                    content, share = int8.built.engine, int8_macs_share(model.master, int8.placement)
            except TaredError as error:
                missing.append(Entry(name, precision, error.found))
                continue
            seconds, share = round(time.monotonic() - started, 3), round(share, 4)
            entry = Entry(name, precision, int8_macs_share=share, engine_bytes=len(content), seconds=seconds)
            made.append(_Made(entry, backend, content))
    return made, missing


def _measure(
    model: Model,
    made: Sequence[_Made],
    images: Sequence[Image],
    embedded: Backend,
    score: Callable[[Engine], float | None],
) -> list[Entry]:
    """Return the entries with all that is measured. score: of an engine on labelled images, None without any."""
    entries = list[Entry]()
    with ExitStack() as stack:
        engines = [stack.enter_context(closing(each.backend.load(each.content))) for each in made]
        reference = stack.enter_context(closing(embedded.load(model.master.SerializeToString())))
        times_ms, agreements = _answer(model.spec, engines, reference, images)
        with progress("scoring and weighing", len(made)) as bar:
            for number, (each, engine) in enumerate(zip(made, engines, strict=True)):
                agreement, times = agreements[number], times_ms[number]
                added_bytes, peak_bytes = _memory_bytes(each, engine.inputs[0].shape)
                metric = score(engine)
                entry = replace(
                    each.entry,
                    latency_ms={f"p{share}": round(float(np.percentile(times, share)), 3) for share in (50, 99)},
                    fidelity=round(float(np.mean(agreement)), 4) if agreement else None,
                    metric=None if metric is None else round(metric, 4),
                    memory_bytes=added_bytes,
                    peak_rss_bytes=peak_bytes,
                )
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
    truths: list[Answer] = [of_reference.infer(reference, image)[0] for image in images]
    with progress("measuring", rounds * len(images)) as bar:
        for number in range(rounds):
            for shown, (image, truth) in enumerate(zip(images, truths, strict=True), start=1):
                for index, (task, engine) in enumerate(zip(tasks, engines, strict=True)):
                    answer, _ = task.infer(engine, image)
                    times_ms[index].append(1000.0 * task.inferred_s)
                    agreement = fidelity(answer, truth)
                    if number == 0 and not agreement.is_empty:
                        agreements[index].append(agreement.value)
                bar.update(number * len(images) + shown)
    return times_ms, agreements


def _memory_bytes(made: _Made, shape: Sequence[int | None]) -> tuple[int, int]:
    """Return what one process takes more with the engine, and the most that it takes in all."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(_weigh, (made.backend.name, made.content, [size or 1 for size in shape]))


def _weigh(name: str, content: bytes, shape: list[int]) -> tuple[int, int]:
    process = psutil.Process()
    before = process.memory_info().rss
    with closing(open_backend(name).load(content)) as engine:
        engine.infer(np.zeros(shape, engine.inputs[0].dtype))
        added = process.memory_info().rss - before
    # VmHWM, and not getrusage's: that begins at what the process that started this one had.
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    peak_kib = next(line.split()[1] for line in lines if line.startswith("VmHWM"))
    return added, 1024 * int(peak_kib)


def print_benchmark(result: Mapping[str, Any], console: Console) -> None:
    """Print the table, and a chart of the latencies; in the table they are also multiples of FP32 on ONNX Runtime."""
    title = f"{result['model']}: {result['frames']} frames, {result['threads']} threads"
    entries = [Entry(**row) for row in result["rows"]]
    base = next((each.p50_ms for each in entries if (each.backend, each.precision) == ("onnxruntime", FLOAT)), None)
    rows = [tuple(_cells(each, base)) for each in entries if not each.reason]
    console.print(title, tabulate(_COLUMNS, rows, console.width, right=_COLUMNS[2:]), sep="\n", highlight=False)
    for each in entries:
        if each.reason:
            console.print(f"not {each.backend}, {each.precision}: {each.reason}", highlight=False, markup=False)
    timed = sorted(((each.p50_ms, each) for each in entries if each.p50_ms is not None), key=lambda row: row[0])
    chart = Table.grid(padding=(0, 1))
    for p50_ms, each in timed:
        bar = Bar(1.0, 0.0, p50_ms / timed[-1][0], width=_CHART_COLUMNS)  # x / x is 1.0; n * x / x may be less than n
        chart.add_row(f"{each.backend}, {each.precision}", bar, f"{p50_ms:.2f} ms")
    console.print("\np50, the fastest first", chart, sep="\n")


def _cells(entry: Entry, base_ms: float | None) -> Iterator[str]:
    latency_ms, p50_ms = entry.latency_ms or {}, entry.p50_ms
    yield entry.backend
    yield entry.precision
    yield _shown(p50_ms, 2)
    yield _shown(latency_ms.get("p99"), 2)
    yield f"{p50_ms / base_ms:.2f}x" if p50_ms is not None and base_ms else ""
    yield _shown(entry.fidelity, 3)
    yield _shown(entry.metric, 4)
    yield _shown(entry.memory_bytes and entry.memory_bytes / 2**20, 0)
    yield _shown(entry.engine_bytes and entry.engine_bytes / 2**20, 2)
    yield _shown(entry.seconds, 1)


def _shown(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
