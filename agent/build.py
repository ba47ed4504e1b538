"""From a model spec to a reference graph, and from a calibration to an artefact.

Shared by the command line, the daemon and its recalibration child, so that all three build the same thing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any

import onnx

from agent.model_spec import ModelSpec
from calibrate.errors import CalibrationError
from calibrate.histogram import AbsHistogram
from calibrate.plan import ALL_INT8, PrecisionPlan
from engines.backend import (
    Array,
    Backend,
    BuildRequest,
    Built,
    Engine,
    EngineError,
    Progress,
    ShapeRange,
    open_backend,
)
from engines.calibration import Calibration, calibrate_histograms, save_calibration
from engines.graph import canonical_hash, image_input, load_model
from engines.macs import int8_macs_share
from engines.passes import prepare
from engines.placement import Placement, place
from engines.qdq import insert_qdq
from engines.store import Artefact, find_artefact, write_artefact

Judge = Callable[[Engine], Mapping[str, Any]]

_ROUND_SHARE = 0.8  # of what is left of the progress: nobody knows how many builds follow, and mostly none does


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

    def request(
        self, graph: onnx.ModelProto, precision: str = "fp32", amax: Mapping[str, float] | None = None
    ) -> BuildRequest:
        """What a backend is asked for a graph that was made from the master, which the reference is."""
        profiles = tuple(
            {name: ShapeRange(shapes.min, shapes.opt, shapes.max) for name, shapes in profile.items()}
            for profile in self.spec.profiles
        )
        return BuildRequest(graph, precision, self.input_shape, profiles, amax or {})

    @property
    def reference(self) -> BuildRequest:
        """The float reference."""
        return self.request(self.master)


def open_model(spec: ModelSpec) -> Model:
    """Load and prepare the ONNX file of a spec; ONNX Runtime runs the passes' equivalence check, whatever serves.

    Raises EngineError as `load_model` and `prepare` do, ConfigError when the spec does not fit the input.
    """
    reference = open_backend("onnxruntime")

    def run(graph: onnx.ModelProto, batch: Array) -> dict[str, Array]:
        with closing(reference.load(graph.SerializeToString())) as engine:
            return engine.infer(batch)

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
    key: bytes | None = None,
    without_int8: Mapping[str, str] | None = None,
) -> Artefact:
    """Build an engine and write it with everything it was made of; a key signs it.

    destination: from the fingerprinted inputs to the artefact's directory. judge: looks at the loaded engine
    before the artefact is written; what it returns goes into the manifest, what it raises prevents the artefact.
    without_int8: nodes that this runtime is known to have no INT8 kernel for, with the reason: left float at once.
    An artefact of the same inputs that is already there is judged too, and returned.
    Raises CalibrationError, EngineError.
    """
    check_precision(backend, precision)
    if calibration is not None:
        check_calibration(model, calibration)
    elif precision == "int8":
        raise CalibrationError(
            "calibration.missing", "no calibration", "one, for int8", "make it with 'tared calibrate'"
        )
    inputs = _inputs(model, backend, precision, calibration, plan)

    def fill(directory: Path) -> Mapping[str, Any]:
        built = _compile(model, backend, progress, precision, calibration, plan, without_int8 or {})
        contents = {backend.engine_file: built.engine, **built.files}
        for name, content in contents.items():
            (directory / name).write_bytes(content)
        if calibration is not None:
            save_calibration(calibration, directory / "calibration.json")
        if precision == "int8":
            (directory / "plan.json").write_text(plan.to_json() + "\n", encoding="utf-8")
        return {**built.facts, "engine_bytes": len(built.engine), **_judged(judge, backend, built.engine)}

    path = destination(inputs)
    existing = find_artefact(path, inputs, key)
    if existing is None:
        return write_artefact(path, inputs, fill, key)
    _judged(judge, backend, existing.read_engine())
    return existing


def _compile(
    model: Model,
    backend: Backend,
    progress: Progress,
    precision: str,
    calibration: Calibration | None,
    plan: PrecisionPlan,
    without_int8: Mapping[str, str],
) -> Built:
    """The engine with the facts of its manifest.

    Where the runtime has no INT8 kernel for a node, the node is left float and the graph built again. A node known to
    be one stays one, although among other neighbours it might have a kernel: to find out would take a build a node.
    """
    facts: dict[str, Any] = {"engine": backend.engine_file, "model_name": model.spec.path.name}
    ranges = {name: h.amax for name, h in calibration.histograms.items()} if calibration is not None else {}
    if precision != "int8" or calibration is None:
        built = backend.build(model.request(model.master, precision, ranges), progress)
        return replace(built, facts={**facts, "int8_macs_share": 0.0, **built.facts})
    fallbacks = dict(without_int8)
    for number in count():
        placement = place(model.master, PrecisionPlan({**plan.floats, **fallbacks}))
        graph = insert_qdq(model.master, placement, calibration.amax)
        built = backend.build(model.request(graph, precision, ranges), _round(progress, number))
        if not built.without_int8:
            progress(1.0, "built")
            break
        if not set(built.without_int8) - set(fallbacks):
            raise EngineError(
                "engine.int8",
                f"no INT8 kernel for {', '.join(built.without_int8)}, though they were left float",
                "an engine after the nodes without INT8 kernels were left float",
                "leave their neighbours float too, in plan.json, or build with --precision fp16",
            )
        fallbacks |= built.without_int8
    share = int8_macs_share(model.master, placement)
    return replace(built, facts={**facts, "int8_macs_share": share, "without_int8": fallbacks, **built.facts})


def _round(progress: Progress, number: int) -> Progress:
    """The progress of one build of several, never less than that of those before."""
    left = (1.0 - _ROUND_SHARE) ** number
    return lambda fraction, doing: progress(1.0 - left + left * _ROUND_SHARE * fraction, doing)


def _inputs(
    model: Model, backend: Backend, precision: str, calibration: Calibration | None, plan: PrecisionPlan
) -> dict[str, Any]:
    """What an engine follows from."""
    inputs: dict[str, Any] = {
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
        inputs["plan"] = dict(plan.floats)
    return inputs


def _judged(judge: Judge | None, backend: Backend, engine: bytes) -> Mapping[str, Any]:
    if judge is None:
        return {}
    with closing(backend.load(engine)) as loaded:
        return judge(loaded)
