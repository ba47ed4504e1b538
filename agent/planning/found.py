"""What is asked of a search for a plan, and what it has found so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from agent.planning.candidates import Candidate
from agent.planning.costs import GroupCosts
from agent.planning.repairs import Chosen
from agent.planning.trial import Trial
from calibrate.cut import Partition
from calibrate.sensitivity import Block, share_out
from engines.fusion import Grouping


@dataclass(frozen=True)
class PlanOptions:
    """max_loss, max_confusion: see `agent.planning.trial.Terms`. budget_s: None for as long as it takes.

    costs: "measured", or "macs" to go by multiply-accumulates without measuring. seed: of the order of the frames.
    """

    max_loss: float = 0.02
    max_confusion: float = 0.1
    budget_s: float | None = None
    costs: str = "measured"
    seed: int = 0


@dataclass
class Found:
    """What a search has found so far; what it had no time for is not there.

    predicted: per group the noise to signal of its layers, in the sum. restored: by group, what it takes off the
    divergence to have this one float and all others INT8. tried: plans on the search frames; those of them worth a
    trial are `candidates`. trials: of the first candidates, in their order. interrupted: "budget" where that cut the
    search short.
    """

    grouping: Grouping
    chosen: Chosen | None = None
    predicted: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    blocks: Sequence[Block] = ()
    restored: dict[int, float] = field(default_factory=dict)
    costs: GroupCosts | None = None
    frontier: Sequence[Partition] = ()
    tried: Sequence[Candidate] = ()
    candidates: Sequence[Candidate] = ()
    trials: list[Trial] = field(default_factory=list)
    interrupted: str = ""

    @property
    def noise(self) -> NDArray[np.float64]:
        """What each group adds to the divergence while it is INT8, (groups,)."""
        return share_out(self.predicted, self.blocks)

    @property
    def accepted(self) -> int | None:
        """The index of the candidate that was certified."""
        return next((index for index, trial in enumerate(self.trials) if trial.accepted), None)
