"""Build an engine of a model, and write it as an artefact with everything that it was made of.

`build_artefact` builds one, for the command line, a job's child and the start; `adopt_artefact` takes one over that was
built elsewhere. `build_int8` builds an INT8 engine on a runtime that may lack INT8 kernels: layers without one are left
float, and the graph is built again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any

from agent.models.model import Model, check_calibration
from calibrate.plan import PrecisionPlan
from engines.calibration import Calibration, save_calibration
from engines.errors import EngineError
from engines.interface import Backend, Built, Engine, Progress
from engines.quantise.apply_plan import quantised_graph
from engines.quantise.fusion import int8_macs_share
from engines.quantise.placement import Placement
from engines.store.artefact import Artefact, find_artefact, fingerprint, write_artefact

# Share of the remaining progress that one build takes. The number of builds is unknown; mostly there is only one.
_ROUND_SHARE = 0.8


@dataclass(frozen=True)
class Int8Build:
    """An INT8 engine, what was quantised for it, the layers without an INT8 kernel, and the number of builds."""

    built: Built
    placement: Placement
    without_int8: Mapping[str, str]
    builds: int


def build_int8(
    model: Model,
    backend: Backend,
    plan: PrecisionPlan,
    calibration: Calibration | None,
    without_int8: Mapping[str, str],
    progress: Progress,
) -> Int8Build:
    """Build under a plan. Nodes for which the runtime has no INT8 kernel are left float, and the graph is built again.

    Args:
        calibration: As for `quantised_graph`.
        without_int8: Nodes that are known to lack an INT8 kernel, with the reason: left float at once. They stay float,
            although among other neighbours they might have one: to find out would take a build for each node.

    Raises EngineError as `quantised_graph` and the backend do, and:
        engine.int8  leaving nodes float does not help
    """
    lacking = dict(without_int8)
    numbers = backend.takes_unsigned, backend.weight_bits
    for number in count():
        graph = quantised_graph(model.master, replace(plan, floats={**plan.floats, **lacking}), calibration, *numbers)
        ranges = calibration.seen if calibration is not None else {}
        built = backend.build(model.build_request(graph.graph, "int8", ranges), _round(progress, number))
        own = graph.placement.own  # the model's own INT8 may run in float: it cannot be left out
        newly_lacking = {name: reason for name, reason in built.without_int8.items() if name not in own}
        if not newly_lacking and built.engine:
            progress(1.0, "built")
            return Int8Build(built, graph.placement, lacking, number + 1)
        if not newly_lacking.keys() - lacking.keys():
            break
        lacking |= newly_lacking
    raise EngineError(
        "engine.int8",
        f"no INT8 kernel for {', '.join(built.without_int8)}, though they were left float",
        "an engine in which those layers compute in float",
        "leave their neighbours float too, with precision.keep_float, or build with --precision fp16",
    )


def _round(progress: Progress, number: int) -> Progress:
    """Return the progress callback of one build of several; the total progress never falls."""
    left = (1.0 - _ROUND_SHARE) ** number
    return lambda fraction, doing: progress(1.0 - left + left * _ROUND_SHARE * fraction, doing)


PLANNED_FROM = "raised_from"  # in an artefact's inputs: where the job that found its plan began
Judge = Callable[[Engine], Mapping[str, Any]]


def build_artefact(
    model: Model,
    backend: Backend,
    destination: Callable[[Mapping[str, Any]], Path],
    progress: Progress,
    *,
    calibration: Calibration | None,
    precision: str = "int8",
    judge: Judge | None = None,
    key: bytes | None = None,
    without_int8: Mapping[str, str] | None = None,
    planned_from: str = "",
    instead_of: str = "",
) -> Artefact:
    """Build an engine under the model's plan, and write it with everything that it was made of.

    If the destination already holds an artefact of the same inputs, that one is judged and returned.

    Args:
        destination: Returns the artefact's directory for its fingerprinted inputs.
        calibration: None for a float engine, and for a model that brings INT8 of its own.
        judge: Called with the loaded engine before the artefact is written. Its result goes into the manifest; if it
            raises, there is no artefact.
        key: Signs the artefact.
        without_int8: As for `build_int8`.
        planned_from: EngineService.precision_origin if a job found the model's plan, beginning with the configured one.
        instead_of: Id of an artefact that is rebuilt. It stays in its place until the new one is complete.

    Raises CalibrationError, and EngineError; `backend.precision` when the runtime has no such float type.
    """
    if precision != "int8" and precision not in backend.precisions:
        raise EngineError(
            "backend.precision",
            f"precision {precision} on {backend.name}",
            "int8 or " + " or ".join(backend.precisions),
            "choose another --precision, or build on a board whose runtime has it",
        )
    if calibration is not None or precision == "int8":
        check_calibration(model, calibration)
    inputs: dict[str, Any] = {  # all that the engine follows from
        "model": model.sha256,
        "precision": precision,
        "backend": dict(backend.describe()),
        "flags": dict(backend.flags()),
        "tared": version("tared"),
        "spec": model.spec.model_dump(mode="json", exclude={"path"}),
    }
    if calibration is not None:
        inputs["calibration"] = {"id": calibration.id, "method": calibration.method}
    if precision == "int8":
        inputs["plan"] = model.plan.essence
        if planned_from:
            inputs[PLANNED_FROM] = planned_from

    def judged(engine: bytes) -> Mapping[str, Any]:
        if judge is None:
            return {}
        with closing(backend.load(engine)) as loaded:
            return judge(loaded)

    def fill(directory: Path) -> Mapping[str, Any]:
        built = _compile(model, backend, progress, precision, calibration, without_int8 or {})
        contents = {backend.engine_file: built.engine, **built.files}
        for name, content in contents.items():
            (directory / name).write_bytes(content)
        if calibration is not None:
            save_calibration(calibration, directory / "calibration.json")
        if precision == "int8":
            (directory / "plan.json").write_text(model.plan.to_json() + "\n", encoding="utf-8")
        return {**built.facts, "engine_bytes": len(built.engine), **judged(built.engine)}

    path = destination(inputs)
    if instead_of == fingerprint(inputs):
        return write_artefact(path, inputs, fill, key, replacing=True)
    return _found_or_written(path, inputs, fill, judged, key)


def adopt_artefact(
    artefact: Artefact,
    backend: Backend,
    destination: Callable[[Mapping[str, Any]], Path],
    *,
    judge: Judge,
    key: bytes | None = None,
    planned_from: str = "",
) -> Artefact:
    """Judge an artefact that was built elsewhere for this runtime, and write it again with its files unchanged.

    Args:
        destination, judge, key, planned_from: As for `build_artefact`.

    Raises EngineError as `Artefact.read_file`, `Backend.load` and `write_artefact`, and whatever `judge` raises.
    """
    inputs = {name: value for name, value in artefact.manifest["inputs"].items() if name != PLANNED_FROM}
    if planned_from:
        inputs[PLANNED_FROM] = planned_from

    def judged(engine: bytes) -> Mapping[str, Any]:
        with closing(backend.load(engine)) as loaded:
            return judge(loaded)

    def fill(directory: Path) -> Mapping[str, Any]:
        for name in artefact.manifest["files"]:
            (directory / name).write_bytes(artefact.read_file(name))
        return {**artefact.manifest, **judged(artefact.read_engine())}

    return _found_or_written(destination(inputs), inputs, fill, judged, key)


def _found_or_written(
    path: Path,
    inputs: Mapping[str, Any],
    fill: Callable[[Path], Mapping[str, Any]],
    judged: Callable[[bytes], Mapping[str, Any]],
    key: bytes | None,
) -> Artefact:
    """Return the artefact of these inputs at `path`, judged, or else a new one; `fill` judges that."""
    existing = find_artefact(path, inputs, key)
    if existing is None:
        return write_artefact(path, inputs, fill, key)
    judged(existing.read_engine())
    return existing


def _compile(
    model: Model,
    backend: Backend,
    progress: Progress,
    precision: str,
    calibration: Calibration | None,
    without_int8: Mapping[str, str],
) -> Built:
    """Build the engine, with the facts that go into its manifest."""
    facts: dict[str, Any] = {"engine": backend.engine_file, "model_name": model.spec.path.name}
    if precision != "int8":
        ranges = calibration.seen if calibration is not None else {}
        built = backend.build(model.build_request(model.master, precision, ranges), progress)
        share = int8_macs_share(model.master, replace(model.placement, reads={}))  # the model's own stays
        return replace(built, facts={**facts, "int8_macs_share": share, **built.facts})
    done = build_int8(model, backend, model.plan, calibration, without_int8, progress)
    facts["int8_macs_share"] = int8_macs_share(model.master, done.placement)
    facts["without_int8"] = dict(done.without_int8)
    if model.plan.evidence:
        built_under = replace(model.plan, floats={**model.plan.floats, **done.without_int8})
        facts["planning"] = _evidence(model, built_under, backend, calibration)
    return replace(done.built, facts={**facts, **done.built.facts})


def _evidence(model: Model, plan: PrecisionPlan, backend: Backend, calibration: Calibration | None) -> dict[str, Any]:
    """Return how the plan was found. Its certificate holds for one engine on one runtime under one spec only."""
    evidence = plan.evidence
    today = {
        "another calibration": ("calibration", calibration.id if calibration is not None else ""),
        "another runtime": ("built_for", dict(backend.describe())),
        "another model spec": ("spec_id", model.spec_id),
        "another plan: this plan was changed since": ("plan", fingerprint(plan.essence)),
    }
    others = [other for other, (key, value) in today.items() if evidence.get(key) != value]
    if not others:
        return dict(evidence)
    verdict = f"Not certified: the certificate of its plan is of {others[0]}."
    return {**evidence, "verdict": verdict, "candidates": [], "chosen": None, "retraining": None}
