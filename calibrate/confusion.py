"""Which classes a candidate confuses: pairs whose rate is above a tolerance, where a small mean loss would hide them.

A 6 that is read as an 8 in four frames of a hundred leaves a mean fidelity of 0.96, and loses 40 % of the sixes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Pair:
    """The reference says `reference` `of` times, and `count` times of these the candidate says `candidate`.

    low: lower confidence bound of the rate that count / of estimates.
    """

    reference: int
    candidate: int
    count: int
    of: int
    low: float


def confused_pairs(
    counts: Mapping[tuple[int, int], int], totals: Mapping[int, int], tolerance: float, error: float = 0.05
) -> tuple[Pair, ...]:
    """The pairs of different classes whose rate is above `tolerance`, the highest lower bound first.

    counts: (reference, candidate) -> how often, the two different; totals: reference -> how often. At most one answer
    counts against each of the reference's, so that the counts of a class sum to its total at most. With a probability
    of 1 - `error` all pairs returned have a rate above their `low`, and so above `tolerance`; a caller who acts on a
    `low` above a higher limit of his own has the same promise for that limit. It is for one look at the counts, and
    for answers that are independent of each other: objects that come and go together are to be counted as one.

    `low` is the exact bound of Clopper and Pearson (Biometrika, 1934) at error * tolerance / classes, over the classes
    that the reference saw. This splits `error` over all candidate classes, however many there are. The rates p of one
    class sum to 1 at most, and a pair of rate p is returned with a `low` above p with a chance of at most p / tolerance
    times the bound's error: beyond the tolerance because that factor is above 1; up to it because the chance of k or
    more of n is 0 at p = 0 and convex up to (k - 1) / (n - 1). That is not below the tolerance for any k returned: the
    chance of such a k would be tolerance / 2 at least.

    Raises ValueError for a tolerance outside (0, 1), an error outside (0, 1/2), a class paired with itself, a negative
    count, and counts beyond their total.
    """
    if not 0.0 < tolerance < 1.0:
        raise ValueError(f"tolerance must lie in (0, 1), got {tolerance}")
    if not 0.0 < error < 0.5:
        raise ValueError(f"error must lie in (0, 0.5), got {error}")
    _check(counts, totals)
    seen = sum(total > 0 for total in totals.values())
    pairs = []
    for (reference, candidate), count in counts.items():
        if count == 0:
            continue
        of = totals[reference]
        if count <= tolerance * of:  # a lower bound is below what it bounds
            continue
        low = _lower_bound(count, of, error * tolerance / seen)
        if low > tolerance:
            pairs.append(Pair(int(reference), int(candidate), int(count), int(of), low))
    return tuple(sorted(pairs, key=lambda pair: (-pair.low, pair.reference, pair.candidate)))


def _lower_bound(count: int, of: int, error: float) -> float:
    """Of Clopper and Pearson, for a count above 0."""
    # 12 MiB of a board's memory: a daemon loads them when a candidate is suspected, most never.
    from scipy.special import betaincinv

    return float(betaincinv(count, of - count + 1, error))


def _check(counts: Mapping[tuple[int, int], int], totals: Mapping[int, int]) -> None:
    answered: Counter[int] = Counter()
    for (reference, candidate), count in counts.items():
        if reference == candidate:
            raise ValueError(f"class {reference} is not confused with itself")
        if count < 0:
            raise ValueError(f"a count is not negative, got {count} for {reference} as {candidate}")
        answered[reference] += count
    for reference, answers in answered.items():
        if answers > totals.get(reference, 0):
            raise ValueError(f"class {reference} has {answers} confusions of {totals.get(reference, 0)}")
