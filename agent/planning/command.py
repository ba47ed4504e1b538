"""`tared plan`: searches, certifies, and writes plan.json; or explains one that is written."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

from agent.camera.source import Source, parse_source
from agent.common.console import progress, say
from agent.common.errors import AgentError, DatasetError
from agent.common.state_files import Journal
from agent.models.model import Model, check_calibration, open_model, read_plan, read_rules
from agent.planning.costs import PlanBuilder
from agent.planning.frames import RandomFrames
from agent.planning.result import planned, summary
from agent.planning.search import PlanOptions, PlanSearch
from agent.vision.evaluation import evaluate, labelled_images
from agent.vision.spec import load_model_spec
from calibrate.errors import CalibrationError
from calibrate.plan import PrecisionPlan
from engines.calibration import Calibration, load_calibration
from engines.interface import Backend, Progress
from engines.quantise.fusion import fusion_groups, int8_macs_share
from engines.quantise.placement import place
from engines.store.artefact import fingerprint
from engines.store.files import replace_files

_SCHEMA = 2  # of the evidence
_SPENT = "spent"  # in the journal


def run_plan(
    spec_path: Path,
    calibration_path: Path | None,
    frames: str,
    output: Path,
    backend: Backend,
    embedded: Backend,
    options: PlanOptions,
    dataset: Path | None = None,
) -> tuple[PrecisionPlan, dict[str, Any]]:
    """Search for the fastest plan that keeps the loss, and write it; the plan, and what --json prints of it.

    What was measured is kept beside the output until the search ends; interrupted, it goes on there. Whatever can be
    refused is refused before the search begins. calibration_path: not looked at for a model that brings all scales.
    dataset: scored after the search, if its budget has time left.
    Raises TaredError, AgentError `plan.nothing` for a model that is INT8 already.
    """
    _check_output(output)
    source = parse_source(frames)
    model = _open(spec_path)
    if dataset is not None:
        labelled_images(model.spec, dataset)
    calibration = _calibration(model, calibration_path)
    rules = read_rules(model.spec.precision, model.master, model.placement)
    builder = PlanBuilder(model, calibration, backend)
    planner = PlanSearch(builder, rules, RandomFrames(source, options.seed), embedded, options, _stage)
    held_out = calibration.source != Path(source.shown).name
    if not planner.is_decided:
        say(planner.split.told)
        if not held_out:
            say(
                "warning: the calibration is from a source of the same name; what is certified holds for its frames, "
                "not for new scenes"
            )
    with _journal(output, builder, source, options) as journal:
        with _spent(journal, builder) as seconds:
            found = planner.run(journal)
            labels = _labels(planner, dataset) if dataset is not None else None
            plan = planned(planner)
            facts = {**_identity(builder, plan), "source": source.shown, "held_out": held_out, "labels": labels}
            plan = replace(plan, evidence={**plan.evidence, **facts, "seconds": round(seconds(), 3)})
            _write(output, plan)
        if not found.interrupted:
            journal.finish()
    return plan, {**summary(plan), "seconds": plan.evidence["seconds"], "output": str(output)}


def _identity(builder: PlanBuilder, plan: PrecisionPlan) -> dict[str, Any]:
    """What the plan is of, and its certificate."""
    model = builder.model
    return {
        "schema": _SCHEMA,
        "model": model.sha256,
        "model_name": model.spec.path.name,
        "spec": model.spec_id,
        "calibration": builder.calibration.id,
        "backend": dict(builder.backend.describe()),
        "float_precision": builder.backend.precisions[-1],
        "plan": fingerprint(plan.essence),
        "int8_macs_share": int8_macs_share(model.master, place(model.master, plan)),
    }


@contextmanager
def _spent(journal: Journal, builder: PlanBuilder) -> Iterator[Callable[[], float]]:
    """Counts builds and seconds on from those of an interrupted search; gives the seconds so far."""
    before = cast("dict[str, Any]", journal.get(_SPENT) or {"builds": 0, "seconds": 0.0})
    builder.builds = before["builds"]
    started = time.monotonic() - before["seconds"]
    try:
        yield lambda: time.monotonic() - started
    finally:
        if journal.size:
            journal.put(_SPENT, {"builds": builder.builds, "seconds": time.monotonic() - started})


def _open(spec_path: Path) -> Model:
    model = open_model(load_model_spec(spec_path))
    if model.placement.own and all(group.fixed for group in fusion_groups(model.master, model.placement).groups):
        raise AgentError(
            "plan.nothing",
            f"{model.spec.path.name}, which brings its own INT8, and no other layer that may be",
            "a model with layers to decide about",
            "build it as it is, with --precision int8 and no calibration",
        )
    return model


def _calibration(model: Model, path: Path | None) -> Calibration:
    if model.needs_no_calibration:
        return Calibration(model.sha256, "the model's own", 0, "", {}, {})
    if path is None:
        raise CalibrationError(
            "calibration.missing", "no calibration", "one, for int8", "make it with 'tared calibrate'"
        )
    calibration = load_calibration(path)
    check_calibration(model, calibration)
    return calibration


@contextmanager
def _journal(output: Path, builder: PlanBuilder, source: Source, options: PlanOptions) -> Iterator[Journal]:
    """Beside the output; of the same search, whatever its budget. One in which nothing is does not stay."""
    identity = {
        "tared": version("tared"),
        "model": builder.model.sha256,
        "spec": builder.model.spec_id,
        "calibration": [builder.calibration.id, builder.calibration.frames],
        "backend": builder.runtime,
        "source": [source.shown, _stamp(source)],
        "options": [options.max_loss, options.max_confusion, options.costs, options.seed],
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    journal = Journal(output.with_name(output.name + ".journal"), fingerprint(identity))
    if journal.size:
        say(f"going on with the search that was interrupted: {_measurements(journal)} measurements are known")
    try:
        yield journal
    except KeyboardInterrupt:
        say(f"{_measurements(journal)} measurements are kept: the same command goes on from there")
        raise
    finally:
        if not journal.size:
            journal.finish()


def _measurements(journal: Journal) -> int:
    return journal.size - (journal.get(_SPENT) is not None)


def _stamp(source: Source) -> Any:
    """What changes when a source's frames do. A camera's always do: nothing is taken over from another day."""
    if source.live:
        return time.time_ns()
    path = Path(source.location)
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    return [[str(file), (status := file.stat()).st_size, status.st_mtime_ns] for file in files]


@contextmanager
def _stage(name: str) -> Iterator[Progress]:
    with progress(name, 100) as bar:
        yield lambda fraction, doing: bar.update(round(100 * fraction), doing)


def _labels(planner: PlanSearch, dataset: Path) -> dict[str, Any] | None:
    """The task's own scores on labelled images, of the float engine and of the plan; None if the time is up."""
    if planner.out_of_time():
        say(f"{dataset.name} was not looked at: the time is up")
        return None
    builder, found = planner.builder, planner.found
    try:
        of_float = of_plan = _score(builder, None, dataset)
        if found.accepted is not None:
            floats = planner.plan_of(found.candidates[found.accepted].partition.int8, "")
            of_plan = _score(builder, floats, dataset)
    except DatasetError as error:  # a label that cannot be used must not cost the search
        say(f"warning: {error}")
        return None
    return {"dataset": dataset.name, "float": of_float, "plan": of_plan}


def _score(builder: PlanBuilder, floats: Mapping[str, str] | None, dataset: Path) -> dict[str, float]:
    engine = builder.load_float() if floats is None else builder.load(floats)
    with closing(engine), _stage(f"{'float' if floats is None else 'the plan'} on labels"):
        return dict(evaluate(engine, builder.model.spec, dataset).scores)


def _check_output(output: Path) -> None:
    """Say before the work that its result could not be written."""
    folder = next(folder for folder in output.absolute().parents if folder.exists())
    if output.is_dir():
        raise _unwritable(output, "a folder")
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise _unwritable(output, f"{folder} takes no files")


def _write(output: Path, plan: PrecisionPlan) -> None:
    try:
        replace_files({output: (plan.to_json() + "\n").encode()})
    except OSError as error:
        raise _unwritable(output, error.strerror) from error


def _unwritable(output: Path, found: str | None) -> AgentError:
    return AgentError("plan.write", f"{output}: {found}", "a writable place with room", "choose another -o")


def read_evidence(path: Path) -> Mapping[str, Any]:
    """The evidence in a plan.json.

    Raises CalibrationError as `read_plan`, AgentError (`plan.evidence`) without any, or with another version's.
    """
    evidence = read_plan(path).evidence
    if evidence.get("schema") != _SCHEMA:
        found = f"{path}, a plan written by hand" if not evidence else f"{path}, planned by another version of tared"
        raise AgentError("plan.evidence", found, "one that this 'tared plan' wrote", "make it anew")
    return evidence
