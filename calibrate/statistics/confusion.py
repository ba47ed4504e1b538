"""Find the pairs of classes that a candidate confuses more often than a tolerance, which a small mean loss would hide.

If a 6 is read as an 8 in four frames of a hundred, the mean fidelity is 0.96, but 40 % of the sixes are lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Pair:
    """Report that the candidate answered one class where the reference answered another.

    Args:
        reference: Class of the reference.
        candidate: Class of the candidate.
        count: Number of answers of this pair.
        total: Number of the reference's answers of its class.
        low: Lower confidence bound of the rate that count / total estimates.

    >>> pair = Pair(reference=6, candidate=8, count=40, total=100, low=0.27)
    >>> pair.count / pair.total
    0.4
    """

    reference: int
    candidate: int
    count: int
    total: int
    low: float


def confused_pairs(
    counts: Mapping[tuple[int, int], int], totals: Mapping[int, int], tolerance: float, error: float = 0.05
) -> tuple[Pair, ...]:
    """Return the pairs of different classes whose rate is above `tolerance`, the highest lower bound first.

    Args:
        counts: (reference, candidate) -> how often, the two different. At most one answer counts against each of the
            reference's, so that the counts of a class sum to its total at most.
        totals: reference -> how often the reference gave this answer.
        tolerance: The rate up to which a confusion is accepted, in (0, 1).
        error: Probability that a pair is returned whose rate is not above its `low`, in (0, 1/2).

    With a probability of 1 - `error` all pairs returned have a rate above their `low`, and so above `tolerance`. A
    caller who acts on a `low` above a higher limit has the same promise for that limit. The promise holds for a single
    call, and for answers that are independent of each other: count objects that come and go together as one.

    Raises ValueError for a tolerance outside (0, 1), and an error outside (0, 1/2).

    >>> [(pair.reference, pair.candidate, round(pair.low, 2)) for pair in confused_pairs({(6, 8): 40}, {6: 100}, 0.05)]
    [(6, 8, 0.27)]

    `low` is the exact bound of Clopper and Pearson (Biometrika, 1934) at error * tolerance / classes, over the classes
    that the reference saw. This splits `error` over all candidate classes, however many there are. The rates p of one
    class sum to 1 at most, and a pair of rate p is returned with a `low` above p with a chance of at most p / tolerance
    times the bound's error: beyond the tolerance because that factor is above 1; up to it because the chance of k or
    more of n is 0 at p = 0 and convex up to (k - 1) / (n - 1). That is not below the tolerance for any k returned: the
    chance of such a k would be tolerance / 2 at least.
    """
    if not 0.0 < tolerance < 1.0:
        raise ValueError(f"tolerance must lie in (0, 1), got {tolerance}")
    if not 0.0 < error < 0.5:
        raise ValueError(f"error must lie in (0, 0.5), got {error}")
    seen = sum(total > 0 for total in totals.values())
    pairs = []
    for (reference, candidate), count in counts.items():
        if count == 0:
            continue
        total = totals[reference]
        if count <= tolerance * total:  # a lower bound is below the observed rate
            continue
        low = _lower_bound(count, total, error * tolerance / seen)
        if low > tolerance:
            pairs.append(Pair(int(reference), int(candidate), int(count), int(total), low))
    return tuple(sorted(pairs, key=lambda pair: (-pair.low, pair.reference, pair.candidate)))


def _lower_bound(count: int, total: int, error: float) -> float:
    """Return the bound of Clopper and Pearson, for a count above 0."""
    # Imported here: it takes 12 MiB of a board's memory, and most daemons never suspect a candidate.
    from scipy.special import betaincinv

    return float(betaincinv(count, total - count + 1, error))
