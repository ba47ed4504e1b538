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
    """Blocks in order after at most `runs` measurements; each group is in exactly one.

    predicted: noise (n,) >= 0. measure: the divergence, finite and >= 0, of a network in which only these groups are
    INT8; None ends the search, and groups that were not measured by then are in no block.
    """
    blocks: list[Block] = []
    for members in _cut(predicted, tuple(range(len(predicted))), min(_BLOCKS, runs)):
        divergence = measure(members)
        if divergence is None:
            return blocks
        blocks.append(Block(members, divergence))
    for _ in range((runs - len(blocks)) // 2):
        loud = max((block for block in blocks if len(block.members) > 1), key=lambda b: b.divergence, default=None)
        if loud is None or loud.divergence <= _QUIET * sum(block.divergence for block in blocks):
            break
        halves: list[Block] = []
        for half in _cut(predicted, loud.members, 2):
            divergence = measure(half)
            if divergence is None:
                return sorted(blocks, key=lambda block: block.members)
            halves.append(Block(half, divergence))
        blocks.remove(loud)
        blocks.extend(halves)
    return sorted(blocks, key=lambda block: block.members)


def share_out(predicted: Floats, blocks: Sequence[Block]) -> Floats:
    """The divergence of every group (n,): a block's is shared among its members as predicted, evenly if nothing was.

    Groups that are in no block are given what the others have per predicted noise; all that was predicted where nothing
    was measured.
    """
    measured = [index for block in blocks for index in block.members]
    noise = float(predicted[measured].sum())
    shares: Floats = predicted * (sum(block.divergence for block in blocks) / noise if noise > 0.0 else 1.0)
    for block in blocks:
        members = list(block.members)
        within = float(predicted[members].sum())
        parts = predicted[members] / within if within > 0.0 else np.full(len(members), 1.0 / len(members))
        shares[members] = block.divergence * parts
    return shares


def _cut(predicted: Floats, members: tuple[int, ...], parts: int) -> list[tuple[int, ...]]:
    """Consecutive parts of about equal predicted noise, none empty; fewer where there are fewer members."""
    parts = min(parts, len(members))
    if parts < 1:
        return []
    even = 1e-9 * max(float(predicted.max()), 1e-30)  # so that groups of no noise are spread too
    noise = np.cumsum(predicted[list(members)] + even)
    bounds = [0]
    for part in range(1, parts):
        wanted = int(np.searchsorted(noise, noise[-1] * part / parts)) + 1
        bounds.append(min(max(wanted, bounds[-1] + 1), len(members) - (parts - part)))
    return [members[a:b] for a, b in zip(bounds, [*bounds[1:], len(members)], strict=True)]
