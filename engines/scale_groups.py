"""Which tensors share a scale, and which are observed for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ScaleGroup:
    """Tensors under one scale. All their values occur in the `taps`, which are the ones to observe."""

    tensors: tuple[str, ...]
    taps: tuple[str, ...]


def scale_groups(
    tensors: Iterable[str], sources: Mapping[str, tuple[str, ...]], order: Sequence[str]
) -> tuple[ScaleGroup, ...]:
    """Join tensors that have a source in common, directly or through others; each is in exactly one group.

    sources: per tensor that only holds values of others, those. order: all names, as groups are to be sorted.
    """
    groups: list[tuple[set[str], set[str]]] = []  # tensors, taps
    for tensor in tensors:
        members, taps = {tensor}, set(sources.get(tensor, (tensor,)))
        for joined in [group for group in groups if group[1] & taps]:
            groups.remove(joined)
            members |= joined[0]
            taps |= joined[1]
        groups.append((members, taps))
    position = {name: index for index, name in enumerate(order)}

    def ordered(names: set[str]) -> tuple[str, ...]:
        return tuple(sorted(names, key=position.__getitem__))

    result = [ScaleGroup(ordered(members), ordered(taps)) for members, taps in groups]
    return tuple(sorted(result, key=lambda group: position[group.taps[0]]))
