"""From a model spec to a model that can be observed, calibrated and built.

Shared by the command line, the daemon and its recalibration child, so that all three mean the same model.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx

from agent.model_spec import ModelSpec
from agent.network_input import network_input
from agent.precision import read_rules
from calibrate.errors import CalibrationError
from calibrate.histogram import AbsHistogram
from calibrate.plan import ALL_INT8, PrecisionPlan
from calibrate.scale import has_scale
from engines.artefact import fingerprint
from engines.backend import Array, BuildRequest, EngineError, ShapeRange, open_backend
from engines.calibration import Calibration, calibrate_histograms
from engines.graph import canonical_hash, image_input, load_model
from engines.passes import prepare
from engines.placement import Placement, place
from engines.planned import observed_graph, planned_amax


@dataclass(frozen=True)
class Model:
    """A model ready for calibration: its spec, its FP32 master graph with canonical hash, and its precision plan.

    observed: the master as the plan has it observed and quantised: with its divisions, which change nothing in float.
    placement: where Q/DQ may go in it, whatever the plan leaves float.
    input_shape: of one frame's network input, in the model's layout, also where the graph leaves dimensions open.
    """

    spec: ModelSpec
    master: onnx.ModelProto
    sha256: str
    input_shape: tuple[int, ...]
    plan: PrecisionPlan
    observed: onnx.ModelProto
    placement: Placement

    def under(self, plan: PrecisionPlan) -> Model:
        """The model under another plan. Raises EngineError: `plan.model` and `plan.node` for another model's plan."""
        planned = str(plan.evidence.get("model", self.sha256))  # a plan by hand has no evidence
        if planned != self.sha256:
            found, expected = f"a plan of model {planned[:12]}", f"one of {self.spec.path.name}, {self.sha256[:12]}"
            raise EngineError("plan.model", found, expected, "make the plan anew: repairs follow from the weights")
        place(self.master, plan)
        observed = observed_graph(self.master, plan)
        return replace(self, plan=plan, observed=observed, placement=place(observed))

    def request(
        self, graph: onnx.ModelProto, precision: str = "fp32", amax: Mapping[str, float] | None = None
    ) -> BuildRequest:
        """What a backend is asked for a graph that was made from the master, which the reference is."""
        profiles = tuple(
            {name: ShapeRange(shapes.min, shapes.opt, shapes.max) for name, shapes in profile.items()}
            for profile in self.spec.profiles
        )
        return BuildRequest(graph, precision, self.input_shape, profiles, amax or {})

    def scales(self, calibration: Calibration) -> dict[str, float]:
        """Per tap the scale that serves under the plan."""
        return replace(calibration, amax=planned_amax(self.placement, self.plan.effective, calibration)).scales

    @property
    def spec_id(self) -> str:
        """16 hex digits over what the spec says of a model, wherever its file lies."""
        return fingerprint(self.spec.model_dump(mode="json", exclude={"path"}))

    @property
    def observed_id(self) -> str:
        """16 hex digits over the repairs that change what the observed tensors hold."""
        repairs = self.plan.effective
        return fingerprint({"divisors": dict(repairs.divisors), "offsets": dict(repairs.offsets)})

    @property
    def needed_taps(self) -> tuple[str, ...]:
        """Of the taps those without which this plan cannot be built. All are observed: they serve every plan."""
        return place(self.observed, PrecisionPlan(self.plan.floats)).taps

    @property
    def needs_no_calibration(self) -> bool:
        """True where INT8 needs no scale of ours: all that may be INT8 has the model's own."""
        return not self.placement.taps and bool(self.placement.own or self.placement.quantised)

    @property
    def reference(self) -> BuildRequest:
        """The float reference."""
        return self.request(self.observed)


def open_model(spec: ModelSpec, plan: PrecisionPlan = ALL_INT8) -> Model:
    """Load and prepare the ONNX file of a spec; ONNX Runtime runs the passes' equivalence check, whatever serves.

    The spec's `precision` goes before the plan. Raises EngineError as `load_model` and `prepare` do,
    `plan.model` and `plan.node` for another model's plan; ConfigError when the spec does not fit the model.
    """
    reference = open_backend("onnxruntime")

    def run(graph: onnx.ModelProto, batch: Array) -> dict[str, Array]:
        with closing(reference.load(graph.SerializeToString())) as engine:
            return engine.infer(batch)

    original = load_model(spec.path)
    taken = network_input(spec, image_input(original))
    input_shape = taken.shape(taken.usual)
    master = prepare(original, run, input_shape)
    placement = place(master)
    rules = read_rules(spec.precision, master, placement)
    bare = Model(spec, master, canonical_hash(master), input_shape, ALL_INT8, master, placement)
    return bare.under(replace(plan, floats=rules.applied(plan.floats)))


def calibrate(
    model: Model, histograms: Mapping[str, AbsHistogram], method: str, frames: int, source: str
) -> Calibration:
    """A calibration of this model, from histograms by tap. Raises CalibrationError as `calibrate_histograms`.

    A tensor that is too large for any scale is left out where all that reads it stays float, and is refused elsewhere.
    `calibration.nothing` for a model that brings INT8 of its own and leaves nothing to observe: it can be built now.
    """
    if model.needs_no_calibration:
        raise CalibrationError(
            "calibration.nothing",
            "a model that is quantised already, by Q/DQ of its own",
            "a model with tensors to quantise",
            "build it at once, with --precision int8 and no calibration",
        )
    needed = set(model.needed_taps)
    return calibrate_histograms(
        {tap: seen for tap, seen in histograms.items() if tap in needed or has_scale(seen.amax)},
        model.placement.shared,
        model_sha256=model.sha256,
        method=method,
        frames=frames,
        source=source,
        preprocessing=_preprocessing(model),
    )


def check_calibration(model: Model, calibration: Calibration) -> None:
    """Raises CalibrationError: `calibration.model` for another model's, `calibration.plan` for one that lacks tensors
    of the model's plan, `calibration.input` for another input spec.
    """
    missing = set(model.needed_taps) - {*calibration.amax, *model.plan.repairs.ranges}
    if missing and calibration.model_sha256 == model.sha256:
        raise CalibrationError(
            "calibration.plan",
            f"a calibration without tensor '{min(missing)}': it was made under another plan",
            f"all {len(model.needed_taps)} tensors that are INT8 under this one",
            "calibrate again under this plan, or return to the plan it was made under",
        )
    if calibration.model_sha256 != model.sha256:
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


def slower_here(plan: PrecisionPlan, runtime: Mapping[str, str]) -> str:
    """What to tell of a plan whose INT8 was not faster on this very runtime; empty where it was, or nobody knows."""
    found = plan.evidence
    if found.get("accepted") is None or found.get("faster") or found.get("backend") != dict(runtime):
        return ""
    return "on this runtime INT8 under this plan was measured, and is not faster than float: it is for other boards"


def read_plan(path: Path) -> PrecisionPlan:
    """Raises CalibrationError: `plan.format` also for a file that cannot be read, `plan.schema`."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CalibrationError("plan.format", f"{path}: {error}", "a readable plan.json", "check the path") from error
    return PrecisionPlan.from_json(text)
