"""`tared plan`: searches, certifies, and writes plan.json; or explains one that is written."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from agent.camera import Source, parse_source
from agent.console import progress, say
from agent.errors import AgentError
from agent.metrics import evaluate
from agent.model import Model, check_calibration, open_model, read_plan
from agent.model_spec import load_model_spec
from agent.planning.found import PlanOptions
from agent.planning.held_out import RandomFrames
from agent.planning.journal import Journal
from agent.planning.result import planned, summary
from agent.planning.search import Planner
from agent.precision import read_rules
from calibrate.plan import PrecisionPlan
from engines.backend import Backend, Progress
from engines.calibration import Calibration, load_calibration
from engines.files import replace_files
from engines.macs import int8_macs_share
from engines.placement import place
from engines.store import fingerprint


def run_plan(
    spec_path: Path,
    calibration_path: Path,
    frames: str,
    output: Path,
    backend: Backend,
    embedded: Backend,
    options: PlanOptions,
    dataset: Path | None = None,
) -> tuple[PrecisionPlan, dict[str, Any]]:
    """Search for the fastest plan that keeps the loss, and write it; the plan, and what --json prints of it.

    What was measured is kept beside the output until the search ends; interrupted, it goes on there.
    """
    started = time.monotonic()
    source = parse_source(frames)
    calibration = load_calibration(calibration_path)
    spec = load_model_spec(spec_path)
    model = open_model(spec)
    check_calibration(model, calibration)
    rules = read_rules(spec.precision, model.master, model.placement)
    journal = _journal(output, model, calibration, backend, source, options)
    planner = Planner(
        model, rules, calibration, RandomFrames(source, options.seed), backend, embedded, options, journal, _stage
    )
    planner.run()
    plan = planned(planner)
    evidence = {
        **plan.evidence,
        "model": model.sha256,
        "model_name": spec.path.name,
        "calibration": calibration.id,
        "backend": dict(backend.describe()),
        "source": source.shown,
        "labels": _on_labels(planner, plan, dataset) if dataset is not None else None,
        "seconds": round(time.monotonic() - started, 3),
    }
    plan = replace(plan, evidence=evidence)
    _write(output, plan)
    if not planner.found.interrupted:
        journal.finish()
    share = int8_macs_share(model.master, place(model.master, plan))
    return plan, {**summary(plan, share), "seconds": evidence["seconds"], "output": str(output)}


def _journal(
    output: Path, model: Model, calibration: Calibration, backend: Backend, source: Source, options: PlanOptions
) -> Journal:
    """Beside the output; of the same search, whatever its budget."""
    status = os.stat(source.location) if not source.live and Path(source.location).exists() else None
    identity = {
        "model": model.sha256,
        "spec": model.spec.model_dump(mode="json", exclude={"path"}),
        "calibration": hashlib.sha256(json.dumps(dict(calibration.amax), sort_keys=True).encode()).hexdigest(),
        "backend": {**backend.describe(), **backend.flags()},
        "source": [source.shown, status and status.st_size, status and status.st_mtime_ns],
        "options": [options.max_loss, options.max_confusion, options.costs, options.seed],
    }
    journal = Journal(output.with_name(output.name + ".journal"), fingerprint(identity))
    if journal.size:
        say(f"going on with the search that was interrupted: {journal.size} measurements are known")
    return journal


@contextmanager
def _stage(name: str) -> Iterator[Progress]:
    with progress(name, 100) as bar:
        yield lambda fraction, doing: bar.update(round(100 * fraction), doing)


def _on_labels(planner: Planner, plan: PrecisionPlan, dataset: Path) -> dict[str, Any]:
    """The task's own score, of float and of the plan, on labelled images."""
    scores = {}
    for name, floats in (("float", None), ("plan", plan.floats)):
        if floats is None or planner.found.accepted is None:
            engine = planner.builder.load_float()
        else:
            engine = planner.builder.load(floats)
        with closing(engine), _stage(f"{name} on labels"):
            scores[name] = dict(evaluate(engine, planner.model.spec, dataset).scores)
    return {"dataset": dataset.name, **scores}


def _write(output: Path, plan: PrecisionPlan) -> None:
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        replace_files({output: (plan.to_json() + "\n").encode()})
    except OSError as error:
        raise AgentError(
            "plan.write", f"{output}: {error.strerror}", "a writable place with room", "choose another -o"
        ) from error


def read_evidence(path: Path) -> Mapping[str, Any]:
    """The evidence in a plan.json. Raises CalibrationError as `read_plan`, AgentError (`plan.evidence`) without any."""
    evidence = read_plan(path).evidence
    if not evidence:
        raise AgentError("plan.evidence", f"{path}, a plan written by hand", "one that 'tared plan' wrote", "make one")
    return evidence
