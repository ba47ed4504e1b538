"""The jobs that need no daemon: calibrate, build, infer, evaluate. The daemon runs the same code underneath.

Each returns the object that its command prints with --json.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import resource
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from agent.camera.reader import Image, read_images, source_length
from agent.camera.source import Source, parse_source
from agent.cli.arguments import command, number, print_result
from agent.collection.collection import CalibrationSet
from agent.common.console import Task, progress, say
from agent.common.errors import AgentError
from agent.common.latency import LatencyHistogram
from agent.common.schema import validate
from agent.models.build import build_artefact
from agent.models.model import calibrate, open_model, read_plan, slower_here
from agent.vision.decode import described
from agent.vision.evaluation import evaluate
from agent.vision.spec import ModelSpec, load_model_spec
from agent.vision.task import VisionTask
from calibrate.plan import ALL_INT8
from calibrate.threshold import parse_method
from engines.calibration import check_destination, load_calibration, save_calibration
from engines.interface import Backend, Engine, Progress
from engines.store.artefact import check_runtime, read_artefact


def run_calibrate(
    spec_path: Path, frames: str, count: int, method: str, output: Path, backend: Backend
) -> dict[str, Any]:
    """Observe up to `count` frames, spread evenly over a file, and write calibration.json and .npz.

    Constant memory: one frame and one set of histograms, however many frames there are.
    """
    parse_method(method)
    check_destination(output)
    started = time.monotonic()
    source = parse_source(frames)
    model = open_model(load_model_spec(spec_path))
    collection = CalibrationSet(held_out_size=0)
    with progress("preparing", 100) as bar:
        observer = backend.observer(model.reference, model.placement.taps, _percent(bar))
    with closing(observer), progress("calibrating", min(count, source_length(source) or count)) as bar:
        task = VisionTask(model.spec, observer.inputs, observer.outputs)
        for image in _spread(source, count):
            tensor, _ = task.preprocess(image)
            collection.add(tensor, observer.observe(tensor).histograms)
            bar.update(collection.frames)
    calibration = calibrate(model, collection.histograms, method, collection.frames, Path(source.shown).name)
    save_calibration(calibration, output)
    return {
        "tensors": len(calibration.amax),
        "frames": calibration.frames,
        "seconds": round(time.monotonic() - started, 3),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "output": str(output),
    }


def run_build(
    spec_path: Path,
    calibration_path: Path | None,
    output: Path | None,
    backend: Backend,
    *,
    precision: str | None = None,
    plan_path: Path | None = None,
    key: bytes | None = None,
) -> dict[str, Any]:
    """Build an engine into the artefact directory `output`; a plan names the nodes that stay float.

    Without a precision it is int8 where there is a calibration, or a plan, and else the runtime's fastest float.
    """
    started = time.monotonic()
    plan = read_plan(plan_path) if plan_path else ALL_INT8
    calibration = load_calibration(calibration_path) if calibration_path else None
    model = open_model(load_model_spec(spec_path), plan)
    precision = precision or ("int8" if calibration or plan_path else backend.precisions[-1])
    if precision == "int8" and (warning := slower_here(plan, backend.describe())):
        say(f"warning: {warning}")
    destination = output or Path(f"{spec_path.stem}-{precision}")
    with progress("building", 100) as bar:
        artefact = build_artefact(
            model,
            backend,
            lambda _: destination,
            _percent(bar),
            calibration=calibration,
            precision=precision,
            key=key,
        )
    return {
        "artefact": str(artefact.path),
        "id": artefact.id,
        "precision": precision,
        "int8_macs_share": round(artefact.manifest["int8_macs_share"], 4),
        "engine_bytes": artefact.manifest["engine_bytes"],
        "seconds": round(time.monotonic() - started, 3),
    }


def run_infer(
    artefact_path: Path, frames: str, output: Path | None, backend: Backend, key: bytes | None = None
) -> dict[str, Any]:
    """Run an artefact over a source; predictions go to `output` as JSON lines, boxes in frame pixels.

    A frame's latency is from when it was read until it is decoded; where frames overlap that of the next is in it.
    """
    source = parse_source(frames)
    latency = LatencyHistogram()
    read: deque[tuple[float, int]] = deque()

    def images() -> Iterator[Image]:
        for ts, image in read_images(source):
            read.append((ts, time.perf_counter_ns()))
            yield image

    count = 0
    with open_engine(artefact_path, backend, key) as (engine, spec), _results(output) as write:
        task = VisionTask(spec, engine.inputs, engine.outputs)
        started = time.monotonic()
        with progress("inferring", source_length(source)) as bar:
            for prediction, geometry in task.infer_each(engine, images()):
                ts, began_ns = read.popleft()
                latency.add(time.perf_counter_ns() - began_ns)
                if write is not None:
                    write({"frame": count, "ts": ts, **described(prediction, geometry, spec)})
                count += 1
                bar.update(count)
    return {
        "frames": count,
        "fps": round(count / max(time.monotonic() - started, 1e-9), 2),
        "latency_ms": {
            "p50": round(latency.percentile_ms(50.0), 3),
            "p99": round(latency.percentile_ms(99.0), 3),
        },
    }


def run_evaluate(target: Path, dataset: Path, backend: Backend, key: bytes | None = None) -> dict[str, Any]:
    """Score an artefact, or the float reference of a MODEL.yaml, on labelled images."""
    with open_engine(target, backend, key) as (engine, spec):
        evaluation = evaluate(engine, spec, dataset)
    scores = {name: round(score, 4) for name, score in evaluation.scores.items()}
    return {"task": evaluation.task, "images": evaluation.images, **scores}


@contextmanager
def open_engine(target: Path, backend: Backend, key: bytes | None = None) -> Iterator[tuple[Engine, ModelSpec]]:
    """The engine of an artefact directory, or the float reference of a MODEL.yaml, with its spec."""
    if target.is_dir():
        artefact = read_artefact(target, key)
        check_runtime(artefact, backend.describe())
        spec = validate(ModelSpec, {**artefact.manifest["inputs"]["spec"], "path": artefact.engine_path}, str(target))
        with closing(backend.load(artefact.read_engine())) as engine:
            yield engine, spec
        return
    model = open_model(load_model_spec(target))
    with progress("preparing", 100) as bar:
        built = backend.build(model.reference, _percent(bar))
    with closing(backend.load(built.engine)) as engine:
        yield engine, model.spec


def _percent(bar: Task) -> Progress:
    """A backend's progress as a bar of a hundred."""
    return lambda fraction, doing: bar.update(round(100 * fraction), doing)


def _spread(source: Source, count: int) -> Iterator[Image]:
    """At most `count` images: evenly spaced where the source knows its length, else the first ones."""
    length = source_length(source) or count
    taken = 0
    for index, (_, image) in enumerate(read_images(source)):
        if index * count >= taken * length:
            yield image
            taken += 1
        if taken == count:
            return


@contextmanager
def _results(path: Path | None) -> Iterator[Callable[[dict[str, Any]], object] | None]:
    """What writes one JSON line, None without a path. The file has its name only when the block has ended well.

    Raises AgentError (`results.write`) when the disk refuses.
    """
    if path is None:
        yield None
        return
    partial = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("w", encoding="utf-8") as file:
            yield lambda record: file.write(json.dumps(record) + "\n")
        os.replace(partial, path)
    except OSError as error:
        raise AgentError(
            "results.write", f"{path}: {error.strerror}", "a writable place with room", "choose another -o"
        ) from error
    finally:
        with suppress(OSError):
            partial.unlink()


if TYPE_CHECKING:  # the commands import what they need when they run: `tared send` should not wait for OpenCV
    from engines.interface import Backend

_WIDE = 180  # columns of a table that is piped on
MAX_LOSS = "the loss, 1 - mean fidelity, that you accept (0.02)"
MAX_CONFUSION = "the share of a class that may be taken for one other (0.1)"
SOURCES = "a video file, a folder or zip of images, v4l2:/dev/video0, csi:0, rtsp://..., http://..."


def add_offline(commands: Any) -> None:
    """The jobs that need no daemon."""
    calibrate = command(commands, "calibrate", _calibrate, "observe frames and choose the INT8 scales")
    calibrate.add_argument("model", type=Path, metavar="MODEL.yaml")
    calibrate.add_argument("--frames", required=True, metavar="SRC", help=SOURCES)
    calibrate.add_argument("--count", type=number(int, 1), default=512, metavar="N", help="frames to observe (512)")
    calibrate.add_argument("--method", default="entropy", help="entropy (default), mse, percentile:P, ...: README")
    calibrate.add_argument("-o", "--output", type=Path, required=True, metavar="calibration.json")

    plan = command(commands, "plan", _plan, "find the fastest precision plan that provably keeps a loss")
    plan.add_argument(
        "model", type=Path, metavar="MODEL.yaml", help="or, with --explain, --show or --chart, a plan.json"
    )
    plan.add_argument("--calibration", type=Path, metavar="FILE")
    plan.add_argument("--frames", metavar="SRC", help=f"held out from the calibration: {SOURCES}")
    plan.add_argument("--max-loss", type=number(float, 1e-4, 0.999), default=0.02, metavar="L", help=MAX_LOSS)
    plan.add_argument("--max-confusion", type=number(float, 1e-3, 0.999), default=0.1, metavar="C", help=MAX_CONFUSION)
    plan.add_argument("--budget-s", type=number(float, 0.0), metavar="S", help="the best certified plan by then")
    plan.add_argument("--costs", choices=("measured", "macs"), default="measured", help="macs: do not time, count")
    plan.add_argument("--dataset", type=Path, metavar="DIR_OR_ZIP", help="also report top-1 or mAP on these labels")
    plan.add_argument("--seed", type=number(int, 0), default=0, metavar="N", help="of the random order of frames (0)")
    plan.add_argument("--all", action="store_true", help="list every layer group")
    plan.add_argument("--explain", metavar="GROUP", help="of a plan.json: all about one group, by name or glob")
    plan.add_argument("--show", action="store_true", help="of a plan.json: its table again")
    plan.add_argument("--chart", type=Path, metavar="FILE.png", help="draw loss against latency (tared[plot])")
    plan.add_argument("-o", "--output", type=Path, metavar="plan.json")

    build = command(commands, "build", _build, "build an engine into an artefact")
    build.add_argument("model", type=Path, metavar="MODEL.yaml")
    build.add_argument("--calibration", type=Path, metavar="FILE", help="needed for int8")
    precision = build.add_mutually_exclusive_group()
    precision.add_argument(
        "--precision", choices=("int8", "fp16", "fp32"), help="int8 with a calibration, else the fastest float"
    )
    precision.add_argument(
        "--plan", type=Path, metavar="plan.json", help="which layers stay float; the others are int8"
    )
    build.add_argument("--best", action="store_true", help="tensorrt: search longest for the fastest kernels")
    build.add_argument("--dla", type=number(int, 0), metavar="CORE", help="tensorrt: this accelerator, else the GPU")
    build.add_argument("--offline", action="store_true", help="tensorrt: without a GPU, to prove it can be built")
    build.add_argument("--target", metavar="SM", help="with --offline: the GPU to build for, such as sm86")
    build.add_argument("-o", "--output", type=Path, metavar="ARTEFACT/", help="MODEL-PRECISION/ by default")

    inspect = command(commands, "inspect", _inspect, "what is in an artefact; what an ONNX file looks like, as a spec")
    inspect.add_argument("target", type=Path, metavar="ARTEFACT_OR_MODEL.onnx")
    inspect.add_argument("--layers", action="store_true", help="the layers that the builder made")
    inspect.add_argument("--time", action="store_true", help="with --layers: run it, and time every layer")
    inspect.add_argument("-o", "--output", type=Path, metavar="model.yaml", help="of a MODEL.onnx; MODEL.yaml if new")
    inspect.add_argument("--overwrite", action="store_true", help="also a model.yaml that is there already")

    infer = command(commands, "infer", _infer, "run an artefact over frames")
    infer.add_argument("artefact", type=Path, metavar="ARTEFACT/")
    infer.add_argument("--frames", required=True, metavar="SRC", help=SOURCES)
    infer.add_argument("-o", "--output", type=Path, metavar="results.jsonl")

    evaluate = command(commands, "evaluate", _evaluate, "top-1 or mAP on labelled images")
    evaluate.add_argument("target", type=Path, metavar="ARTEFACT_OR_MODEL.yaml")
    evaluate.add_argument("--dataset", type=Path, required=True, metavar="DIR_OR_ZIP")

    for offline in (calibrate, plan, build, infer, evaluate, inspect):
        offline.add_argument("--backend", default="onnxruntime", help="onnxruntime (default) or tensorrt")
        offline.add_argument("--key", type=Path, metavar="FILE", help="signs artefacts, and refuses those it has not")
        offline.add_argument("--threads", type=number(int, 1), default=os.cpu_count() or 1, metavar="N")


def _calibrate(options: argparse.Namespace) -> int:
    pass

    method, output = options.method, options.output
    return print_result(
        options, run_calibrate(options.model, options.frames, options.count, method, output, _open(options))
    )


def _plan(options: argparse.Namespace) -> int:
    from agent.planning.chart import draw_chart
    from agent.planning.report import named, print_explanation, print_plan

    console = Console(width=None if sys.stdout.isatty() else _WIDE)
    if options.explain is not None or options.show or options.model.suffix == ".json":
        from agent.planning.command import read_evidence

        evidence = read_evidence(options.model)
        if options.explain is not None and options.json:
            print(json.dumps({"groups": [evidence["groups"][index] for index in named(evidence, options.explain)]}))
        elif options.explain is not None:
            print_explanation(evidence, options.explain, console)
        elif not options.json:
            print_plan(evidence, console, options.all)
        else:
            print(json.dumps(dict(evidence)))
    else:
        evidence, result = _search(options)
        if options.json:
            print(json.dumps(result))
        else:
            print_plan(evidence, console, options.all)
    if options.chart is not None:
        draw_chart(evidence, options.chart)
    return 0


def _search(options: argparse.Namespace) -> tuple[Mapping[str, Any], dict[str, Any]]:
    from agent.planning.command import run_plan
    from agent.planning.search import PlanOptions
    from engines.interface import BackendOptions
    from engines.registry import open_backend

    missing = [name for name in ("frames", "output") if getattr(options, name) is None]
    if missing:
        found = f"'tared plan' without --{missing[0]}"
        raise AgentError("cli.arguments", found, "--calibration, --frames and --output", "see 'tared plan --help'")
    wanted = PlanOptions(options.max_loss, options.max_confusion, options.budget_s, options.costs, options.seed)
    backend, embedded = _open(options), open_backend("onnxruntime", BackendOptions(options.threads))
    plan, result = run_plan(
        options.model, options.calibration, options.frames, options.output, backend, embedded, wanted, options.dataset
    )
    return plan.evidence, result


def _build(options: argparse.Namespace) -> int:
    pass

    if options.offline != (options.target is not None):
        given, other = ("--offline", "--target") if options.offline else ("--target", "--offline")
        raise AgentError("cli.arguments", f"{given} without {other}", "both or neither", f"add {other}, or leave both")
    backend = _open(options, target=options.target, dla=options.dla, best=options.best)
    result = run_build(
        options.model,
        options.calibration,
        options.output,
        backend,
        precision=options.precision,
        plan_path=options.plan,
        key=_key(options),
    )
    return print_result(options, result)


def _inspect(options: argparse.Namespace) -> int:
    is_model = options.target.is_file() or options.target.suffix == ".onnx"
    strange = ("layers", "time") if is_model else ("output", "overwrite")
    given = next((name for name in strange if getattr(options, name)), None)
    if given is not None:
        found = f"--{given} for {'a model' if is_model else 'an artefact'}"
        raise AgentError("cli.arguments", found, "arguments as documented", "see 'tared inspect --help'")
    if is_model:
        return _inspect_model(options)
    from agent.inspection.inspect import inspect_artefact, print_inspection

    backend = _open(options) if options.time else None
    inspection = inspect_artefact(options.target, options.layers or options.time, backend, _key(options))
    if options.json:
        print(json.dumps(inspection.as_dict()))
    else:
        print_inspection(inspection, Console(width=None if sys.stdout.isatty() else _WIDE))
    return 0


def _inspect_model(options: argparse.Namespace) -> int:
    from agent.inspection.inspect import inspect_model, print_model_inspection, write_spec

    inspection = inspect_model(options.target)
    output = options.output or Path(f"{options.target.stem}.yaml")
    is_written = options.output is not None or options.overwrite or not output.exists()
    if is_written:
        write_spec(inspection, output, options.overwrite)
    if options.json:
        print(json.dumps({**inspection.as_dict(), "output": str(output) if is_written else None}))
    else:
        print_model_inspection(inspection, Console(width=None if sys.stdout.isatty() else _WIDE))
        print(f"{output} {'is written: correct it' if is_written else 'is there already, and left as it is'}")
    return 0


def _infer(options: argparse.Namespace) -> int:
    pass

    result = run_infer(options.artefact, options.frames, options.output, _open(options), _key(options))
    return print_result(options, result)


def _evaluate(options: argparse.Namespace) -> int:
    pass

    return print_result(options, run_evaluate(options.target, options.dataset, _open(options), _key(options)))


def _open(options: argparse.Namespace, **more: Any) -> Backend:
    """The backend of an offline command; what makes its next build faster is kept in the user's cache."""
    from engines.interface import BackendOptions
    from engines.registry import open_backend

    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return open_backend(options.backend, BackendOptions(options.threads, caches / "tared", _key(options), **more))


def _key(options: argparse.Namespace) -> bytes | None:
    from engines.store.signing import find_key

    return find_key(options.key)
