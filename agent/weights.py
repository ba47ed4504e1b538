"""How much the noise of each tensor counts for the answer: the weights of the drift signal.

A weight times the tensor's noise to signal is what it adds to the network's noise. Where a plan knows what each group
of layers does to the answer when it alone is INT8 (`tared plan` measures it), that is what a tensor that they read adds
under its calibration; where nobody measured, all are taken to add alike. A tensor that INT8 layers read has a weight,
however little was measured of it. Tensors that only float layers read add nothing, and have none.
"""

from __future__ import annotations

import math

from agent.model import Model
from calibrate.noise import tensor_noise
from calibrate.plan import PrecisionPlan
from engines.calibration import Calibration
from engines.fusion import fusion_groups, tensors_read
from engines.placement import Placement, place
from engines.scale_groups import ScaleGroup

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
