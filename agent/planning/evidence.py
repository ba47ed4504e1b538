"""Hold what a search finds, and return it as the evidence of its plan, in JSON's types.

A job and `tared plan` write the same evidence, which agent/reports/plan.py shows. `tared plan` adds what its trials
have shown, and what training could win.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agent.models.model import Model
from agent.planning.certificate import TrialResult, worst_of
from agent.planning.costs import GroupCosts, as_problem
from agent.planning.group_noise import GroupNoise, describe_groups
from agent.planning.what_if import RepairChoice
from calibrate.partition import Partition
from calibrate.plan import PrecisionPlan
from engines.quantise.costs import macs_costs
from engines.quantise.fusion import Grouping

SCHEMA, READABLE = 4, (3, 4)  # versions of the evidence: what is written, and what can be shown
JOB, COMMAND = "job", "tared plan"  # by whom a plan was found
_NOISIEST = 5

Flags = NDArray[np.bool_]
Floats = NDArray[np.float64]


@dataclass
class Tried:
    """One plan: what it loses on the frames that try plans, and the share of multiply-accumulates that it has in INT8.

    offered: whether an engine of it was to be built. outcome: of that, in words. is_too_loud: it lost too much.
    trials: by source, where it was certified or refused.
    """

    name: str
    plan: PrecisionPlan
    loss: float
    int8_macs_share: float
    offered: bool = False
    outcome: str = ""
    is_too_loud: bool = False
    trials: Mapping[str, TrialResult] = field(default_factory=dict)

    @property
    def trial(self) -> TrialResult | None:
        """The outcome in its worst source; None where it was not tried for a certificate."""
        return worst_of(self.trials) if self.trials else None

    @property
    def is_accepted(self) -> bool:
        """True if it was certified."""
        return self.trial is not None and self.trial.accepted


@dataclass
class Findings:
    """What one search has found so far; what there was no time or need for is absent.

    grouping: of the graph under the repairs. fixed: (groups,), as `agent.planning.costs.labels` returns it.
    measured: what the groups add to the divergence. tried: in the order of the trials.
    """

    model: Model
    grouping: Grouping
    fixed: NDArray[np.int8]
    choice: RepairChoice | None = None
    found_costs: GroupCosts | None = None
    measured: GroupNoise | None = None
    tried: list[Tried] = field(default_factory=list)

    @property
    def nsr(self) -> Floats:
        """The noise to signal of each group's layers in the sum, (groups,), as the repairs predict it; else zeros."""
        nsr = self.choice.nsr if self.choice is not None else {}
        return np.array([sum(nsr.get(layer, 0.0) for layer in group.layers) for group in self.grouping.groups])

    @property
    def noise(self) -> Floats:
        """The part that each group adds to the divergence while it is INT8, (groups,); else the predicted noise."""
        return self.measured.shares if self.measured is not None else self.nsr

    @property
    def costs(self) -> GroupCosts:
        """The costs of the groups; by multiply-accumulates where the search did not come to look for any."""
        return self.found_costs or GroupCosts(macs_costs(self.grouping), "no other costs were needed")

    @property
    def is_sensed(self) -> bool:
        """True if noise was measured at all."""
        return self.measured is not None and bool(self.measured.blocks)

    def int8(self, plan: PrecisionPlan) -> Flags:
        """Return which groups a plan has in INT8, (groups,)."""
        return np.array([
            not group.fixed and not any(layer in plan.floats for layer in group.layers)
            for group in self.grouping.groups
        ], np.bool_)  # fmt: skip

    def partition(self, plan: PrecisionPlan) -> Partition:
        """Return a plan with its predicted time and noise."""
        int8, problem = self.int8(plan), as_problem(self.grouping, self.costs.costs, self.noise, self.fixed)
        return Partition(int8, problem.time(int8), problem.noise_of(int8))

    def gain(self, index: int) -> str:
        """Return in words what INT8 saves in a group, and the noise that it makes."""
        costs, measured = self.costs.costs, not self.costs.why
        noise = float(self.noise[index]) / max(float(self.noise.sum()), 1e-30)
        saved = float(costs.float_ms[index] - costs.int8_ms[index]) / max(float(costs.float_ms.sum()), 1e-30)
        gain = f"saves {100.0 * saved:.3g} %" if saved >= 0.0 else f"takes {-100.0 * saved:.3g} % more"
        estimated = ", estimated within the noise," if measured and costs.by_macs[index] else ""
        of_what = f"{'time' if measured else 'cost'}{estimated}"
        return f"INT8 {gain} of the {of_what} and makes {100.0 * noise:.3g} % of the noise"

    def evidence(self, plan: PrecisionPlan, chosen: Tried | None = None) -> dict[str, Any]:
        """Return the evidence of a plan, in JSON's types. chosen: the certified plan."""
        repairs = {name: dict(row) for name, row in self.choice.tried.items()} if self.choice is not None else {}
        boundaries = self.costs.costs.boundary_ms.tolist()
        return {
            "schema": SCHEMA,
            "model": self.model.sha256,
            "model_name": self.model.spec.path.name,
            "costs": self._costs(),
            "repairs_tried": repairs,
            "sensed": self.is_sensed,
            "groups": self._groups(plan),
            "edges": [[i, j, ms] for (i, j, _), ms in zip(self.grouping.edges, boundaries, strict=True)],
            "candidates": [self._candidate(each) for each in self.tried],
            "chosen": self.tried.index(chosen) if chosen is not None else None,
        }

    def _costs(self) -> dict[str, Any]:
        found, costs = self.costs, self.costs.costs
        kind = ("macs", "MACs", "") if found.why else ("measured", "ms", costs.doubt)
        return {
            **dict(zip(("source", "unit", "doubt"), kind, strict=True)),
            **{"why": found.why, "noise": costs.noise, "builds": costs.builds, "passes": costs.passes},
            **{"fixed": costs.fixed_ms, "on": found.on, "kept": found.kept},
        }

    def _groups(self, plan: PrecisionPlan) -> list[dict[str, Any]]:
        costs, int8, nsr, rules = self.costs.costs, self.int8(plan), self.nsr.tolist(), self.model.rules
        notes = self.choice.notes if self.choice is not None else {}
        rows = describe_groups(self.model.master, self.grouping, self.measured)
        for index, (row, group) in enumerate(zip(rows, self.grouping.groups, strict=True)):
            floats, *ruled = (
                [reasons[layer] for layer in group.layers if layer in reasons]
                for reasons in (plan.floats, rules.floats, rules.int8)
            )
            row |= {
                "sensitivity": float(self.noise[index]),
                "precision": "int8" if int8[index] else "float",
                "why": group.fixed or [*floats, *ruled[1], self.gain(index)][0],
                "time_int8": float(costs.int8_ms[index]),
                "time_float": float(costs.float_ms[index]),
                "timed": not self.costs.why and not costs.by_macs[index],
                "nsr_db": 10.0 * float(np.log10(nsr[index])) if nsr[index] > 0.0 else None,
                "repairs": sorted({note for layer in group.layers for note in notes.get(layer, ())}),
                "rule": [*ruled[0], *ruled[1], ""][0],
            }
        return rows

    def _candidate(self, tried: Tried) -> dict[str, Any]:
        partition, trial = self.partition(tried.plan), tried.trial
        by_source = {source: _trial(one) for source, one in tried.trials.items()}
        return {
            "plan": tried.name,
            "time": partition.time + self.costs.costs.fixed_ms,
            "noise": partition.noise,
            "int8_macs_share": round(tried.int8_macs_share, 4),
            "predicted_loss": round(tried.loss, 4),
            "floats": int((~partition.int8).sum()),
            "offered": tried.offered,
            "outcome": tried.outcome,
            "trial": {**_trial(trial), "by_source": by_source} if trial is not None else None,
        }


def _trial(trial: TrialResult) -> dict[str, Any]:
    document = {**asdict(trial), "confused": list(map(asdict, trial.confused))}
    return document if trial.ious else {key: value for key, value in document.items() if key != "ious"}


def retraining(found: Findings, chosen: Tried | None, plan: PrecisionPlan, float_loss: float | None) -> Any:
    """Return what Q/DQ-aware training could win, in JSON's types; None where no plan was tried.

    Args:
        chosen: The certified plan, if there is one.
        plan: The plan that is written.
        float_loss: Of all float; None if it was not measured.

    Keys of the result:
        loss      of the chosen plan, on the certificate's frames; null if it was not measured
        noisiest  the groups that make most of its noise, with their shares of it
        target    a faster plan, or null if the search knows none: `names` and `layers` of the groups that it has in
                  INT8 and the chosen plan in float, their `macs_share`; `time_ratio` of the two plans, `time_ms` and
                  `plan_time_ms` as predicted, null if no time was measured; `loss` and `plan_loss` on the search
                  frames, and `to_win`, the fidelity that training has to win there
    """
    if not found.tried:
        return None
    kept = np.where(found.int8(plan), found.noise, 0.0)
    loudest = [index for index in np.argsort(-kept, kind="stable").tolist() if kept[index] > 0.0][:_NOISIEST]
    names = [group.name for group in found.grouping.groups]
    return {
        "loss": chosen.trial.loss if chosen is not None and chosen.trial is not None else float_loss,
        "noisiest": [{"name": names[index], "noise_share": float(kept[index] / kept.sum())} for index in loudest],
        "target": _target(found, plan, chosen.loss if chosen is not None else float_loss),
    }


def _target(found: Findings, plan: PrecisionPlan, plan_loss: float | None) -> dict[str, Any] | None:
    """Return the fastest plan that was tried, if it is faster than the chosen one by more than the times' spread."""
    costs = found.costs
    target = min(found.tried, key=lambda tried: found.partition(tried.plan).time)
    time, plan_time = (costs.costs.fixed_ms + found.partition(each).time for each in (target.plan, plan))
    gained = np.flatnonzero(found.int8(target.plan) & ~found.int8(plan)).tolist()
    is_slow = target.trial is not None and not target.trial.is_faster  # whatever was predicted
    if not gained or (1.0 + costs.tolerance) * time >= plan_time or is_slow:
        return None
    gained.sort(key=lambda index: -found.noise[index])
    rows, is_timed = describe_groups(found.model.master, found.grouping, found.measured), not costs.why
    return {
        "names": [rows[index]["name"] for index in gained],
        "layers": [layer for index in gained for layer in rows[index]["layers"]],
        "macs_share": sum(rows[index]["macs_share"] for index in gained),
        "time_ratio": time / plan_time,
        "time_ms": time if is_timed else None,
        "plan_time_ms": plan_time if is_timed else None,
        "loss": target.loss,
        "plan_loss": plan_loss,
        "to_win": max(0.0, target.loss - plan_loss) if plan_loss is not None else None,
    }
