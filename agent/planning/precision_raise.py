"""Raise precision: leave more layers of a served plan float, where the scales fit and INT8 itself costs fidelity.

The noise of each group is measured on a few held-out frames, as in `tared plan`: blocks of groups are INT8 alone, and
loud blocks are split. The noise predicted for this scene, under the best scales for it, says where to cut blocks, and
shares out the noise of a block that is not split. Prediction alone does not suffice, since histograms do not see the
channels of a tensor. Of yolox_nano's 109 groups one makes 88 % of the noise. In float it takes the loss from 0.46 to
0.15; the 37 groups that are predicted to make half of the noise take it to 0.43.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from agent.common.errors import AgentError
from agent.models.model import Model, read_rules, tap_weights
from agent.planning.what_if import WhatIf
from calibrate.histogram import AbsHistogram
from calibrate.noise import tensor_noise
from calibrate.plan import PrecisionPlan
from calibrate.sensitivity import float_levels, measure_blocks, share_out
from engines.calibration import Calibration
from engines.interface import Array, Backend, Progress
from engines.quantise.fusion import FusionGroup, fusion_groups, tensors_read
from engines.quantise.placement import place

EXHAUSTED = "precision.exhausted"
_RUNS = 32  # of the network: twice the number of blocks at first
_FRAMES = 8  # for each run, as in `tared plan`
_ALONE = "another group is looked at"

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class PrecisionRaise:
    """The request for a raise, because the served engine has this fidelity.

    rung: the level of `calibrate.sensitivity.float_levels`, from 1. budget_s: after so many seconds of measuring, the
    rest is predicted.
    """

    rung: int
    fidelity: float
    budget_s: float


@dataclass(frozen=True)
class ObservedScene:
    """What was observed: histograms by tap, the calibration made of them, and network inputs (1, C, H, W)."""

    histograms: Mapping[str, AbsHistogram]
    calibration: Calibration
    frames: Sequence[Array]


class PrecisionRaiser:
    """Find a plan with higher precision. Layers that the owner forces into INT8 stay INT8."""

    def __init__(
        self, model: Model, scene: ObservedScene, without_int8: Mapping[str, str], embedded: Backend, progress: Progress
    ) -> None:
        """Start from the served model.

        Args:
            model: Under the plan in service.
            without_int8: Nodes that are float for want of an INT8 kernel, each with the reason.
            embedded: ONNX Runtime, on which groups are tried.
        """
        self._model = model
        self._scene = scene
        self._floats = {**without_int8, **model.plan.floats}
        self._embedded = embedded
        self._progress = progress
        self.grouping = fusion_groups(model.observed, model.placement)

    def plan(self, raising: PrecisionRaise) -> PrecisionPlan:
        """Return the plan in service with its worst groups float.

        Raises AgentError (`precision.exhausted`) past the last level.
        """
        noise = self._noise(raising.budget_s)
        levels = float_levels(noise)
        if raising.rung > len(levels):
            raise AgentError(
                EXHAUSTED,
                f"a fidelity of {raising.fidelity:.2f}, and no more layers to leave float for it",
                "a loss within recalibration.max_loss",
                "look at what precision.force_int8 forbids, search with 'tared plan', or accept the loss",
            )
        floats = dict(self._model.plan.floats)
        for index in levels[raising.rung - 1]:
            percent = 100.0 * noise[index] / noise.sum()
            reason = f"raised: made {percent:.3g} % of the noise while fidelity was {raising.fidelity:.2f}"
            for layer in self.grouping.groups[index].layers:
                floats.setdefault(layer, reason)
        return replace(self._model.plan, floats=floats)

    def candidate_groups(self) -> list[int]:
        """Return the indices of the groups that are INT8 and need not be."""
        spec, master = self._model.spec, self._model.master
        forced = read_rules(spec.precision, master, place(master)).int8
        return [
            index
            for index, group in enumerate(self.grouping.groups)
            if not group.fixed
            and not self._floats.keys() >= set(group.layers)
            and forced.keys().isdisjoint(group.layers)
        ]

    def predict_noise(self) -> Floats:
        """Per group (n,): the weighted noise to signal of its inputs, under each tensor's best scale in the scene.

        No recalibration can remove that noise. A tensor that several groups read counts in each.
        """
        weights = tap_weights(self._model, self._scene.calibration)
        tensors = tensor_noise(self._scene.histograms, [])
        least = dict(zip(tensors.names, tensors.ratios[:, 0].sum(axis=1).tolist(), strict=True))
        placement = self._model.placement
        taps = {name: (name,) if name in each.taps else each.taps for each in placement.groups for name in each.tensors}
        nodes = {node.name: node for node in self._model.observed.graph.node}

        def noise(group: FusionGroup) -> float:
            read = tensors_read(group, nodes, placement)
            read_taps = dict.fromkeys(tap for tensor in read for tap in taps.get(tensor, ()))
            return float(sum(weights.get(tap, 0.0) * least.get(tap, 0.0) for tap in read_taps))

        return np.array([noise(group) for group in self.grouping.groups])

    def _noise(self, budget_s: float) -> Floats:
        """Per group (n,): its noise, in any unit; 0 for groups that are float, or have to be INT8."""
        candidates = self.candidate_groups()
        noise = np.zeros(len(self.grouping.groups))
        if candidates:
            predicted = self.predict_noise()[candidates]
            noise[candidates] = self._measured(candidates, predicted, budget_s) if self._scene.frames else predicted
        return noise

    def _measured(self, candidates: Sequence[int], predicted: Floats, budget_s: float) -> Floats:
        """(candidates,): what each group adds to the divergence of the answers."""
        what_if = WhatIf(self._model, self._scene.calibration, self._scene.frames[:_FRAMES], self._embedded)
        ends_s, runs = time.monotonic() + budget_s, 0

        def measure(members: Sequence[int]) -> float | None:
            nonlocal runs
            if time.monotonic() >= ends_s:
                return None
            self._progress(min(1.0, runs / _RUNS), "finding the groups that make the noise")
            runs += 1
            int8 = np.zeros(len(self.grouping.groups), np.bool_)
            int8[[candidates[member] for member in members]] = True
            floats = {**self.grouping.plan(int8.tolist(), _ALONE), **self._floats}
            return what_if.evaluate(replace(self._model.plan, floats=floats)).divergence

        return share_out(predicted, measure_blocks(predicted, measure, _RUNS))
