"""A plan that leaves more layers float, where the scales fit the scene and INT8 itself is what costs fidelity.

Which groups make the noise is measured on a few held-out frames, by the search of `tared plan`: blocks of groups are
INT8 alone, and the loud ones are split. What they are predicted to make in this scene, under the best scales it could
have, says where to cut blocks, and who made what in one that is not split. Alone it would not do: histograms do not see
the channels of a tensor. Of yolox_nano's 109 groups one makes 88 % of the noise; float, it takes the loss from 0.46 to
0.15, where the 37 groups that are predicted to make half of it take it to 0.43.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

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
_RUNS = 32  # of the network: twice the blocks at first
_FRAMES = 8  # for each, as `tared plan` takes
_ALONE = "another group is looked at"

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class PrecisionRaise:
    """What is asked for: the rung of `calibrate.sensitivity.float_levels`, from 1, since what serves has this fidelity.

    budget_s: after so many seconds of measuring, what is left is predicted.
    """

    rung: int
    fidelity: float
    budget_s: float

    def as_dict(self) -> dict[str, Any]:
        """In JSON's types."""
        return asdict(self)


@dataclass(frozen=True)
class ObservedScene:
    """What was observed: histograms by tap, the calibration made of them, and network inputs (1, C, H, W) to try on."""

    histograms: Mapping[str, AbsHistogram]
    calibration: Calibration
    frames: Sequence[Array]


class PrecisionRaiser:
    """The search for one. What the owner forces into INT8 stays INT8."""

    def __init__(
        self, model: Model, scene: ObservedScene, without_int8: Mapping[str, str], embedded: Backend, progress: Progress
    ) -> None:
        """model: under the plan in service. without_int8: nodes that serve in float all the same, for want of a kernel.

        embedded: ONNX Runtime, on which groups are tried.
        """
        self._model = model
        self._scene = scene
        self._stays = {**without_int8, **model.plan.floats}
        self._embedded = embedded
        self._progress = progress
        self.grouping = fusion_groups(model.observed, model.placement)

    def find(self, raising: PrecisionRaise) -> PrecisionPlan:
        """The plan in service with its worst groups float. Raises AgentError (`precision.exhausted`) past the last."""
        noise = self._noise(raising.budget_s)
        ladder = float_levels(noise)
        if raising.rung > len(ladder):
            raise AgentError(
                EXHAUSTED,
                f"a fidelity of {raising.fidelity:.2f}, and no more layers to leave float for it",
                "a loss within recalibration.max_loss",
                "look at what precision.force_int8 forbids, search with 'tared plan', or accept the loss",
            )
        floats = dict(self._model.plan.floats)
        for index in ladder[raising.rung - 1]:
            percent = 100.0 * noise[index] / noise.sum()
            reason = f"raised: made {percent:.3g} % of the noise while fidelity was {raising.fidelity:.2f}"
            for layer in self.grouping.groups[index].layers:
                floats.setdefault(layer, reason)
        return replace(self._model.plan, floats=floats)

    def candidates(self) -> list[int]:
        """The groups, by index, that serve in INT8 and need not."""
        spec, master = self._model.spec, self._model.master
        forced = read_rules(spec.precision, master, place(master)).int8
        return [
            index
            for index, group in enumerate(self.grouping.groups)
            if not group.fixed
            and not self._stays.keys() >= set(group.layers)
            and forced.keys().isdisjoint(group.layers)
        ]

    def predicted(self) -> Floats:
        """Per group (n,): the weighted noise to signal of what it reads, under each tensor's best scale in the scene.

        That is what no recalibration cures. A tensor that several groups read counts in each.
        """
        weights = tap_weights(self._model, self._scene.calibration)
        found = tensor_noise(self._scene.histograms, [])
        least = dict(zip(found.names, found.ratios[:, 0].sum(axis=1).tolist(), strict=True))
        placement = self._model.placement
        taps = {name: (name,) if name in each.taps else each.taps for each in placement.groups for name in each.tensors}
        nodes = {node.name: node for node in self._model.observed.graph.node}

        def noise(group: FusionGroup) -> float:
            read = tensors_read(group, nodes, placement)
            heard = dict.fromkeys(tap for tensor in read for tap in taps.get(tensor, ()))
            return float(sum(weights.get(tap, 0.0) * least.get(tap, 0.0) for tap in heard))

        return np.array([noise(group) for group in self.grouping.groups])

    def _noise(self, budget_s: float) -> Floats:
        """Per group (n,): what it adds, in what unit ever; nothing for those that are float, or have to be INT8."""
        candidates = self.candidates()
        noise = np.zeros(len(self.grouping.groups))
        if candidates:
            predicted = self.predicted()[candidates]
            noise[candidates] = self._measured(candidates, predicted, budget_s) if self._scene.frames else predicted
        return noise

    def _measured(self, candidates: Sequence[int], predicted: Floats, budget_s: float) -> Floats:
        """(candidates,): what each adds to the divergence of the answers."""
        what_if = WhatIf(self._model, self._scene.calibration, self._scene.frames[:_FRAMES], self._embedded)
        ends_s, asked = time.monotonic() + budget_s, 0

        def measure(members: Sequence[int]) -> float | None:
            nonlocal asked
            if time.monotonic() >= ends_s:
                return None
            self._progress(min(1.0, asked / _RUNS), "finding the groups that make the noise")
            asked += 1
            int8 = np.zeros(len(self.grouping.groups), np.bool_)
            int8[[candidates[member] for member in members]] = True
            floats = {**self.grouping.plan(int8.tolist(), _ALONE), **self._stays}
            return what_if.ask(replace(self._model.plan, floats=floats)).divergence

        return share_out(predicted, measure_blocks(predicted, measure, _RUNS))
