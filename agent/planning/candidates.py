"""From measured groups to a few candidates: plans along the frontier of time and noise, tried on the search frames."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agent.planning.what_if import Answer
from calibrate.cut import Partition

_HARDLY = 0.25  # of the accepted loss
_STEPS = 10  # of half the noise each


@dataclass(frozen=True)
class Candidate:
    """A plan worth building: which groups are INT8, and what it did on the search frames."""

    partition: Partition
    answer: Answer

    def as_dict(self) -> dict[str, Any]:
        """In JSON's types."""
        plan = self.partition
        return {"int8": plan.int8.tolist(), "time": plan.time, "noise": plan.noise, "answer": asdict(self.answer)}

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Candidate:
        """What `as_dict` gave."""
        return cls(Partition(np.array(row["int8"], np.bool_), row["time"], row["noise"]), Answer(**row["answer"]))


def ladder(frontier: Sequence[Partition], tolerance: float) -> list[Partition]:
    """Plans of ever less noise, fastest first: at each step the quietest of those that are as fast as any.

    frontier: fastest first, quietest last. tolerance: relative difference in time below which plans are as fast.
    """
    rungs: list[Partition] = []
    plans = [plan for plan in frontier if plan.int8.any()]
    while plans and len(rungs) < _STEPS:
        as_fast = (1.0 + tolerance) * plans[0].time
        rungs.append(min((plan for plan in plans if plan.time <= as_fast), key=lambda plan: plan.noise))
        plans = [plan for plan in plans if 2.0 * plan.noise <= rungs[-1].noise and plan.noise < rungs[-1].noise]
    return rungs


def choose_candidates(
    plans: Sequence[Partition],
    ask: Callable[[NDArray[np.bool_]], Answer],
    max_loss: float,
    most: int,
    fastest: Partition | None = None,
) -> tuple[list[Candidate], list[Candidate]]:
    """Try plans on the search frames, fastest first; those to be certified, at most `most`, and all that were tried.

    A plan that loses more than max_loss there already is left out. Where the frames show nothing, none is. fastest: the
    plan whose time others come near; it goes before them where it is so quiet that there is hardly a loss to win back.
    """
    tried: list[Candidate] = []
    promising: list[Candidate] = []
    first = [] if fastest is None or any(plan is fastest for plan in plans) else [fastest]
    for plan in (*first, *plans):
        if len(promising) == most:
            break
        candidate = Candidate(plan, ask(plan.int8))
        tried.append(candidate)
        if candidate.answer.loss <= (_HARDLY * max_loss if plan is fastest and first else max_loss):
            promising.append(candidate)
    return promising, tried
