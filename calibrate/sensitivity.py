"""Measure which groups of layers make the noise.

A network has hundreds of groups, and measuring each alone takes hundreds of runs. `measure_blocks` measures blocks of
groups instead, and splits the loudest; `share_out` divides each block's divergence among its groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_BLOCKS = 16  # blocks of the first round. More: each block is quieter, and fewer of `runs` are left for splitting.
_QUIET = 0.01  # share of all noise: a block of no more is not worth splitting


@dataclass(frozen=True)
class Block:
    """Hold some groups and the divergence of the network when these alone are INT8.

    Args:
        members: Indices of the groups, ascending.
        divergence: Finite and >= 0, in the unit of the measurement.

    >>> Block(members=(0, 1), divergence=0.02)
    Block(members=(0, 1), divergence=0.02)
    """

    members: tuple[int, ...]
    divergence: float


def measure_blocks(predicted: Floats, measure: Callable[[Sequence[int]], float | None], runs: int) -> list[Block]:
    """Measure blocks of groups, at most `runs` times, and split the loudest; return them in order.

    Args:
        predicted: Noise of each group, (n,), >= 0.
        measure: Returns the divergence, finite and >= 0, of a network in which only these groups are INT8. None ends
            the search, and groups that were not measured by then are in no block.
        runs: The most measurements.

    Each group that was measured is in exactly one block.

    >>> divergence = {0: 0.0, 1: 0.0, 2: 5.0, 3: 0.0}         # the third of four groups is loud
    >>> blocks = measure_blocks(np.ones(4), lambda groups: sum(divergence[group] for group in groups), runs=8)
    >>> [block for block in blocks if block.divergence]
    [Block(members=(2,), divergence=5.0)]
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
    """Return the divergence of every group, (n,).

    A block's divergence is shared among its members as predicted, evenly if nothing was predicted. Groups in no block
    get as much per predicted noise as the others have; if nothing was measured, they get the prediction itself.

    Args:
        predicted: Noise of each group, (n,), >= 0.
        blocks: Measured blocks, as `measure_blocks` returns them.

    >>> share_out(np.array([1.0, 3.0, 2.0]), [Block((0, 1), 8.0)])
    array([2., 6., 4.])
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
    """Cut into consecutive parts of about equal predicted noise, none empty; fewer if there are fewer members."""
    parts = min(parts, len(members))
    if parts < 1:
        return []
    even = 1e-9 * max(float(predicted.max()), 1e-30)  # so that groups of no noise are spread too
    noise = np.cumsum(predicted[list(members)] + even)
    bounds = [0]
    for part in range(1, parts):
        even_share = int(np.searchsorted(noise, noise[-1] * part / parts)) + 1
        bounds.append(min(max(even_share, bounds[-1] + 1), len(members) - (parts - part)))
    return [members[a:b] for a, b in zip(bounds, [*bounds[1:], len(members)], strict=True)]
