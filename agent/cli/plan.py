"""Carry out `tared plan`: search, certify, and write plan.json; or read one that is written."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

from agent.camera.source import Source, parse_source
from agent.common.console import say, stage
from agent.common.errors import AgentError, DatasetError
from agent.common.state_files import Journal
from agent.models.model import check_calibration, open_model, read_plan
from agent.planning.costs import PlanBuilder
from agent.planning.evidence import READABLE
from agent.planning.frames import RandomFrames
from agent.planning.search import PlanOptions, PlanSearch
from agent.vision.evaluation import evaluate
from agent.vision.spec import load_model_spec
from agent.vision.tasks.opening import open_task
from calibrate.plan import PrecisionPlan
from engines.calibration import Calibration, load_calibration
from engines.interface import Backend
from engines.quantise.fusion import fusion_groups
from engines.store.artefact import fingerprint
from engines.store.files import replace_files, why_unwritable

_SPENT = "spent"  # in the journal


def run_plan(
    spec_path: Path,
    calibration_path: Path | None,
    frames: Sequence[str],
    output: Path,
    backend: Backend,
    embedded: Backend,
    options: PlanOptions,
    dataset: Path | None = None,
    only: Sequence[str] = (),
) -> tuple[PrecisionPlan, dict[str, Any]]:
    """Search for the fastest plan that keeps the loss, and write it; return the plan, and what --json prints of it.

    All measurements are kept in a journal next to the output until the search ends; an interrupted search resumes.
    Invalid inputs are refused before the search starts.

    Args:
        calibration_path: Ignored for a model that brings all scales.
        frames: SRC arguments: recordings, each of which has to keep the loss, or one live camera.
        backend: The runtime that will serve.
        embedded: ONNX Runtime, for what-ifs and the reference.
        dataset: Labelled images, scored after the search if its budget has time left.
        only: Their classes that count, by name; empty: all.

    Raises TaredError; AgentError `plan.nothing` for a model that is INT8 already, and `plan.sources` for sources that
    cannot be planned on together.
    """
    if reason := why_unwritable(output):
        raise _unwritable(output, reason)
    sources = _parse_sources(frames)
    model = open_model(load_model_spec(spec_path))
    if model.placement.own and all(group.fixed for group in fusion_groups(model.master, model.placement).groups):
        raise AgentError(
            "plan.nothing",
            f"{model.spec.path.name}, which brings its own INT8 and has no other layer that may be INT8",
            "a model with layers to decide about",
            "build it as it is, with --precision int8 and no calibration",
        )
    if dataset is not None:
        open_task(model.spec).labelled_images(dataset, only)
    given = load_calibration(calibration_path) if calibration_path and not model.needs_no_calibration else None
    check_calibration(model, given)
    if given is not None and not given.extremes and model.divisible:
        say(
            "warning: the calibration has no extremes of channels, so no input is divided; 'tared calibrate' of this "
            "version keeps them"
        )
    calibration = given or Calibration(model.sha256, "the model's own", 0, "", {}, {})
    builder = PlanBuilder(model, calibration, backend)
    random_frames = [RandomFrames(source, options.seed) for source in sources]
    search = PlanSearch(builder, random_frames, embedded, options, stage)
    held_out = {source.shown: calibration.source != Path(source.shown).name for source in sources}
    if not search.is_decided:
        say(search.description)
        if not all(held_out.values()):
            say(
                "warning: the calibration is from a source of the same name; the certificate holds for its frames, "
                "not for new scenes"
            )
    with _journal(output, builder, sources, options) as journal:
        with _time_spent(journal, builder) as seconds:
            search.run(journal)
            labels = _score_labels(search, dataset, only) if dataset is not None else None
            plan = search.plan()
            facts = {
                "source": ", ".join(held_out),
                "sources": [{"source": source, "held_out": apart} for source, apart in held_out.items()],
                "held_out": all(held_out.values()),
                "labels": labels,
            }
            plan = replace(plan, evidence={**plan.evidence, **facts, "seconds": round(seconds(), 3)})
            _write(output, plan)
        if not search.interrupted:
            journal.finish()
    return plan, _summary(plan, output)


def _summary(plan: PrecisionPlan, output: Path) -> dict[str, Any]:
    """Return what --json prints of a plan."""
    evidence = plan.evidence
    accepted = evidence["candidates"][evidence["chosen"]] if evidence["chosen"] is not None else None
    trial = accepted["trial"] if accepted else None
    in_float = 0.0 if evidence["float_precision"] == "fp32" else None
    kept = ("latency_ms", "latency_float_ms", "faster", "builds", "costs", "retraining", "seconds")
    return {
        "int8_macs_share": round(evidence["int8_macs_share"], 4),
        "predicted_loss": accepted["predicted_loss"] if accepted else in_float,
        "measured_loss": trial["loss"] if trial else in_float,
        "measured_loss_upper": trial["upper"] if trial else in_float,
        "certified": accepted is not None and not evidence["live"],
        **{name: evidence[name] for name in kept},
        "output": str(output),
    }


def _parse_sources(frames: Sequence[str]) -> list[Source]:
    sources = [parse_source(each) for each in frames]
    shown = [source.shown for source in sources]
    if len(sources) > 1 and any(source.live for source in sources):
        raise AgentError(
            "plan.sources",
            f"{len(sources)} sources with a live camera among them: {', '.join(shown)}",
            "recordings, or one live camera alone: a stretch of time is not a sample of a scene",
            "record the camera, and give the recording",
        )
    twice = next((each for each in shown if shown.count(each) > 1), None)
    if twice is not None:
        raise AgentError("plan.sources", f"--frames {twice} twice", "each source once", "leave one of them out")
    return sources


@contextmanager
def _time_spent(journal: Journal, builder: PlanBuilder) -> Iterator[Callable[[], float]]:
    """Count builds and seconds on from those of an interrupted search; yield a function of the seconds so far."""
    earlier = cast("dict[str, Any]", journal.get(_SPENT) or {"builds": 0, "seconds": 0.0})
    builder.builds = earlier["builds"]
    started = time.monotonic() - earlier["seconds"]
    try:
        yield lambda: time.monotonic() - started
    finally:
        if journal.values:
            journal.put(_SPENT, {"builds": builder.builds, "seconds": time.monotonic() - started})


@contextmanager
def _journal(output: Path, builder: PlanBuilder, sources: Sequence[Source], options: PlanOptions) -> Iterator[Journal]:
    """Open the journal next to the output, of the same search whatever its budget. An empty one is removed again."""
    identity = {
        "format": 2,
        "tared": version("tared"),
        "model": builder.model.sha256,
        "spec": builder.model.spec_id,
        "calibration": [builder.calibration.id, builder.calibration.frames],
        "backend": builder.runtime,
        "sources": [[source.shown, _stamp(source)] for source in sources],
        "options": [options.max_loss, options.max_confusion, options.costs, options.seed],
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    journal = Journal(output.with_name(output.name + ".journal"), fingerprint(identity))
    if journal.values:
        say(f"continuing the interrupted search: {_measurements(journal)} measurements are known")
    try:
        yield journal
    except KeyboardInterrupt:
        say(f"{_measurements(journal)} measurements are kept: the same command continues from there")
        raise
    finally:
        if not journal.values:
            journal.finish()


def _measurements(journal: Journal) -> int:
    return len(journal.values) - (journal.get(_SPENT) is not None)


def _stamp(source: Source) -> Any:
    """Return what changes with a source's frames. A camera's always do: nothing is reused from another day."""
    if source.live:
        return time.time_ns()
    path = Path(source.location)
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    return [[str(file), (status := file.stat()).st_size, status.st_mtime_ns] for file in files]


def _score_labels(search: PlanSearch, dataset: Path, only: Sequence[str]) -> dict[str, Any] | None:
    """Return the task's own scores on labelled images, of the float engine and the plan; None if the time is up."""
    if search.out_of_time():
        say(f"{dataset.name} was not looked at: the time is up")
        return None
    builder = search.builder
    try:
        float_scores = plan_scores = _score(builder, None, dataset, only)
        if search.accepted is not None:
            plan_scores = _score(builder, search.accepted.plan.floats, dataset, only)
    except DatasetError as error:  # a label that cannot be used must not cost the search
        say(f"warning: {error}")
        return None
    return {"dataset": dataset.name, "float": float_scores, "plan": plan_scores}


def _score(
    builder: PlanBuilder, floats: Mapping[str, str] | None, dataset: Path, only: Sequence[str]
) -> dict[str, float]:
    engine = builder.load_float() if floats is None else builder.load(floats)
    with closing(engine), stage(f"{'float' if floats is None else 'the plan'} on labels"):
        return dict(evaluate(engine, builder.model.spec, dataset, only).scores)


def _write(output: Path, plan: PrecisionPlan) -> None:
    try:
        replace_files({output: (plan.to_json() + "\n").encode()})
    except OSError as error:
        raise _unwritable(output, error.strerror) from error


def _unwritable(output: Path, found: str | None) -> AgentError:
    return AgentError("plan.write", f"{output}: {found}", "a writable place with room", "choose another -o")


def read_evidence(path: Path) -> PrecisionPlan:
    """Read a plan.json that has evidence.

    Raises CalibrationError as `read_plan`, AgentError (`plan.evidence`) without any, or with another version's.
    """
    plan = read_plan(path)
    if plan.evidence.get("schema") not in READABLE:
        written = "planned by another version of tared" if plan.evidence else "a plan written by hand"
        expected = "a plan that this version of tared made"
        raise AgentError("plan.evidence", f"{path}, {written}", expected, "make the plan again")
    return plan
