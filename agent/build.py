"""From a model spec to a reference graph, and from a calibration to an artefact.

Shared by the command line, the daemon and its recalibration child, so that all three build the same thing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import onnx

from agent.model_spec import ModelSpec
from calibrate.errors import CalibrationError
from calibrate.histogram import AbsHistogram
from calibrate.plan import ALL_INT8, PrecisionPlan
from engines.backend import Array, Backend, Engine, EngineError, Progress
from engines.calibration import Calibration, calibrate_histograms, save_calibration
from engines.graph import canonical_hash, image_input, load_model
from engines.macs import int8_macs_share
from engines.passes import prepare
from engines.placement import Placement, place
from engines.qdq import insert_qdq
from engines.store import Artefact, find_artefact, write_artefact

Judge = Callable[[Engine], Mapping[str, Any]]


@dataclass(frozen=True)
class Model:
    """A model ready for calibration: its spec, its FP32 master graph with canonical hash, and where Q/DQ may go.

    input_shape: (1, channels, height, width) of the frames, also where the graph leaves dimensions open.
    """

    spec: ModelSpec
    master: onnx.ModelProto
    sha256: str
    placement: Placement
    input_shape: tuple[int, ...]


def open_model(spec: ModelSpec, backend: Backend) -> Model:
    """Load and prepare the ONNX file of a spec; the backend runs the passes' equivalence check.

    Raises EngineError as `load_model` and `prepare` do, ConfigError when the spec does not fit the input.
    """

    def run(graph: onnx.ModelProto, batch: Array) -> dict[str, Array]:
        with closing(backend.observer(graph, ())) as reference:
            return reference.observe(batch).outputs

    original = load_model(spec.path)
    input_shape = spec.input_shape(image_input(original))
    master = prepare(original, run, input_shape)
    return Model(spec, master, canonical_hash(master), place(master), input_shape)


def calibrate(
    model: Model, histograms: Mapping[str, AbsHistogram], method: str, frames: int, source: str
) -> Calibration:
    """A calibration of this model, from histograms by tap. Raises CalibrationError as `calibrate_histograms`."""
    return calibrate_histograms(
        histograms,
        model.placement.shared,
        model_sha256=model.sha256,
        method=method,
        frames=frames,
        source=source,
        preprocessing=_preprocessing(model),
    )


def check_calibration(model: Model, calibration: Calibration) -> None:
    """Raises CalibrationError: `calibration.model` for another model's, `calibration.input` for another input spec."""
    if calibration.model_sha256 != model.sha256 or not set(calibration.amax) >= set(model.placement.taps):
        raise CalibrationError(
            "calibration.model",
            f"a calibration of model {calibration.model_sha256[:12]}",
            f"one of {model.spec.path.name}, {model.sha256[:12]}",
            "calibrate this model with 'tared calibrate'",
        )
    today = _preprocessing(model)
    changed = [key for key in today if today[key] != calibration.preprocessing.get(key)]
    if changed:
        raise CalibrationError(
            "calibration.input",
            f"a calibration with input.{changed[0]} {calibration.preprocessing.get(changed[0])}",
            f"{today[changed[0]]}, as the model spec has it now",
            "calibrate again: other inputs need other scales",
        )


def _preprocessing(model: Model) -> dict[str, Any]:
    return model.spec.input.model_dump(mode="json")


def check_precision(backend: Backend, precision: str) -> None:
    """Raises EngineError (`backend.precision`) when the runtime has no such float type."""
    if precision != "int8" and precision not in backend.precisions:
        raise EngineError(
            "backend.precision",
            f"precision {precision} on {backend.name}",
            "int8 or " + " or ".join(backend.precisions),
            "choose another --precision, or build on a board whose runtime has it",
        )


def build_artefact(
    model: Model,
    backend: Backend,
    destination: Callable[[Mapping[str, Any]], Path],
    progress: Progress,
    *,
    calibration: Calibration | None,
    plan: PrecisionPlan = ALL_INT8,
    precision: str = "int8",
    judge: Judge | None = None,
) -> Artefact:
    """Build an engine and write it with everything it was made of.

    destination: from the fingerprinted inputs to the artefact's directory. judge: looks at the loaded engine
    before the artefact is written; what it returns goes into the manifest, what it raises prevents the artefact.
    An artefact of the same inputs that is already there is judged too, and returned.
    Raises CalibrationError, EngineError.
    """
    check_precision(backend, precision)
    graph, inputs = model.master, _inputs(model, backend, precision)
    facts: dict[str, Any] = {"engine": backend.engine_file, "model_name": model.spec.path.name, "int8_macs_share": 0.0}
    if precision == "int8":
        if calibration is None:
            raise CalibrationError(
                "calibration.missing", "no calibration", "one, for int8", "make it with 'tared calibrate'"
            )
        check_calibration(model, calibration)
        placement = place(model.master, plan)
        graph = insert_qdq(model.master, placement, calibration.amax)
        inputs |= {"calibration": {"id": calibration.id, "method": calibration.method}, "plan": dict(plan.floats)}
        facts["int8_macs_share"] = int8_macs_share(model.master, placement)

    def fill(directory: Path) -> Mapping[str, Any]:
        engine_path = directory / backend.engine_file
        backend.build(graph, engine_path, progress, model.input_shape)
        if precision == "int8" and calibration is not None:
            save_calibration(calibration, directory / "calibration.json")
            (directory / "plan.json").write_text(plan.to_json() + "\n", encoding="utf-8")
        return {**facts, "engine_bytes": engine_path.stat().st_size, **_judged(judge, backend, engine_path)}

    path = destination(inputs)
    existing = find_artefact(path, inputs)
    if existing is None:
        return write_artefact(path, inputs, fill)
    _judged(judge, backend, existing.engine_path)
    return existing


def _inputs(model: Model, backend: Backend, precision: str) -> dict[str, Any]:
    """What an engine follows from, but for calibration and plan."""
    return {
        "model": model.sha256,
        "precision": precision,
        "backend": dict(backend.describe()),
        "tared": version("tared"),
        "spec": model.spec.model_dump(mode="json", exclude={"path"}),
    }


def _judged(judge: Judge | None, backend: Backend, engine_path: Path) -> Mapping[str, Any]:
    if judge is None:
        return {}
    with closing(backend.load(engine_path)) as engine:
        return judge(engine)
