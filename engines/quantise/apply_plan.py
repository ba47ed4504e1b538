"""Write a plan and a calibration into the graph: explicit QuantizeLinear / DequantizeLinear, 8 bits, zero point 0.

`quantised_graph` equalises the master, places Q/DQ, chooses each tap's amax, and writes with `insert_qdq`.

Weights are stored as INT8 with a DequantizeLinear, not as float32 with both nodes: the file is a quarter, and
every runtime computes with the very integers chosen here. Activations get one Q and one DQ per tensor,
however many nodes read it; float readers keep the float tensor. The zero points are written out: ONNX takes a
missing one for uint8.

TensorRT takes int8 alone. For runtimes that take both (`Backend.takes_unsigned`), tensors that are never negative are
uint8 with the same range: 255 steps where int8 has 127. Where products of eight bits would saturate, weights have seven
(`Backend.weight_bits`), and so has the second operand of a product of two activations.

A tensor that the model itself quantises is read through the model's own DequantizeLinear.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from copy import deepcopy
from dataclasses import dataclass, replace
from math import isclose

import numpy as np
from onnx import ModelProto, NodeProto, helper, numpy_helper

from calibrate.histogram import merge_all
from calibrate.plan import Numbers, PrecisionPlan, Repairs
from calibrate.repair import divided_ends, kept_amax
from calibrate.scale import QMAX, activation_scale, clipped, quantise, weight_scales
from calibrate.threshold import histogram_amax
from engines.calibration import Calibration
from engines.errors import EngineError
from engines.graph.existing_qdq import own_int8
from engines.graph.passes import drop_unused
from engines.graph.signs import never_negative
from engines.graph.topology import Topology, fresh_name, replace_nodes
from engines.quantise.equalise import equalise, equalised_name, shift_biases
from engines.quantise.placement import Placement, Weight, place

_ZERO_POINTS = {np.int8: "zero_point.int8", np.uint8: "zero_point.uint8"}
_SAME_LARGEST = 1e-3  # relative difference of two largest values, of one tensor, but for rounding


def insert_qdq(
    master: ModelProto,
    placement: Placement,
    amax: Mapping[str, float],
    clips: Mapping[str, Sequence[float]] | None = None,
    unsigned: bool = False,
    weight_bits: int = 8,
) -> ModelProto:
    """Return the master graph with Q/DQ as placed; the master itself is not changed.

    amax: per tap, in the units of its tensor; a group takes the largest of its taps.
    clips: per layer, for layers that share their weights with none, the fraction of the largest weight that the scale
        reaches, per output channel.
    unsigned: tensors that are never negative are uint8.
    weight_bits: 8, or 7: from -64 to 64, with steps twice as large; of the second operand of a product, too.

    Raises EngineError (`calibration.tap`) when a tap has no amax, CalibrationError as `calibrate.scale`.
    """
    topology = Topology(master)
    second = {node.input[1] for node in topology.nodes if weight_bits < 8 and node.name in placement.products}
    scales = _group_scales(placement, amax, never_negative(topology) if unsigned else set(), second)
    return _Writer(master, topology, placement, clips or {}, weight_bits).write(scales)


@dataclass(frozen=True)
class _Scale:
    """The scale of a tensor, and the type of its integers."""

    value: float
    integers: type[np.int8 | np.uint8]


def _group_scales(
    placement: Placement, amax: Mapping[str, float], unsigned: Set[str], narrow: Set[str]
) -> dict[str, _Scale]:
    """Return the scale of each quantised tensor.

    unsigned: tensors that may be uint8. narrow: those that have seven bits, with all that shares their scale.
    """
    missing = [tap for tap in placement.taps if tap not in amax]
    if missing:
        raise EngineError(
            "calibration.tap",
            f"no amax for tensor '{missing[0]}' ({len(missing)} of {len(placement.taps)} are missing)",
            "a calibration of this model",
            "run `tared calibrate` with this model",
        )
    scales: dict[str, _Scale] = {}
    for group in placement.groups:
        # By amax, not by scale: a dead tap must not widen its group. NaN counts as widest, to be refused.
        widest = max(group.taps, key=lambda tap: np.nan_to_num(amax[tap], nan=np.inf))
        is_unsigned = unsigned >= set(group.taps)
        value = activation_scale(amax[widest], widest, is_unsigned) * (1.0 if narrow.isdisjoint(group.tensors) else 2.0)
        scales.update(dict.fromkeys(group.tensors, _Scale(value, np.uint8 if is_unsigned else np.int8)))
    return scales


class _Writer:
    """One rewriting of one graph."""

    def __init__(
        self,
        master: ModelProto,
        topology: Topology,
        placement: Placement,
        clips: Mapping[str, Sequence[float]],
        weight_bits: int,
    ) -> None:
        self.model = deepcopy(master)
        self.weight_bits = weight_bits
        self.placement = placement
        self.clips = clips
        self.topology = topology
        self.nodes: list[NodeProto] = []
        self.dequantised: dict[str | Weight, str] = {}
        names = (name for node in master.graph.node for name in (node.name, *node.input, *node.output))
        self.taken = {*names, *self.topology.initializers, *self.topology.pinned}
        read = {node.input[i] for node in self.topology.nodes for i in placement.reads.get(node.name, ())}
        pairs = own_int8(self.topology).pairs
        self.own = {tensor: pair for tensor, pair in pairs.items() if tensor in read}

    def write(self, scales: Mapping[str, _Scale]) -> ModelProto:
        graph = self.model.graph
        used = {scale.integers for scale in scales.values()}
        self.zero_points = {
            each: self._constant(name, np.zeros((), each)) for each, name in _ZERO_POINTS.items() if each in used
        }
        written = {node.name for pair in self.own.values() for node in pair}
        for tensor in self.topology.inputs:
            self._quantise_activation(tensor, scales)
        for node in graph.node:
            if node.name in written:
                continue
            copy = deepcopy(node)
            for index in self.placement.reads.get(node.name, ()):
                copy.input[index] = self.dequantised[node.input[index]]
            weight = self.placement.weights.get(node.name)
            if weight is not None:
                if weight not in self.dequantised:
                    self._quantise_weight(weight, self.clips.get(node.name, (1.0,)))
                copy.input[1] = self.dequantised[weight]
            self.nodes.append(copy)
            for tensor in node.output:
                self._quantise_activation(tensor, scales)
        return drop_unused(replace_nodes(self.model, self.nodes))

    def _quantise_activation(self, tensor: str, scales: Mapping[str, _Scale]) -> None:
        if tensor in self.own:  # written where the tensor is made, before all its readers
            self.nodes.extend(self.own[tensor])
            self.dequantised[tensor] = self.own[tensor][1].output[0]
        if tensor not in scales:
            return
        scale = self._constant(f"{tensor}.scale", np.array(scales[tensor].value, np.float32))
        zero_point = self.zero_points[scales[tensor].integers]
        quantised = self._node("QuantizeLinear", [tensor, scale, zero_point], f"{tensor}.int8")
        self.dequantised[tensor] = self._node(
            "DequantizeLinear", [quantised, scale, zero_point], f"{tensor}.dequantised"
        )

    def _quantise_weight(self, weight: Weight, clip: Sequence[float]) -> None:
        name, axis = weight.initializer, weight.axis
        values = numpy_helper.to_array(self.topology.initializers[name])
        scales, most = clipped(weight_scales(values, axis, name), clip), QMAX
        if self.weight_bits < 8:
            scales, most = scales * np.float32(2 ** (8 - self.weight_bits)), 2 ** (self.weight_bits - 1)
        stem = f"{name}.axis{axis}"  # one weight may serve a Conv and a ConvTranspose
        inputs = [
            self._constant(f"{stem}.int8", quantise(values, scales, axis, most)),
            self._constant(f"{stem}.scale", scales),
            self._constant(f"{stem}.zero_point", np.zeros(scales.shape, np.int8)),
        ]
        self.dequantised[weight] = self._node("DequantizeLinear", inputs, f"{stem}.dequantised", axis=axis)

    def _constant(self, name: str, value: np.typing.NDArray[np.generic]) -> str:
        name = fresh_name(name, self.taken)
        self.model.graph.initializer.append(numpy_helper.from_array(value, name))
        return name

    def _node(self, operator: str, inputs: list[str], output: str, axis: int | None = None) -> str:
        output = fresh_name(output, self.taken)
        self.nodes.append(helper.make_node(operator, inputs, [output], name=output, axis=axis))
        return output


@dataclass(frozen=True)
class Quantised:
    """A graph with Q/DQ, and the placement that it has."""

    graph: ModelProto
    placement: Placement


def observed_graph(master: ModelProto, plan: PrecisionPlan) -> ModelProto:
    """Return the float graph whose tensors a plan's INT8 graph quantises: the master, equalised. It computes the same.

    Raises EngineError `plan.node` for a plan of another model.
    """
    return equalise(master, plan.effective.divisors, plan.effective.offsets)


def quantised_graph(
    master: ModelProto,
    plan: PrecisionPlan,
    calibration: Calibration | None,
    unsigned: bool = False,
    weight_bits: int = 8,
) -> Quantised:
    """Return the master under a plan, with the amax of a calibration; the master itself is not changed.

    A model that brings all its scales needs no calibration. unsigned, weight_bits: as for `insert_qdq`.

    Raises EngineError: `plan.node` for a plan of another model, `calibration.tap` as `insert_qdq`.
    """
    repairs = plan.effective
    offsets = _on_the_grid(repairs, calibration) if calibration is not None else repairs.offsets
    graph = equalise(shift_biases(master, repairs.shifts), repairs.divisors, offsets)
    placement = place(graph, plan)
    _check_clips(graph, placement, repairs.clips)
    amax = planned_amax(placement, repairs, calibration) if calibration is not None else {}
    return Quantised(insert_qdq(graph, placement, amax, repairs.clips, unsigned, weight_bits), placement)


def _on_the_grid(repairs: Repairs, calibration: Calibration) -> dict[str, Numbers]:
    """Return the offsets as multiples of today's steps: exact zeros stay exact after a recalibration too."""
    amax = known_amax(repairs, calibration)
    snapped = {}
    for layer, offsets in repairs.offsets.items():
        tensor = equalised_name(layer)
        scale = activation_scale(amax.get(tensor, 0.0), tensor)
        steps = np.asarray(repairs.divisors.get(layer, (1.0,))) * scale
        if steps.size not in (1, len(offsets)):
            return dict(repairs.offsets)  # equalise says what is wrong
        snapped[layer] = tuple((np.rint(np.asarray(offsets) / steps) * steps).tolist())
    return snapped


def known_amax(repairs: Repairs, calibration: Calibration) -> dict[str, float]:
    """Return the amax of each tensor that has one.

    That of a divided tensor is

    1. what the plan's reach makes of the extremes; or what the calibration's method keeps, if that is more and this
       very tensor was observed: divided otherwise it has another largest value;
    2. without extremes the calibration's own;
    3. else the plan's, which is that of another calibration.
    """
    amax = {**repairs.ranges, **calibration.amax}
    for layer, divisors in repairs.divisors.items():
        extremes, tensor = calibration.extremes.get(layer), equalised_name(layer)
        if extremes is None or extremes.shape[1] != len(divisors):
            continue
        low, high = ends = divided_ends(extremes, divisors, repairs.offsets.get(layer, 0.0))
        planned = kept_amax(ends, repairs.reach.get(tensor, 1.0), layer in repairs.offsets)
        own = calibration.histograms.get(tensor)
        is_own = own is not None and isclose(own.amax, max(-low, high), rel_tol=_SAME_LARGEST)
        amax[tensor] = max(planned, calibration.amax[tensor]) if is_own else planned
    return amax


def with_ranges(plan: PrecisionPlan, calibration: Calibration) -> PrecisionPlan:
    """Return the plan with the ranges that its divided tensors have under this calibration."""
    repairs, amax = plan.repairs, known_amax(plan.repairs, calibration)
    tensors = (equalised_name(layer) for layer in repairs.divisors)
    ranges = {**repairs.ranges, **{tensor: amax[tensor] for tensor in tensors if tensor in amax}}
    return plan if ranges == repairs.ranges else replace(plan, repairs=replace(repairs, ranges=ranges))


def layers_without_range(repairs: Repairs, calibration: Calibration) -> list[str]:
    """Return the divided layers whose range this calibration does not show: it observed neither channels nor tensor."""
    return [
        layer
        for layer in repairs.divisors
        if layer not in calibration.extremes and equalised_name(layer) not in calibration.amax
    ]


def planned_amax(placement: Placement, repairs: Repairs, calibration: Calibration) -> dict[str, float]:
    """Return the amax per tap: `known_amax`, but where the plan has another method for it."""
    amax = known_amax(repairs, calibration)
    for group in placement.groups:
        method = next((repairs.methods[tap] for tap in group.taps if tap in repairs.methods), None)
        members = [calibration.histograms[tap] for tap in group.taps if tap in calibration.histograms]
        if method is not None and members:
            chosen = histogram_amax(merge_all(members, members[0].bits), method)
            amax.update(dict.fromkeys(group.taps, chosen))
    return amax


def _check_clips(graph: ModelProto, placement: Placement, clips: Mapping[str, Sequence[float]]) -> None:
    """Refuse clips for an unknown node, or of another number than the scales of a quantised weight."""
    dims = {tensor.name: tensor.dims for tensor in graph.graph.initializer}
    scales = {layer: dims[weight.initializer][weight.axis] for layer, weight in placement.weights.items()}
    for layer in clips.keys() - {node.name for node in graph.graph.node if node.name not in scales}:
        if layer not in scales or len(clips[layer]) != scales[layer]:
            raise EngineError(
                "plan.node",
                f"{len(clips[layer])} weight clips for '{layer}'",
                f"{scales[layer]} of them" if layer in scales else "layers of this model",
                "make the plan again for this model",
            )
