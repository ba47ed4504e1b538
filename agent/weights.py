"""How much the noise of each tensor counts for the answer: the weights of the drift signal.

A weight times the tensor's noise to signal is what it adds to the network's noise. Where a plan knows what each group
of layers does to the answer when it alone is INT8 (`tared plan` measures it), that is what a tensor that they read adds
under its calibration; where nobody measured, all are taken to add alike. Tensors that only float layers read add
nothing, and have no weight.
"""

from __future__ import annotations

from agent.model import Model
from calibrate.noise import tensor_noise
from calibrate.plan import PrecisionPlan
from engines.calibration import Calibration
from engines.placement import Placement, place
from engines.scale_groups import ScaleGroup

# Noise to signal of values spread evenly over the range. A tensor of a few values that all lie on the grid has none,
# and would drown all others the moment that one of its values does not.
_LEAST_NOISE = 1.0 / (4.0 * 127**2)


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
    """What the layers that read each scale group add, by the evidence of the plan; zeros where it has none.

    What a fusion group adds is shared evenly among the tensors that it reads.
    """
    nodes = {node.name: node for node in model.observed.graph.node}
    group_of = {tensor: group for group in placement.groups for tensor in group.tensors}
    added = dict.fromkeys(placement.groups, 0.0)
    for layers, sensitivity in _sensitivities(model.plan):
        read = [group_of[nodes[layer].input[i]] for layer in layers for i in placement.reads.get(layer, ())]
        for group in read:
            added[group] += sensitivity / len(read)
    return added


def _sensitivities(plan: PrecisionPlan) -> list[tuple[list[str], float]]:
    """Layers and sensitivity of each group; nothing where the search did not get so far, or somebody else wrote it."""
    try:
        groups = plan.evidence["groups"] if plan.evidence["sensed"] else []
        found = [([str(layer) for layer in group["layers"]], float(group["sensitivity"])) for group in groups]
    except (KeyError, TypeError, ValueError):
        return []
    return [row for row in found if row[1] > 0.0]
