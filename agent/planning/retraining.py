"""Say what training could win: the loss that the best plan keeps, and the time of a faster plan that loses too much.

Everything comes from what the search measured or predicted: its plans, their losses on the search frames, the noise of
the groups, and the trials. Q/DQ-aware training changes weights, so that INT8 rounds them with less effect.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agent.planning.search import Candidate, SearchResult

_NOISIEST = 5


def retraining(
    result: SearchResult, described: Sequence[Mapping[str, Any]], is_int8: NDArray[np.bool_], float_loss: float | None
) -> dict[str, Any] | None:
    """Return what training could win, in JSON's types; None where no plan was tried.

    Args:
        described: The groups, as `describe_groups` returns them.
        is_int8: Which groups the chosen plan has in INT8, (groups,).
        float_loss: Of all float; None if it was not measured.

    Keys of the result:
        loss      of the chosen plan, on the certificate's frames; null if it was not measured
        noisiest  the groups that make most of its noise, with their shares of it
        target    a faster plan, or null if the search knows none: `names` and `layers` of the groups that it has in
                  INT8 and the chosen plan in float, their `macs_share`; `time_ratio` of the two plans, `time_ms` and
                  `plan_time_ms` as predicted, null if no time was measured; `loss` and `plan_loss` on the search
                  frames, and `to_win`, the fidelity that training has to win there
    """
    if result.costs is None or not result.tried:
        return None
    chosen = result.candidates[result.accepted] if result.accepted is not None else None
    kept = np.where(is_int8, result.noise, 0.0)
    loudest = [index for index in np.argsort(-kept, kind="stable").tolist() if kept[index] > 0.0][:_NOISIEST]
    return {
        "loss": result.trials[result.accepted].loss if result.accepted is not None else float_loss,
        "noisiest": [
            {"name": described[index]["name"], "noise_share": float(kept[index] / kept.sum())} for index in loudest
        ],
        "target": _target(result, described, is_int8, chosen, float_loss),
    }


def _target(
    result: SearchResult,
    described: Sequence[Mapping[str, Any]],
    is_int8: NDArray[np.bool_],
    chosen: Candidate | None,
    float_loss: float | None,
) -> dict[str, Any] | None:
    """Return the fastest plan that was tried, if it is faster than the chosen one by more than the times' spread."""
    assert result.costs is not None
    costs, fixed_ms = result.costs.costs, result.costs.costs.fixed_ms
    target = min(result.tried, key=lambda candidate: candidate.partition.time)
    plan_time = fixed_ms + (chosen.partition.time if chosen is not None else float(costs.float_ms.sum()))
    time = fixed_ms + target.partition.time
    gained = np.flatnonzero(target.partition.int8 & ~is_int8).tolist()
    if not gained or (1.0 + result.costs.tolerance) * time >= plan_time or _is_slow(result, target):
        return None
    gained.sort(key=lambda index: -result.noise[index])
    plan_loss = chosen.answer.loss if chosen is not None else float_loss
    is_timed = not result.costs.why
    return {
        "names": [described[index]["name"] for index in gained],
        "layers": [layer for index in gained for layer in described[index]["layers"]],
        "macs_share": sum(described[index]["macs_share"] for index in gained),
        "time_ratio": time / plan_time,
        "time_ms": time if is_timed else None,
        "plan_time_ms": plan_time if is_timed else None,
        "loss": target.answer.loss,
        "plan_loss": plan_loss,
        "to_win": max(0.0, target.answer.loss - plan_loss) if plan_loss is not None else None,
    }


def _is_slow(result: SearchResult, target: Candidate) -> bool:
    """Return whether a trial has shown that a plan is not faster than float, whatever was predicted."""
    trials = zip(result.candidates, result.trials, strict=False)  # candidates beyond the accepted one have no trial
    same = (trial for each, trial in trials if (each.partition.int8 == target.partition.int8).all())
    return any(not trial.is_faster for trial in same)
