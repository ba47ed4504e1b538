"""`tared plan`: searches, certifies, and writes plan.json; or explains one that is written."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from agent.camera import Source, parse_source
from agent.console import progress, say
from agent.errors import AgentError
from agent.metrics import evaluate
from agent.model import Model, check_calibration, open_model, read_plan
from agent.model_spec import load_model_spec
from agent.planning.costs import Builder
from agent.planning.found import PlanOptions
from agent.planning.held_out import RandomFrames
from agent.planning.journal import Journal
from agent.planning.result import planned, summary
from agent.planning.search import Planner
from agent.precision import read_rules
from calibrate.errors import CalibrationError
from calibrate.plan import PrecisionPlan
from engines.backend import Backend, Progress
from engines.calibration import Calibration, load_calibration
from engines.files import replace_files
from engines.fusion import fusion_groups
from engines.macs import int8_macs_share
from engines.placement import place
from engines.store import fingerprint

_SCHEMA = 1  # of the evidence


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
    Raises TaredError, AgentError `plan.nothing` for a model that is INT8 already.
    """
    started = time.monotonic()
    _check_output(output)
    source = parse_source(frames)
    model = _open(spec_path)
    calibration = _calibration(model, calibration_path)
    rules = read_rules(model.spec.precision, model.master, model.placement)
    builder = Builder(model, calibration, backend)
    planner = Planner(builder, rules, RandomFrames(source, options.seed), embedded, options, _stage)
    if not planner.is_decided:
        say(planner.split.told)
        if calibration.source == Path(source.location).name:
            say(
                "warning: the calibration is from the same source; what is certified holds for that, not for new scenes"
            )
    with _journal(output, builder, source, options) as journal:
        of_float = _score(builder, None, dataset) if dataset is not None else None
        found = planner.run(journal)
        plan = planned(planner)
        of_plan = of_float
        if dataset is not None and found.accepted is not None:
            of_plan = _score(builder, plan.floats, dataset)
        facts = {
            "schema": _SCHEMA,
            "model": model.sha256,
            "model_name": model.spec.path.name,
            "calibration": calibration.id,
            "backend": dict(backend.describe()),
            "source": source.shown,
            "held_out": calibration.source != Path(source.location).name,
            "float_precision": backend.precisions[-1],
            "labels": {"dataset": dataset.name, "float": of_float, "plan": of_plan} if dataset is not None else None,
            "seconds": round(time.monotonic() - started, 3),
        }
        plan = replace(plan, evidence={**plan.evidence, **facts})
        _write(output, plan)
        if not found.interrupted:
            journal.finish()
    share = int8_macs_share(model.master, place(model.master, plan))
    return plan, {**summary(plan, share), "seconds": facts["seconds"], "output": str(output)}


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
def _journal(output: Path, builder: Builder, source: Source, options: PlanOptions) -> Iterator[Journal]:
    """Beside the output; of the same search, whatever its budget. One in which nothing is does not stay."""
    identity = {
        "tared": version("tared"),
        "model": builder.model.sha256,
        "spec": builder.model.spec.model_dump(mode="json", exclude={"path"}),
        "calibration": [builder.calibration.id, builder.calibration.frames],
        "backend": builder.runtime,
        "source": [source.shown, _stamp(source)],
        "options": [options.max_loss, options.max_confusion, options.costs, options.seed],
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    journal = Journal(output.with_name(output.name + ".journal"), fingerprint(identity))
    if journal.size:
        say(f"going on with the search that was interrupted: {journal.size} measurements are known")
    try:
        yield journal
    except KeyboardInterrupt:
        say(f"{journal.size} measurements are kept: the same command goes on from there")
        raise
    finally:
        if not journal.size:
            journal.finish()


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


def _score(builder: Builder, floats: Mapping[str, str] | None, dataset: Path) -> dict[str, float]:
    """The task's own score on labelled images, of the float engine or of a plan."""
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
