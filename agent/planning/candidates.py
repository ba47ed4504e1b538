"""From measured groups to a few candidates: plans along the frontier of time and noise, tried on the search frames."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agent.planning.what_if import Answer
from calibrate.partition import Partition

_STEPS = 10  # of half the noise each


@dataclass(frozen=True)
class Candidate:
    """A plan worth building: which groups are INT8, and what it did on the search frames."""

    partition: Partition
    answer: Answer


def ladder(frontier: Sequence[Partition], tolerance: float) -> list[Partition]:
    """Plans of ever less noise, fastest first: at each step the quietest among those that are as fast as any.

    frontier: fastest first, quietest last. tolerance: relative difference in time below which plans are as fast.
    """
    chosen: list[Partition] = []
    limit = frontier[0].noise
    for _ in range(_STEPS):
        quiet = [plan for plan in frontier if plan.noise <= limit and plan.int8.any()]
        if not quiet:
            break
        as_fast = (1.0 + tolerance) * min(plan.time for plan in quiet)
        plan = min((plan for plan in quiet if plan.time <= as_fast), key=lambda plan: plan.noise)
        chosen.append(plan)
        if plan.noise == 0.0:
            break
        limit = plan.noise / 2.0
    return chosen


def choose_candidates(
    plans: Sequence[Partition],
    ask: Callable[[NDArray[np.bool_]], Answer],
    max_loss: float,
    most: int,
    out_of_time: Callable[[], bool],
) -> tuple[list[Candidate], list[Candidate]]:
    """Try plans on the search frames, fastest first; those to be certified, at most `most`, and all that were tried.

    A plan that loses more than max_loss there already is left out. Where the frames show nothing, none is.
    """
    tried: list[Candidate] = []
    promising: list[Candidate] = []
    for plan in plans:
        if len(promising) == most or out_of_time():
            break
        candidate = Candidate(plan, ask(plan.int8))
        tried.append(candidate)
        if candidate.answer.loss <= max_loss:
            promising.append(candidate)
    return promising, tried
