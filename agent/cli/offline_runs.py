"""Run the work of the commands that need no daemon: calibrate, build, infer and evaluate.

Each `run_*` function returns the object that its command prints with --json. The daemon runs the same code underneath.
This module loads OpenCV and NumPy; therefore agent/cli/offline.py imports it only when a command runs.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import resource
import shlex
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from agent.camera.reader import Image, read_images, read_spread, source_fps, source_length
from agent.camera.source import Source, parse_source
from agent.collection.collection import CalibrationSet, Reservoir
from agent.common.console import progress, say, stage
from agent.common.errors import AgentError
from agent.common.latency import LatencyHistogram
from agent.common.schema import validate
from agent.models.build import build_artefact
from agent.models.export.foreign_scales import (
    ForeignRanges,
    differences,
    foreign_calibration,
    matched_ranges,
    read_ranges,
)
from agent.models.model import Model, calibrate, check_calibration, check_ranges, open_model, read_plan, slower_here
from agent.planning.quick_check import CHECKED_FRAMES, DIFFERS, QuickCheck, quick_check
from agent.results.drawn_frames import open_drawn_frames
from agent.vision.evaluation import evaluate
from agent.vision.registry import accepted_loss
from agent.vision.spec import ModelSpec, load_model_spec
from agent.vision.task import VisionTask
from calibrate.errors import TaredError
from calibrate.plan import ALL_INT8
from calibrate.threshold import parse_method
from engines.calibration import Calibration, check_destination, load_calibration, save_calibration
from engines.errors import EngineError
from engines.interface import Array, Backend, Engine, Progress
from engines.registry import open_simulator
from engines.store.artefact import Artefact, check_runtime, fingerprint, read_artefact

log = logging.getLogger(__package__)

_OWN_FRAMES = "the calibration's own frames"


def run_calibrate(
    spec_path: Path,
    frames: str | None,
    count: int,
    method: str,
    output: Path,
    backend: Backend,
    plan_path: Path | None = None,
    cache: Path | None = None,
) -> dict[str, Any]:
    """Observe frames, choose the INT8 scales, and write calibration.json and .npz; then check INT8 on a few frames.

    Memory is constant: a few frames and one set of histograms, however many frames there are. For `run_build` the file
    keeps the result of the check and the path of the source, and no frame.

    Args:
        spec_path: The MODEL.yaml.
        frames: A source, as `parse_source` understands it; None with a cache: its scales count, and nothing is checked.
        count: Frames to observe at most; spread evenly where the source knows its length, else the first ones.
        method: As `parse_method` understands it.
        backend: The runtime of the reference and of the check.
        plan_path: The tensors of this plan are observed: the inputs that it divides get histograms of their own. None:
            those of a graph whose layers are all INT8.
        cache: A file of another tool, whose scales are taken; the result then says how they differ from the frames'.
            None: the scales follow from the frames.

    Returns:
        The paths and figures that --json prints, in JSON's types.

    Raises CalibrationError as `check_destination` and `calibrate_histograms` do, EngineError as the runtime does.
    """
    parse_method(method)
    check_destination(output)
    started = time.monotonic()
    source = parse_source(frames) if frames is not None else None
    ranges = read_ranges(cache) if cache is not None else None
    model = open_model(load_model_spec(spec_path), read_plan(plan_path) if plan_path else ALL_INT8)
    observed, kept = _observe(model, source, count, method, backend) if source is not None else (None, [])
    calibration = observed
    if ranges is not None and cache is not None:
        calibration = foreign_calibration(model, ranges, cache.name, observed)
    if calibration is None:
        raise AgentError(
            "cli.arguments",
            "'tared calibrate' without --frames and --from-cache",
            "one of them, or both",
            "see 'tared calibrate --help'",
        )
    save_calibration(calibration, output)
    check = None
    if source is not None:
        command = _plan_command(spec_path, output, source.shown, backend)
        check = _check_calibration(model, calibration, kept, source, output, backend, command)
    return {
        "tensors": len(calibration.amax),
        "frames": calibration.frames,
        "seconds": round(time.monotonic() - started, 3),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "output": str(output),
        **({"check": check.as_dict()} if check is not None else {}),
        **({"cache": _comparison(model, ranges, calibration, observed)} if ranges is not None else {}),
    }


def _observe(
    model: Model, source: Source, count: int, method: str, backend: Backend
) -> tuple[Calibration, list[Array]]:
    """Return the calibration by the frames' histograms, and a few of their network inputs (1, C, H, W)."""
    collection, kept = CalibrationSet(held_out_size=0), Reservoir[Array](CHECKED_FRAMES)
    with stage("preparing") as show:
        observer = model.open_observer(backend, show)
    with closing(observer), progress("calibrating", min(count, source_length(source) or count)) as bar:
        task = VisionTask(model.spec, observer.inputs, observer.outputs)
        for image in read_spread(source, count):
            tensor, _ = task.preprocess(image)
            collection.add(tensor, observer.observe(tensor))
            kept.offer(tensor.copy)
            bar.update(collection.frames)
    name, histograms = Path(source.shown).name, collection.histograms
    calibration = calibrate(model, histograms, method, collection.frames, name, backend, collection.extremes)
    return calibration, kept.kept


def _check_calibration(
    model: Model,
    calibration: Calibration,
    inputs: list[Array],
    source: Source,
    output: Path,
    backend: Backend,
    command: str,
) -> QuickCheck | None:
    """Check a calibration on network inputs; keep in its file the result, and where the source is, for `run_build`.

    command: as for `_checked`.
    """

    def check_and_keep(show: Progress) -> QuickCheck:
        check = quick_check(model, calibration, inputs, open_simulator(backend, threads=1), show)
        where = {} if source.live else {"frames": os.path.relpath(source.location, output.parent)}
        kept = {**_conditions(model), **where, "result": check.as_dict()}
        save_calibration(replace(calibration, check=kept), output)
        return check

    return _checked(check_and_keep, model, _OWN_FRAMES, command)


def _comparison(
    model: Model, ranges: ForeignRanges, calibration: Calibration, observed: Calibration | None
) -> dict[str, Any]:
    """Return what was taken from another tool's file, and tensor by tensor how its scales differ from the frames'."""
    taken = matched_ranges(model, ranges)
    compared = differences(calibration, observed) if observed is not None else []
    return {
        "kind": ranges.kind,
        "tensors": len(taken),
        "from_frames": [name for name in calibration.amax if name not in taken],
        "differences": [row for row in compared if row["tensor"] in taken],
    }


def run_build(
    spec_path: Path,
    calibration_path: Path | None,
    output: Path | None,
    backend: Backend,
    *,
    precision: str | None = None,
    plan_path: Path | None = None,
    frames: str | None = None,
    key: bytes | None = None,
) -> dict[str, Any]:
    """Build an engine into an artefact directory; then run it on a few frames, where it is INT8 of a calibration.

    An engine that does not answer as its graph says leaves no artefact that was not there before.

    Args:
        spec_path: The MODEL.yaml.
        calibration_path: The calibration.json; None: the engine is float.
        output: The directory; None: `SPEC-PRECISION` in the working directory.
        precision: None: int8 with a calibration or a plan, else the runtime's fastest float.
        plan_path: A plan names the nodes that stay float; None: all are INT8.
        frames: A source, as `parse_source` understands it, to check the engine on; None: the calibration's, if it is
            where it was, else by the check that `run_calibrate` has kept, if that was of the same plan and spec.
        key: Signs the artefact; None: it has no signature.

    Returns:
        The path and figures that --json prints, in JSON's types.

    Raises CalibrationError as `load_calibration` does, EngineError as `find_artefact` and the runtime do, and
    `engine.differs` as `quick_check` does.
    """
    started = time.monotonic()
    source = parse_source(frames) if frames is not None else None
    plan = read_plan(plan_path) if plan_path else ALL_INT8
    calibration = load_calibration(calibration_path) if calibration_path else None
    model = open_model(load_model_spec(spec_path), plan)
    precision = precision or ("int8" if calibration or plan_path else backend.precisions[-1])
    if precision == "int8" and calibration is not None:
        check_calibration(model, calibration)
        check_ranges(model, calibration)
    if source is not None and (precision != "int8" or calibration is None):
        found = f"--frames with precision {precision}" if precision != "int8" else "--frames without --calibration"
        raise AgentError("cli.arguments", found, "INT8 of a calibration, to check on them", "leave --frames out")
    if precision == "int8" and (warning := slower_here(plan, backend.describe())):
        say(f"warning: {warning}")
    destination = output or Path(f"{spec_path.stem}-{precision}")
    is_new = not destination.exists()
    with stage("building") as show:
        artefact = build_artefact(
            model,
            backend,
            lambda _: destination,
            show,
            calibration=calibration,
            precision=precision,
            key=key,
        )
    check = None
    if precision == "int8" and calibration_path is not None and calibration is not None:
        place = source.shown if source is not None else _OWN_FRAMES
        source = source or _own_frames(calibration, calibration_path)
        command = _plan_command(spec_path, calibration_path, source.shown if source is not None else "SRC", backend)
        try:
            check = _check_build(artefact, model, calibration, source, backend, place, command)
        except EngineError:
            if is_new:
                shutil.rmtree(artefact.path)
            raise
    return {
        "artefact": str(artefact.path),
        "id": artefact.id,
        "precision": precision,
        "int8_macs_share": round(artefact.manifest["int8_macs_share"], 4),
        "engine_bytes": artefact.manifest["engine_bytes"],
        "seconds": round(time.monotonic() - started, 3),
        **({"check": check.as_dict()} if check is not None else {}),
    }


def _check_build(
    artefact: Artefact,
    model: Model,
    calibration: Calibration,
    source: Source | None,
    backend: Backend,
    place: str,
    command: str,
) -> QuickCheck | None:
    """Check the engine of an artefact on a source; without one, tell what the calibration has kept of its own check.

    An engine that was built for another machine is simulated. place, command: as for `_checked`.

    Raises EngineError: `engine.differs` as `quick_check`.
    """

    def check(show: Progress) -> QuickCheck:
        floats = {**model.plan.floats, **artefact.manifest["without_int8"]}
        built = model.with_plan(replace(model.plan, floats=floats))
        if source is None:
            return _kept_check(built, calibration)
        simulator = open_simulator(backend, threads=1)
        runs_here = not artefact.manifest.get("verification_only")
        runtime = backend if runs_here else simulator
        content = artefact.read_engine() if runs_here else model.master.SerializeToString()
        with closing(runtime.load(content)) as engine:
            inputs = _network_inputs(model, engine, source)
            return quick_check(built, calibration, inputs, simulator, show, engine if runs_here else None)

    return _checked(check, model, place, command)


def _checked(make: Callable[[Progress], QuickCheck], model: Model, frames: str, command: str) -> QuickCheck | None:
    """Make a check and print its result; if that cannot be made, print why and return None.

    Args:
        frames: What is checked on, for people.
        command: What helps where fidelity is low.

    Raises EngineError: `engine.differs` as `quick_check`.
    """
    try:
        with stage("checking") as show:
            check = make(show)
    except Exception as error:  # the work is done and written: a check must not make a failure of it
        if isinstance(error, EngineError) and error.code == DIFFERS:
            raise
        reason = str(error)
        if not isinstance(error, TaredError):
            reason = f"{type(error).__name__}: {error}"
            log.warning("check=failed", exc_info=error)
        say(f"check: not made: {reason}")
        return None
    remedy = (
        f"; low: '{command}' finds a plan that loses less" if check.is_low(accepted_loss(model.spec.task, None)) else ""
    )
    say(f"check: on {frames}: {check.text}{remedy}")
    return check


def _kept_check(model: Model, calibration: Calibration) -> QuickCheck:
    """Return the check that a calibration has kept.

    Raises AgentError: `check.other`  it was made under another plan or spec, or there is none
    """
    if any(calibration.check.get(name) != value for name, value in _conditions(model).items()):
        found = "a check of another plan or model spec" if calibration.check else "a calibration without a check"
        raise AgentError("check.other", found, "a check of this plan and this spec", "add --frames SRC")
    return QuickCheck(**calibration.check["result"])


def _conditions(model: Model) -> dict[str, str]:
    """Return what a check of a calibration follows from, in JSON's types."""
    return {"plan": fingerprint(model.plan.essence), "spec": model.spec_id}


def _own_frames(calibration: Calibration, path: Path) -> Source | None:
    """Return the frames that made a calibration, `path`; None if they came from a camera, or are no longer there."""
    kept = calibration.check.get("frames")
    place = os.path.join(path.parent, kept) if isinstance(kept, str) else ""
    return parse_source(place) if os.path.isfile(place) or os.path.isdir(place) else None


def _network_inputs(model: Model, engine: Engine, source: Source) -> list[Array]:
    """Return an engine's inputs (1, C, H, W) of a few frames of a source, evenly spaced."""
    task = VisionTask(model.spec, engine.inputs, engine.outputs)
    return [task.preprocess(image)[0].copy() for image in read_spread(source, CHECKED_FRAMES)]


def _plan_command(spec_path: Path, calibration_path: Path, frames: str, backend: Backend) -> str:
    plan_path = calibration_path.with_name("plan.json")
    words = ["tared", "plan", spec_path, "--calibration", calibration_path, "--frames", frames, "-o", plan_path]
    return shlex.join([*map(str, words), "--backend", backend.name])


def run_infer(
    target: Path,
    frames: str,
    output: Path | None,
    backend: Backend,
    key: bytes | None = None,
    save: Path | None = None,
) -> dict[str, Any]:
    """Run an engine over a source, and write or draw its predictions.

    A frame's latency runs from when it was read until it is decoded. Where the engine overlaps frames, it includes the
    wait for the next frame.

    Args:
        target: The artefact directory, or a MODEL.yaml, whose float reference is run.
        frames: A source, as `parse_source` understands it.
        output: Predictions as JSON lines, boxes in frame pixels; None: not written.
        key: Only an artefact that it has signed is run; None: any.
        save: Frames with the predictions drawn into them, see `open_drawn_frames`; None: not drawn.

    Raises EngineError as `read_artefact` and the runtime do, AgentError (`results.write`) when the disk refuses.
    """
    source = parse_source(frames)
    latency = LatencyHistogram()
    read: deque[tuple[float, int, Image]] = deque()

    def images() -> Iterator[Image]:
        for ts, image in read_images(source):
            read.append((ts, time.perf_counter_ns(), image))
            yield image

    count = 0
    with (
        open_engine(target, backend, key) as (engine, spec),
        _results(output) if output is not None else nullcontext() as write,
        open_drawn_frames(save, source_fps(source), spec) if save is not None else nullcontext() as draw,
    ):
        task = VisionTask(spec, engine.inputs, engine.outputs)
        started = time.monotonic()
        with progress("inferring", source_length(source)) as bar:
            for prediction, geometry in task.infer_each(engine, images()):
                ts, read_ns, image = read.popleft()
                latency.add(time.perf_counter_ns() - read_ns)
                if write is not None:
                    write({"frame": count, "ts": ts, **prediction.in_frame(geometry).as_dict(spec)})
                if draw is not None:
                    draw(prediction.drawn_into(image, geometry, spec))
                count += 1
                bar.update(count)
    return {
        "frames": count,
        "fps": round(count / max(time.monotonic() - started, 1e-9), 2),
        "latency_ms": {f"p{share}": round(latency.percentile_ms(share), 3) for share in (50, 99)},
    }


def run_evaluate(
    target: Path, dataset: Path, backend: Backend, key: bytes | None = None, only: Sequence[str] = ()
) -> dict[str, Any]:
    """Score an artefact, or the float reference of a MODEL.yaml, on labelled images.

    Args:
        dataset: The labelled images, as `evaluate` reads them.
        key: Only an artefact that it has signed is run; None: any.
        only: Names of the classes that count; empty: all.

    Raises DatasetError as `evaluate` does, EngineError as `open_engine` does.
    """
    with open_engine(target, backend, key) as (engine, spec):
        evaluation = evaluate(engine, spec, dataset, only)
    scores = {name: round(score, 4) for name, score in evaluation.scores.items()}
    result = {"task": evaluation.task, "images": evaluation.images, **scores}
    if not evaluation.by_class:
        return result
    by_class = [
        {"class": each.class_id, "label": spec.label(each.class_id), evaluation.class_unit: each.count}
        | {evaluation.class_score: round(each.value, 4)}
        for each in evaluation.by_class
    ]
    by_size = {size: None if value is None else round(value, 4) for size, value in evaluation.by_size.items()}
    sizes = {"by_size": by_size} if by_size else {}
    worst = min(evaluation.by_class, key=lambda each: each.value)
    named = {"worst_class": spec.label(worst.class_id)} if evaluation.names_worst else {}
    return {**result, **named, **sizes, "by_class": by_class}


@contextmanager
def open_engine(target: Path, backend: Backend, key: bytes | None = None) -> Iterator[tuple[Engine, ModelSpec]]:
    """Open the engine of an artefact directory, or the float reference of a MODEL.yaml; yield it with its spec.

    Args:
        key: Only an artefact that it has signed is opened; None: any.

    Raises EngineError as `read_artefact`, `check_runtime` and the runtime do.
    """
    if target.is_dir():
        artefact = read_artefact(target, key)
        check_runtime(artefact, backend.describe())
        spec = validate(ModelSpec, {**artefact.manifest["inputs"]["spec"], "path": artefact.engine_path}, str(target))
        with closing(backend.load(artefact.read_engine())) as engine:
            yield engine, spec
        return
    model = open_model(load_model_spec(target))
    with stage("preparing") as show:
        built = backend.build(model.reference, show)
    with closing(backend.load(built.engine)) as engine:
        yield engine, model.spec


@contextmanager
def _results(path: Path) -> Iterator[Callable[[dict[str, Any]], object]]:
    """Yield a function that writes one JSON line.

    The file gets its name only when the block has ended without an error.
    Raises AgentError: `results.write`  the disk refuses.
    """
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
