"""Open a model from its spec, and turn histograms of its tensors into a calibration.

The module goes from the spec to what an engine is built of:

1. `read_rules` matches the precision rules of the model spec (`keep_float`, `force_int8`) with the nodes of the graph.
2. `open_model` loads and prepares the ONNX file. The result is a `Model`: spec, FP32 master graph and precision plan.
3. `calibrate` chooses a scale for each tensor from histograms; `check_calibration` refuses one of another model.
4. `tap_weights` says how much the quantisation noise of each tensor counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto

from agent.common.errors import ConfigError
from agent.vision.preprocess import network_input
from agent.vision.spec import ModelSpec, PrecisionRules
from calibrate.errors import CalibrationError
from calibrate.histogram import AbsHistogram
from calibrate.noise import tensor_noise
from calibrate.plan import ALL_INT8, PrecisionPlan
from calibrate.repair import Extremes, undivided
from calibrate.scale import has_scale
from engines.calibration import Calibration, calibrate_histograms
from engines.errors import EngineError
from engines.graph.constant_inputs import NO_CONSTANTS
from engines.graph.load import canonical_hash, image_input, load_model
from engines.graph.passes import prepare
from engines.graph.topology import Topology
from engines.interface import Array, Backend, BuildRequest, EntropySearch, Observer, Progress, ShapeRange, silent
from engines.quantise.apply_plan import known_amax, layers_without_range, observed_graph, planned_amax
from engines.quantise.equalise import can_divide
from engines.quantise.fusion import fusion_groups, tensors_read
from engines.quantise.placement import Placement, ScaleGroup, place
from engines.registry import open_backend
from engines.store.artefact import fingerprint
from engines.store.files import read_text

_NAMED = 3  # layers that a refusal names


@dataclass(frozen=True)
class Rules:
    """The precision rules of a model spec, matched with a graph.

    Args:
        floats: Node -> the rule that keeps it float.
        int8: Layer -> the rule that forces it into INT8.
    """

    floats: Mapping[str, str]
    int8: Mapping[str, str]

    def apply(self, floats: Mapping[str, str]) -> dict[str, str]:
        """Return the layers that stay float, each with its reason. The rules override `floats`, those of a plan."""
        return {**{layer: reason for layer, reason in floats.items() if layer not in self.int8}, **self.floats}


def read_rules(rules: PrecisionRules, master: ModelProto, placement: Placement) -> Rules:
    """Match the rules with a master graph and the places where INT8 may go in it.

    A rule is a node's name, a glob of names, or an operator type.

    Raises ConfigError:
        precision.rule  a rule that matches nothing, forces what cannot be INT8, or keeps float what the model itself
                        has in INT8; a node under both kinds of rules
    """
    floats = _first_rule(_matches(rules.keep_float, "keep_float", master))
    own = sorted(floats.keys() & set(placement.own))
    if own:
        found = f"{floats[own[0]]}, and '{own[0]}' is INT8 in the model itself"
        raise _refusal(found, "rules for the model's float part", "leave it out, or give the model before quantisation")
    forced = _matches(rules.force_int8, "force_int8", master)
    for rule, nodes in forced.items():
        if not any(node in placement.layers for node in nodes):
            reason = placement.floats.get(nodes[0], "it has no weights of its own")
            found = f"{rule}, and '{nodes[0]}' cannot be INT8: {reason}"
            raise _refusal(found, "rules for layers that can be INT8", "leave the rule out")
    int8 = {node: rule for node, rule in _first_rule(forced).items() if node in placement.layers}
    both = sorted(floats.keys() & int8.keys())
    if both:
        found = f"'{both[0]}' under {floats[both[0]]} and {int8[both[0]]}"
        raise _refusal(found, "one rule for a node", "take the node out of one of the two")
    return Rules({node: rule for node, rule in floats.items() if node in placement.reads}, int8)


def _matches(patterns: tuple[str, ...], kind: str, master: ModelProto) -> dict[str, list[str]]:
    """Return for each rule the names of the nodes that it matches, at least one."""
    matches: dict[str, list[str]] = {}
    for pattern in patterns:
        nodes = [
            node.name
            for node in master.graph.node
            if pattern in (node.op_type, node.name) or fnmatchcase(node.name, pattern)
        ]
        if not nodes:
            names = [*(node.name for node in master.graph.node), *(node.op_type for node in master.graph.node)]
            near = ", ".join(get_close_matches(pattern, dict.fromkeys(names), n=3)) or names[0]
            raise _refusal(
                f"{kind}: {pattern}, which matches no node",
                "a node's name, a glob, or an operator type",
                f"the nearest names are {near}; 'tared plan' lists all layers",
            )
        matches[f"{kind}: {pattern}"] = nodes
    return matches


def _first_rule(matches: dict[str, list[str]]) -> dict[str, str]:
    """Return for each node the first rule that matches it."""
    return {node: rule for rule, nodes in reversed(matches.items()) for node in nodes}


def _refusal(found: str, expected: str, remedy: str) -> ConfigError:
    return ConfigError("precision.rule", found, expected, remedy)


@dataclass(frozen=True)
class Model:
    """A model that is ready for calibration.

    Args:
        master: FP32 master graph.
        sha256: Canonical hash of the master graph.
        input_shape: Shape of one frame's network input in the model's layout, complete also where the graph leaves
            dimensions open.
        plan: Precision plan, with the rules of the spec applied.
        observed: The master graph as the plan observes and quantises it. It has the plan's divisions, which change
            nothing in float.
        placement: Where Q/DQ may go in `observed`, whatever the plan leaves float.
    """

    spec: ModelSpec
    master: onnx.ModelProto
    sha256: str
    input_shape: tuple[int, ...]
    plan: PrecisionPlan
    observed: onnx.ModelProto
    placement: Placement

    @cached_property
    def rules(self) -> Rules:
        """The precision rules of the spec, matched with the master graph. Raises ConfigError as `read_rules`."""
        return read_rules(self.spec.precision, self.master, place(self.master))

    def with_plan(self, plan: PrecisionPlan) -> Model:
        """Return the model under another plan.

        Raises EngineError:
            plan.model, plan.node  the plan is of another model
        """
        planned = str(plan.evidence.get("model", self.sha256))  # a plan by hand has no evidence
        if planned != self.sha256:
            found, expected = f"a plan of model {planned[:12]}", f"one of {self.spec.path.name}, {self.sha256[:12]}"
            raise EngineError("plan.model", found, expected, "make the plan again: repairs follow from the weights")
        place(self.master, plan)
        observed = observed_graph(self.master, plan)
        return replace(self, plan=plan, observed=observed, placement=place(observed))

    def build_request(
        self, graph: onnx.ModelProto, precision: str = "fp32", amax: Mapping[str, float] | None = None
    ) -> BuildRequest:
        """Return the build request for `graph`, which was made from the master graph."""
        profiles = tuple(
            {name: ShapeRange(shapes.min, shapes.opt, shapes.max) for name, shapes in profile.items()}
            for profile in self.spec.profiles
        )
        return BuildRequest(graph, precision, self.input_shape, profiles, amax or {})

    def scales(self, calibration: Calibration) -> dict[str, float]:
        """Return the scale of each tap that serves under the plan."""
        return replace(calibration, amax=planned_amax(self.placement, self.plan.effective, calibration)).scales

    @property
    def spec_id(self) -> str:
        """16 hex digits over the content of the model spec, wherever its file lies."""
        return fingerprint(self.spec.model_dump(mode="json", exclude={"path"}))

    @property
    def observed_id(self) -> str:
        """16 hex digits over the repairs that change the values of the observed tensors."""
        repairs = self.plan.effective
        return fingerprint({"divisors": dict(repairs.divisors), "offsets": dict(repairs.offsets)})

    @property
    def needed_taps(self) -> tuple[str, ...]:
        """The taps without which this plan cannot be built. All taps are observed, because they serve every plan."""
        return place(self.observed, PrecisionPlan(self.plan.floats)).taps

    @property
    def needs_no_calibration(self) -> bool:
        """True where INT8 needs no scale of ours, because all that may be INT8 has the model's own scales."""
        return not self.placement.taps and bool(self.placement.own or self.placement.quantised)

    @property
    def reference(self) -> BuildRequest:
        """The build request of the float reference."""
        return self.build_request(self.observed)

    @property
    def divisible(self) -> tuple[str, ...]:
        """The layers that a plan may let read a divided input, and whose inputs' extremes are observed therefore."""
        topology = Topology(self.master)
        layers = (node for node in topology.nodes if node.name in self.placement.weights)
        return tuple(node.name for node in layers if can_divide(topology, node))

    def open_observer(self, backend: Backend, progress: Progress = silent) -> Observer:
        """Open the float reference with all that a calibration needs observed.

        Whoever needs the reference opens this one: a runtime that builds engines then builds and keeps a single one.
        Raises EngineError as the backend does.
        """
        return backend.observer(self.reference, self.placement.taps, progress, self.divisible)

    @property
    def preprocessing(self) -> dict[str, Any]:
        """The `input` section of the spec, in JSON's types: scales are valid for this preprocessing only."""
        return self.spec.input.model_dump(mode="json")


def open_model(spec: ModelSpec, plan: PrecisionPlan = ALL_INT8) -> Model:
    """Load and prepare the ONNX file of a spec.

    ONNX Runtime runs the equivalence check of the graph passes, whatever backend serves. The spec's `precision` rules
    override the plan.

    Raises EngineError as `load_model` and `prepare` do, and `plan.model` or `plan.node` for another model's plan;
    ConfigError when the spec does not fit the model.
    """
    reference = open_backend("onnxruntime")

    def run(graph: onnx.ModelProto, batch: Array) -> dict[str, Array]:
        with closing(reference.load(graph.SerializeToString())) as engine:
            return engine.infer(batch)

    original = load_model(spec.path, spec.inputs or NO_CONSTANTS)
    accepted = network_input(spec, image_input(original))
    input_shape = accepted.shape(accepted.usual_size)
    master = prepare(original, run, input_shape)
    placement = place(master)
    rules = read_rules(spec.precision, master, placement)
    bare = Model(spec, master, canonical_hash(master), input_shape, ALL_INT8, master, placement)
    return bare.with_plan(replace(plan, floats=rules.apply(plan.floats)))


def calibrate(
    model: Model,
    histograms: Mapping[str, AbsHistogram],
    method: str,
    frames: int,
    source: str,
    backend: Backend | None = None,
    extremes: Mapping[str, Extremes] | None = None,
) -> Calibration:
    """Make a calibration of this model from histograms by tap, and extremes by layer.

    A tensor that is too large for any scale is left out if all its readers stay float, and is refused otherwise.

    Args:
        method: How the scale of a tensor is chosen, see calibrate.threshold.METHODS.
        frames: Frames that were observed.
        source: Where the frames came from, for people.
        backend: Its GPU searches for method `entropy`, if it has one. The result is the same as the CPU's.
        extremes: As observed under the model's plan; a calibration has those of the master's own tensors.

    Raises CalibrationError as `calibrate_histograms`, and:
        calibration.nothing  the model brings INT8 of its own and leaves nothing to observe: it can be built now
    """
    if model.needs_no_calibration:
        raise CalibrationError(
            "calibration.nothing",
            "a model that is quantised already, by Q/DQ of its own",
            "a model with float tensors to quantise",
            "build it directly, with --precision int8 and no calibration",
        )
    needed, repairs = set(model.needed_taps), model.plan.effective
    finite = {layer: seen for layer, seen in (extremes or {}).items() if np.isfinite(seen).all()}
    divided = {
        layer: undivided(finite[layer], divisors, repairs.offsets.get(layer, 0.0))
        for layer, divisors in repairs.divisors.items()
        if layer in finite
    }
    return calibrate_histograms(
        {tap: histogram for tap, histogram in histograms.items() if tap in needed or has_scale(histogram.amax)},
        model.placement.shared,
        model_sha256=model.sha256,
        method=method,
        frames=frames,
        source=source,
        preprocessing=model.preprocessing,
        device=backend if isinstance(backend, EntropySearch) else None,
        extremes={**finite, **divided},
    )


def check_calibration(model: Model, calibration: Calibration | None) -> None:
    """Refuse a calibration that does not fit the model, and none for a model that needs one.

    Raises CalibrationError:
        calibration.missing  there is none
        calibration.model  it is of another model
        calibration.plan   it lacks tensors of the model's plan
        calibration.input  it was made under another input spec
    """
    if calibration is None:
        if not model.needs_no_calibration:
            remedy = "make one with 'tared calibrate'"
            raise CalibrationError(
                "calibration.missing", "int8 without a calibration", "the ranges of its tensors", remedy
            )
        return
    if calibration.model_sha256 != model.sha256:
        raise CalibrationError(
            "calibration.model",
            f"a calibration of model {calibration.model_sha256[:12]}",
            f"one of {model.spec.path.name}, {model.sha256[:12]}",
            "calibrate this model with 'tared calibrate'",
        )
    missing = set(model.needed_taps) - known_amax(model.plan.repairs, calibration).keys()
    if missing:
        raise CalibrationError(
            "calibration.plan",
            f"a calibration without tensor '{min(missing)}': it was made under another plan",
            f"all {len(model.needed_taps)} tensors that are INT8 under the present plan",
            "calibrate again under the present plan, or return to the plan of the calibration",
        )
    today = model.preprocessing
    changed = [key for key in today if today[key] != calibration.preprocessing.get(key)]
    if changed:
        raise CalibrationError(
            "calibration.input",
            f"a calibration with input.{changed[0]} {calibration.preprocessing.get(changed[0])}",
            f"{today[changed[0]]}, as the model spec has it now",
            "calibrate again: other inputs need other scales",
        )


def check_ranges(model: Model, calibration: Calibration) -> None:
    """Refuse a calibration that does not show the ranges of the inputs that the model's plan divides.

    The plan has ranges of another calibration for them, which would clip what only this one has seen.

    Raises CalibrationError:
        calibration.ranges  it has neither the histogram of such an input nor its channels' extremes
    """
    layers = layers_without_range(model.plan.effective, calibration)
    if layers:
        named = ", ".join(f"'{layer}'" for layer in layers[:_NAMED]) + (", ..." if len(layers) > _NAMED else "")
        merged = "a fleet's calibration has none: " if calibration.merged else ""
        raise CalibrationError(
            "calibration.ranges",
            f"a calibration without the ranges of {len(layers)} inputs that the plan divides, those of {named}",
            "the histogram of each, or the extremes of its channels",
            f"{merged}calibrate again ('tared calibrate', with --plan for histograms under the plan)",
        )


def read_plan(path: Path) -> PrecisionPlan:
    """Read a plan.json.

    Raises CalibrationError:
        plan.format  the file cannot be read, or is no plan
        plan.schema  the plan is of a newer tared
    """
    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise CalibrationError("plan.format", f"{path}: {error}", "a readable plan.json", "check the path") from error
    return PrecisionPlan.from_json(text)


def slower_here(plan: PrecisionPlan, runtime: Mapping[str, str]) -> str:
    """Return a warning if INT8 under this plan was measured on this very runtime and was not faster; else empty."""
    evidence = plan.evidence
    if evidence.get("chosen") is None or evidence.get("faster") or evidence.get("built_for") != dict(runtime):
        return ""
    return (
        "INT8 under this plan was measured on this runtime, and is not faster than float: the plan is for other boards"
    )


# Noise to signal of values spread evenly over the range. A tensor of a few values that all lie on the grid has no noise
# at all, and would drown all others the moment that one of its values leaves the grid.
_LEAST_NOISE = 1.0 / (4.0 * 127**2)


def tap_weights(model: Model, calibration: Calibration) -> dict[str, float]:
    """Return how much the noise of each tap counts that is INT8 under the model's plan; all weights are positive.

    A weight is the noise that the readers of the tap's scale group add to the answer, over the noise to signal of the
    group under `calibration`. Half of what is added goes by the evidence of the plan, and half evenly: a plan measures
    sensitivities on a few frames in one light, and by them alone the noise that grows in another light may be where
    hardly any weight is. Without such evidence every tap adds the same.
    """
    placement = place(model.observed, PrecisionPlan(model.plan.floats))
    noise = tensor_noise(calibration.histograms, [model.scales(calibration)])
    own = {
        name: max(float(ratio), _LEAST_NOISE)
        for name, ratio in zip(noise.names, noise.ratios[:, 0].sum(axis=1), strict=True)
    }
    added = {group: float(len(group.taps)) for group in placement.groups}
    measured, evenly = _measured_noise(model, placement), sum(added.values())
    if total := sum(measured.values()):
        added = {group: even / evenly + measured[group] / total for group, even in added.items()}
    weights = {}
    for group in placement.groups:
        group_noise = sum(own.get(tap, 0.0) for tap in group.taps)
        if group_noise > 0.0 and added[group] > 0.0:
            weights.update(dict.fromkeys(group.taps, added[group] / group_noise))
    return weights


def _measured_noise(model: Model, placement: Placement) -> dict[ScaleGroup, float]:
    """Return what the readers of each scale group add, by the evidence of the plan; zeros where it has none.

    A fusion group's noise is shared evenly among the tensors that it reads. An Add's skip connection counts like the
    others.
    """
    nodes = {node.name: node for node in model.observed.graph.node}
    group_of = {tensor: group for group in placement.groups for tensor in group.tensors}
    sensitivities = _sensitivities(model.plan)
    added = dict.fromkeys(placement.groups, 0.0)
    for fused in fusion_groups(model.observed, model.placement).groups if sensitivities else ():
        read = tensors_read(fused, nodes, placement)
        for tensor in read:
            added[group_of[tensor]] += sum(sensitivities.get(layer, 0.0) for layer in fused.layers) / len(read)
    return added


def _sensitivities(plan: PrecisionPlan) -> dict[str, float]:
    """Return each layer's sensitivity relative to the most sensitive group; a group's is shared evenly by its layers.

    Empty where the search did not get so far, or where the evidence holds values that no search writes.
    """
    try:
        rows = plan.evidence["groups"] if plan.evidence["sensed"] else []
        groups = [([str(layer) for layer in row["layers"]], float(row["sensitivity"])) for row in rows]
    except (KeyError, TypeError, ValueError, OverflowError):
        return {}
    largest = max((sensitivity for _, sensitivity in groups), default=0.0)
    if not largest > 0.0 or not all(0.0 <= sensitivity < math.inf for _, sensitivity in groups):
        return {}
    return {layer: sensitivity / largest / len(layers) for layers, sensitivity in groups for layer in layers}
