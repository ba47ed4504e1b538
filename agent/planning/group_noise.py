"""Measure what each group of layers adds to the error of the answers while it is INT8.

`measure_noise` runs the network with blocks of groups in INT8, and splits the loud blocks. The ladder of a job and the
search of `tared plan` choose their plans by it, and both describe the groups in the evidence by `describe_groups`.

The prediction only decides where blocks are cut, and shares out the noise of a block that is not split. It does not
suffice alone: predicted from histograms, which do not see the channels of a tensor, half of yolox_nano's noise is in 37
of its 109 groups, and leaving these float hardly helps. Measured, one group makes 88 % of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto

from calibrate.partition import FLOAT
from calibrate.sensitivity import Block, measure_blocks, share_out
from engines.interface import Progress
from engines.quantise.fusion import Grouping, node_macs

FRAMES_PER_RUN = 8
_RUNS = 48  # runs of the network: three times the number of blocks at first

Flags = NDArray[np.bool_]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class GroupNoise:
    """The noise of n groups.

    predicted: (n,), >= 0, in any unit; 0 for groups that are float in every plan.
    blocks: the measurements; each group is in at most one of them.
    """

    predicted: Floats
    blocks: Sequence[Block]

    @property
    def shares(self) -> Floats:
        """The part that each group adds to the divergence of the answers while it is INT8, (n,)."""
        return share_out(self.predicted, self.blocks)


def measure_noise(
    fixed: NDArray[np.int8], predicted: Floats, diverge: Callable[[Flags], float | None], progress: Progress
) -> GroupNoise:
    """Measure the groups that may be INT8.

    Args:
        fixed: (n,), as `agent.planning.costs.labels` returns it; groups that are FLOAT are not measured.
        predicted: Noise of each group, (n,), >= 0.
        diverge: Returns the divergence of the network in which only these groups (n,) are INT8, on FRAMES_PER_RUN
            frames. None ends the measurement.
    """
    free, runs = np.flatnonzero(fixed != FLOAT), 0

    def measure(members: Sequence[int]) -> float | None:
        nonlocal runs
        progress(min(1.0, runs / _RUNS), "finding the groups that make the noise")
        runs += 1
        int8 = np.zeros(len(fixed), np.bool_)
        int8[free[list(members)]] = True
        return diverge(int8)

    blocks = [
        Block(tuple(free[list(block.members)].tolist()), block.divergence)
        for block in measure_blocks(predicted[free], measure, _RUNS)
    ]
    return GroupNoise(np.where(fixed == FLOAT, 0.0, predicted), blocks)


def describe_groups(master: ModelProto, grouping: Grouping, noise: GroupNoise | None) -> list[dict[str, Any]]:
    """Return what the evidence of every plan says of each group, in JSON's types. noise: None where none was measured.

    macs_share: share of the network's multiply-accumulates. sensitivity: what the group adds to the divergence.
    measured: whether that was measured for this group alone.
    """
    macs = max(sum(node_macs(master).values()), 1)
    shares = noise.shares.tolist() if noise is not None else [0.0] * len(grouping.groups)
    alone = {block.members for block in noise.blocks} if noise is not None else set()
    return [
        {
            "name": group.name,
            "layers": list(group.layers),
            "macs_share": group.macs / macs,
            "sensitivity": share,
            "measured": (index,) in alone,
        }
        for index, (group, share) in enumerate(zip(grouping.groups, shares, strict=True))
    ]
