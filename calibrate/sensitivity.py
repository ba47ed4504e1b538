"""Which fusion groups make the noise, found by measuring few of them alone.

Noises of different groups are independent, so what several INT8 groups do to the output together is the sum of what
each does. So groups are measured in blocks, and only the loud blocks are split further: group testing (Dorfman, "The
Detection of Defective Members of Large Populations", 1943). In a block that is not split, the predicted noise says who
made how much of what was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_BLOCKS = 16  # at first
_QUIET = 0.01  # of all noise: a block of no more is not worth splitting


@dataclass(frozen=True)
class Block:
    """Groups, by index, and the divergence when these alone are INT8."""

    members: tuple[int, ...]
    divergence: float


def measure_blocks(predicted: Floats, measure: Callable[[Sequence[int]], float | None], runs: int) -> list[Block]:
    """Blocks that cover all groups, in order, after at most `runs` measurements.

    predicted: noise (n,) >= 0. measure: the divergence of a network in which only these groups are INT8; None ends the
    search. Groups that were never measured come as a block of divergence 0.
    """
    blocks: list[Block] = []
    unmeasured: list[int] = []
    for members in _cut(predicted, tuple(range(len(predicted))), min(_BLOCKS, runs)):
        divergence = measure(members) if not unmeasured else None
        if divergence is None:
            unmeasured.extend(members)
        else:
            blocks.append(Block(members, divergence))
    left = runs - len(blocks)
    while not unmeasured and left >= 2:
        loud = max((block for block in blocks if len(block.members) > 1), key=lambda b: b.divergence, default=None)
        if loud is None or loud.divergence <= _QUIET * sum(block.divergence for block in blocks):
            break
        halves = [(half, measure(half)) for half in _cut(predicted, loud.members, 2)]
        if any(divergence is None for _, divergence in halves):
            break
        blocks.remove(loud)
        blocks.extend(Block(members, divergence or 0.0) for members, divergence in halves)
        left -= 2
    return sorted([*blocks, *([Block(tuple(unmeasured), 0.0)] if unmeasured else [])], key=lambda b: b.members)


def share_out(predicted: Floats, blocks: Sequence[Block]) -> Floats:
    """The divergence of every group (n,): a block's is shared among its members as predicted.

    Blocks that were not measured are given what the measured ones have per predicted noise.
    """
    shares = np.zeros_like(predicted)
    known = [block for block in blocks if block.divergence > 0.0]
    noise = sum(float(predicted[list(block.members)].sum()) for block in known)
    per_noise = sum(block.divergence for block in known) / noise if noise > 0.0 else 1.0
    for block in blocks:
        members = list(block.members)
        within = predicted[members].sum()
        if block.divergence > 0.0 and within > 0.0:
            shares[members] = block.divergence * predicted[members] / within
        elif block.divergence > 0.0:
            shares[members] = block.divergence / len(members)
        elif len(members) > 1:
            shares[members] = per_noise * predicted[members]
    return shares


def _cut(predicted: Floats, members: tuple[int, ...], parts: int) -> list[tuple[int, ...]]:
    """Consecutive parts of about equal predicted noise, none empty; fewer where there are fewer members."""
    parts = min(parts, len(members))
    noise = np.cumsum(predicted[list(members)] + 1e-12 * max(predicted.sum(), 1e-30))
    bounds = [0]
    for part in range(1, parts):
        wanted = int(np.searchsorted(noise, noise[-1] * part / parts)) + 1
        bounds.append(min(max(wanted, bounds[-1] + 1), len(members) - (parts - part)))
    return [members[a:b] for a, b in zip(bounds, [*bounds[1:], len(members)], strict=True) if b > a]
