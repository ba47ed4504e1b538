"""The owner's word about precision: rules of the model spec, matched with the nodes of its graph."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import onnx
from onnx import ModelProto, NodeProto

from agent.common.errors import ConfigError
from agent.vision.preprocess import network_input
from agent.vision.spec import ModelSpec, PrecisionRules
from calibrate.errors import CalibrationError
from calibrate.histogram import AbsHistogram
from calibrate.noise import tensor_noise
from calibrate.plan import ALL_INT8, PrecisionPlan
from calibrate.scale import has_scale
from engines.calibration import Calibration, calibrate_histograms
from engines.errors import EngineError
from engines.graph.load import canonical_hash, image_input, load_model
from engines.graph.passes import prepare
from engines.interface import Array, BuildRequest, ShapeRange
from engines.quantise.apply_plan import observed_graph, planned_amax
from engines.quantise.fusion import fusion_groups, tensors_read
from engines.quantise.placement import Placement, ScaleGroup, place
from engines.registry import open_backend
from engines.store.artefact import fingerprint


@dataclass(frozen=True)
class Rules:
    """floats: node -> the rule that keeps it float. int8: layer -> the rule that forces it into INT8."""

    floats: Mapping[str, str]
    int8: Mapping[str, str]

    def applied(self, floats: Mapping[str, str]) -> dict[str, str]:
        """The layers that stay float where a plan says these, each with its reason: the owner's word goes first."""
        return {**{layer: why for layer, why in floats.items() if layer not in self.int8}, **self.floats}


def read_rules(rules: PrecisionRules, master: ModelProto, placement: Placement) -> Rules:
    """Match the rules with a master graph and where INT8 may go in it.

    A rule is a node's name, a glob of names, or an operator type. Raises ConfigError `precision.rule` for one that
    matches nothing, that forces what cannot be INT8, that keeps float what the model itself has in INT8, or for a node
    under both kinds.
    """
    floats = _first_rule(_matches(rules.keep_float, "keep_float", master))
    own = sorted(floats.keys() & set(placement.own))
    if own:
        found = f"{floats[own[0]]}, and '{own[0]}' is INT8 in the model itself"
        raise _refusal(found, "rules for the model's float part", "leave it out, or give the model before quantisation")
    forced = _matches(rules.force_int8, "force_int8", master)
    for rule, nodes in forced.items():
        if not any(node in placement.weights for node in nodes):
            reason = placement.floats.get(nodes[0], "it has no weights of its own")
            found = f"{rule}, and '{nodes[0]}' cannot be INT8: {reason}"
            raise _refusal(found, "rules for layers that can be", "leave the rule out")
    int8 = {node: rule for node, rule in _first_rule(forced).items() if node in placement.weights}
    both = sorted(floats.keys() & int8.keys())
    if both:
        found = f"'{both[0]}' under {floats[both[0]]} and {int8[both[0]]}"
        raise _refusal(found, "one rule for a node", "take it out of one of the two")
    return Rules({node: rule for node, rule in floats.items() if node in placement.reads}, int8)


def _matches(patterns: tuple[str, ...], kind: str, master: ModelProto) -> dict[str, list[str]]:
    """Per rule the names of the nodes that it matches, at least one."""
    found: dict[str, list[str]] = {}
    for pattern in patterns:
        nodes = [node.name for node in master.graph.node if _fits(node, pattern)]
        if not nodes:
            names = [*(node.name for node in master.graph.node), *(node.op_type for node in master.graph.node)]
            near = ", ".join(get_close_matches(pattern, dict.fromkeys(names), n=3)) or names[0]
            raise _refusal(
                f"{kind}: {pattern}, which matches no node",
                "a node's name, a glob, or an operator type",
                f"the nearest names are {near}; 'tared plan' lists all layers",
            )
        found[f"{kind}: {pattern}"] = nodes
    return found


def _first_rule(matches: Mapping[str, list[str]]) -> dict[str, str]:
    """Per node the first rule that matches it."""
    found: dict[str, str] = {}
    for rule, nodes in matches.items():
        found = dict.fromkeys(nodes, rule) | found
    return found


def _fits(node: NodeProto, pattern: str) -> bool:
    return pattern in (node.op_type, node.name) or fnmatchcase(node.name, pattern)


def _refusal(found: str, expected: str, remedy: str) -> ConfigError:
    return ConfigError("precision.rule", found, expected, remedy)


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


# Noise to signal of values spread evenly over the range. A tensor of a few values that all lie on the grid has none,
# and would drown all others the moment that one of its values does not.
_LEAST_NOISE = 1.0 / (4.0 * 127**2)
# Of the mean that scale groups add: a sensitivity of nothing, on a plan's few frames in one light, is no reason to be
# deaf to a tensor whose noise may grow a thousandfold in another.
_LEAST_SHARE = 0.01


def tap_weights(model: Model, calibration: Calibration) -> dict[str, float]:
    """By tap that is INT8 under the model's plan, all positive."""
    placement = place(model.observed, PrecisionPlan(model.plan.floats))
    noise = tensor_noise(calibration.histograms, [model.scales(calibration)])
    own = {
        name: max(float(ratio), _LEAST_NOISE)
        for name, ratio in zip(noise.names, noise.ratios[:, 0].sum(axis=1), strict=True)
    }
    added = _measured(model, placement)
    if not any(added.values()):
        added = {group: float(len(group.taps)) for group in placement.groups}
    weights = {}
    for group in placement.groups:
        under = sum(own.get(tap, 0.0) for tap in group.taps)
        if under > 0.0 and added[group] > 0.0:
            weights.update(dict.fromkeys(group.taps, added[group] / under))
    return weights


def _measured(model: Model, placement: Placement) -> dict[ScaleGroup, float]:
    """What those who read each scale group add, by the evidence of the plan; zeros where it has none.

    What a fusion group adds is shared evenly among the tensors that it reads, an Add's skip connection like the others.
    """
    nodes = {node.name: node for node in model.observed.graph.node}
    group_of = {tensor: group for group in placement.groups for tensor in group.tensors}
    sensitivities = _sensitivities(model.plan)
    added = dict.fromkeys(placement.groups, 0.0)
    for fused in fusion_groups(model.observed, model.placement).groups if sensitivities else ():
        read = tensors_read(fused, nodes, placement)
        for tensor in read:
            added[group_of[tensor]] += sum(sensitivities.get(layer, 0.0) for layer in fused.layers) / len(read)
    least = _LEAST_SHARE * sum(added.values()) / max(len(added), 1)
    return {group: max(sensitivity, least) for group, sensitivity in added.items()}


def _sensitivities(plan: PrecisionPlan) -> dict[str, float]:
    """By layer, of the largest of a group; a group's is shared evenly among its layers.

    Nothing where the search did not get so far, or where somebody else wrote what no search finds.
    """
    try:
        rows = plan.evidence["groups"] if plan.evidence["sensed"] else []
        found = [([str(layer) for layer in row["layers"]], float(row["sensitivity"])) for row in rows]
    except (KeyError, TypeError, ValueError, OverflowError):
        return {}
    largest = max((sensitivity for _, sensitivity in found), default=0.0)
    if not largest > 0.0 or not all(0.0 <= sensitivity < math.inf for _, sensitivity in found):
        return {}
    return {layer: sensitivity / largest / len(layers) for layers, sensitivity in found for layer in layers}
