"""A precision plan carried out: from the FP32 master graph to the graph with Q/DQ, repairs included."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from onnx import ModelProto

from calibrate.histogram import merge_all
from calibrate.plan import Numbers, PrecisionPlan, Repairs
from calibrate.scale import activation_scale
from calibrate.threshold import histogram_amax
from engines.backend import EngineError
from engines.bias import shift_biases
from engines.calibration import Calibration
from engines.equalise import equalise, equalised_name
from engines.placement import Placement, place
from engines.qdq import insert_qdq


@dataclass(frozen=True)
class Quantised:
    """A graph with Q/DQ, and where it went."""

    graph: ModelProto
    placement: Placement


def observed_graph(master: ModelProto, plan: PrecisionPlan) -> ModelProto:
    """The float graph whose tensors a plan's INT8 graph quantises: the master, equalised. It computes the same.

    Raises EngineError `plan.node` for a plan of another model.
    """
    return equalise(master, plan.effective.divisors, plan.effective.offsets)


def quantised_graph(master: ModelProto, plan: PrecisionPlan, calibration: Calibration | None) -> Quantised:
    """The master under a plan, with the amax of a calibration; the master itself is not changed.

    A model that brings all its scales needs no calibration.

    Raises EngineError: `plan.node` for a plan of another model, `calibration.tap` as `insert_qdq`.
    """
    repairs = plan.effective
    offsets = _on_the_grid(repairs, calibration) if calibration is not None else repairs.offsets
    graph = equalise(shift_biases(master, repairs.shifts), repairs.divisors, offsets)
    placement = place(graph, plan)
    _check_clips(graph, placement, repairs.clips)
    amax = planned_amax(placement, repairs, calibration) if calibration is not None else {}
    return Quantised(insert_qdq(graph, placement, amax, repairs.clips), placement)


def _on_the_grid(repairs: Repairs, calibration: Calibration) -> dict[str, Numbers]:
    """The offsets as multiples of today's steps: after a recalibration too, what is exactly zero stays so."""
    snapped = {}
    for layer, offsets in repairs.offsets.items():
        tensor = equalised_name(layer)
        amax = calibration.amax.get(tensor, repairs.ranges.get(tensor, 0.0))
        steps = np.asarray(repairs.divisors.get(layer, (1.0,))) * activation_scale(amax, tensor)
        if steps.size not in (1, len(offsets)):
            return dict(repairs.offsets)  # equalise says what is wrong
        snapped[layer] = tuple((np.rint(np.asarray(offsets) / steps) * steps).tolist())
    return snapped


def planned_amax(placement: Placement, repairs: Repairs, calibration: Calibration) -> dict[str, float]:
    """Per tap. What a calibration has seen goes before what a plan remembers."""
    amax = {**repairs.ranges, **calibration.amax}
    for group in placement.groups:
        method = next((repairs.methods[tap] for tap in group.taps if tap in repairs.methods), None)
        members = [calibration.histograms[tap] for tap in group.taps if tap in calibration.histograms]
        if method is not None and members:
            chosen = histogram_amax(merge_all(members, members[0].bits), method)
            amax.update(dict.fromkeys(group.taps, chosen))
    return amax


def _check_clips(graph: ModelProto, placement: Placement, clips: Mapping[str, Sequence[float]]) -> None:
    """Refuse clips for what is no node, or not one for each scale of a quantised weight."""
    dims = {tensor.name: tensor.dims for tensor in graph.graph.initializer}
    scales = {layer: dims[weight.initializer][weight.axis] for layer, weight in placement.weights.items()}
    for layer in clips.keys() - {node.name for node in graph.graph.node if node.name not in scales}:
        if layer not in scales or len(clips[layer]) != scales[layer]:
            raise EngineError(
                "plan.node",
                f"{len(clips[layer])} weight clips for '{layer}'",
                f"{scales[layer]} of them" if layer in scales else "layers of this model",
                "make the plan anew for this model",
            )
