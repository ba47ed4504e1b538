"""Make the plan of a search: which layers stay float and why, the repairs, and the evidence.

The evidence is JSON in plan.json. report.py and chart.py show it to people, `summary` is what --json prints of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from agent.common.html.pages import show_share
from agent.planning.certificate import ERROR, Terms, TrialResult, worst_of
from agent.planning.group_noise import describe_groups
from agent.planning.report import SCHEMA
from agent.planning.retraining import retraining
from agent.planning.search import PlanSearch, SearchResult
from calibrate.partition import Partition
from calibrate.plan import PrecisionPlan, Repairs
from engines.quantise.fusion import int8_macs_share
from engines.quantise.placement import place
from engines.store.artefact import fingerprint

_NOT_CERTIFIED = "no plan with INT8 in it was certified"


def make_plan(search: PlanSearch) -> PrecisionPlan:
    """Return the certified plan, or the one in which all is float but what the owner forces into INT8.

    The caller adds to its evidence what it knows of the run.
    """
    evidence = _Evidence(search)
    floats = search.plan_of(evidence.chosen, dict(evidence.reasons()))
    repairs = search.builder.repairs if any(evidence.int8) else Repairs()
    plan = PrecisionPlan(floats, PrecisionPlan(floats, repairs).effective)
    model, builder = search.model, search.builder
    identity = {
        "schema": SCHEMA,
        "model": model.sha256,
        "model_name": model.spec.path.name,
        "spec_id": model.spec_id,
        "calibration": builder.calibration.id,
        "built_for": dict(builder.backend.describe()),
        "float_precision": builder.backend.precisions[-1],
        "plan": fingerprint(plan.essence),
        "int8_macs_share": int8_macs_share(model.master, place(model.master, plan)),
    }
    return replace(plan, evidence={**evidence.as_dict(), **identity})


def verdict(search: PlanSearch) -> str:
    """Return the result in one sentence or two, for people."""
    result = search.result
    if result.accepted is None:
        own = " but what the model itself has in INT8" if search.model.placement.own else ""
        forced = ", and what precision.force_int8 names, whose loss is not known" if search.rules.int8 else ""
        return f"All float{own}{forced}: {_why_not(search)}."
    trial = result.trials[result.accepted]
    times = f"{trial.latency_ms:.3g} ms against {trial.latency_float_ms:.3g} ms in float"
    speed = f"{times}." if trial.is_faster else f"INT8 is not faster on this machine, {times}: serve float here."
    scenes = [share.source for share in search.split.shares]
    each = " in each" if len(scenes) > 1 else ""
    outcome = f"a loss of at most {trial.upper:.3g}{each}, where {search.options.max_loss:g} is accepted. {speed}"
    if search.split.live:  # frames in the order of time are no sample of another stretch
        return f"Kept for the observed stretch of a live camera, and for no other: {outcome}"
    certified = f"Certified for the scenes of {', '.join(scenes)}" if len(scenes) > 1 else "Certified"
    return f"{certified}: {outcome}"


def _why_not(search: PlanSearch) -> str:
    result, options = search.result, search.options
    if result.interrupted and (not result.tried or len(result.trials) < len(result.candidates)):
        return "the time was up before a plan with INT8 in it was certified"
    if result.costs is None:
        reasons = dict.fromkeys(group.fixed or "precision.keep_float" for group in result.grouping.groups)
        return f"no layer may be INT8 ({'; '.join(reasons)})" if reasons else "there is no layer that could be INT8"
    if not result.tried:
        return "no plan with INT8 in it takes less time than float"
    if not result.candidates:
        least = min(candidate.answer.loss for candidate in result.tried)
        return (
            f"every plan with INT8 in it lost more than {options.max_loss:g} on the search frames already, "
            f"{least:.3g} at least"
        )
    return f"none of {len(result.trials)} plans was certified. The last: {result.trials[-1].reason}"


class _Evidence:
    """The evidence of one search."""

    def __init__(self, search: PlanSearch) -> None:
        result = search.result
        self.search = search
        self.result: SearchResult = result
        self.groups = result.grouping.groups
        self.rules = search.rules
        self.described = describe_groups(search.model.master, result.grouping, result.measured)
        self.shares = np.array([row["macs_share"] for row in self.described])
        self.chosen = np.zeros(len(self.groups), np.bool_)
        if result.accepted is not None:
            self.chosen = result.candidates[result.accepted].partition.int8
        floats = search.plan_of(self.chosen, "")
        self.int8 = [not group.fixed and not floats.keys() >= set(group.layers) for group in self.groups]

    def as_dict(self) -> dict[str, Any]:
        result, options = self.result, self.search.options
        trial = result.trials[result.accepted] if result.accepted is not None else None
        last = result.trials[-1] if result.trials else None
        terms = Terms(options.max_loss, options.max_confusion, max(1, len(result.candidates)), len(self.search.sources))
        float_loss = _float_loss(self.search.builder.backend.precisions[-1])
        return {
            "max_loss": options.max_loss,
            "max_confusion": options.max_confusion,
            "seed": options.seed,
            "costs": self._costs(),
            "repairs_tried": {name: dict(row) for name, row in result.chosen.tried.items()} if result.chosen else {},
            "groups": [self._group(index, why) for index, (_, why) in enumerate(self.reasons())],
            "edges": self._edges(),
            "frontier": self._frontier(),
            "candidates": self._candidates(),
            "retraining": retraining(result, self.described, np.array(self.int8, np.bool_), float_loss),
            "chosen": result.accepted,
            "verdict": verdict(self.search),
            "certificate": {"error_probability": ERROR, "frames_needed": terms.frames_needed},
            "latency_ms": trial.latency_ms if trial else (last.latency_float_ms if last else None),
            "latency_float_ms": last.latency_float_ms if last else None,
            "faster": trial is not None and trial.is_faster,
            "frame_counts": {
                "to_search": self.search.split.search if result.chosen else 0,
                "to_certify": sum(trial.frames for trial in result.by_source[-1].values()) if last else 0,
            },
            "sensed": result.measured is not None,
            "live": trial is not None and self.search.split.live,
            "builds": self.search.builder.builds,
            "interrupted": result.interrupted,
        }

    def reasons(self) -> Iterator[tuple[str, str]]:
        """Yield every group's name, and the reason for its precision."""
        without = self.search.builder.without_int8
        for index, group in enumerate(self.groups):
            missing_kernel = next((without[layer] for layer in group.layers if layer in without), "")
            yield group.name, group.fixed or self._rule(index) or missing_kernel or self._gain(index)

    def _rule(self, index: int) -> str:
        """Return the rule that decided a group; one that keeps it float goes before one that forces INT8."""
        layers = self.groups[index].layers
        reasons = [rules[layer] for rules in (self.rules.floats, self.rules.int8) for layer in layers if layer in rules]
        return reasons[0] if reasons else ""

    def _gain(self, index: int) -> str:
        """Return what INT8 saves in a free group, and the noise that it makes."""
        if self.result.accepted is None or self.result.costs is None:
            return _NOT_CERTIFIED
        costs = self.result.costs.costs
        saved = float(costs.float_ms[index] - costs.int8_ms[index]) / max(float(costs.float_ms.sum()), 1e-30)
        noise = float(self.result.noise[index]) / max(float(self.result.noise.sum()), 1e-30)
        measured = not self.result.costs.why
        estimated = ", estimated within the noise," if measured and costs.by_macs[index] else ""
        if saved <= 0.0 and not self.int8[index]:
            return f"INT8 is not {'measurably ' if estimated else ''}faster here"
        gain = f"saves {show_share(saved)}" if saved >= 0.0 else f"takes {show_share(-saved)} more"
        return (
            f"INT8 {gain} of the {'time' if measured else 'cost'}{estimated} and makes {show_share(noise)} of the noise"
        )

    def _costs(self) -> dict[str, Any]:
        costs = self.result.costs
        measured = costs is not None and not costs.why
        return {
            "source": "measured" if measured else "macs" if costs else "none",
            "why": costs.why if costs else "",
            "unit": "ms" if measured else "MACs",
            "noise": costs.costs.noise if costs else 0.0,
            "builds": costs.costs.builds if costs else 0,
            "passes": costs.costs.passes if costs else 0,
            "doubt": costs.costs.doubt if measured and costs else "",
            "fixed": costs.costs.fixed_ms if costs else 0.0,
        }

    def _group(self, index: int, why: str) -> dict[str, Any]:
        result, group = self.result, self.groups[index]
        nsr = float(result.measured.predicted[index]) if result.measured is not None else 0.0
        notes = result.chosen.notes if result.chosen else {}
        return {
            **self.described[index],
            "precision": "int8" if self.int8[index] else "float",
            "why": why,
            "time_int8": float(result.costs.costs.int8_ms[index]) if result.costs else 0.0,
            "time_float": float(result.costs.costs.float_ms[index]) if result.costs else 0.0,
            "timed": bool(result.costs and not result.costs.why and not result.costs.costs.by_macs[index]),
            "nsr_db": 10.0 * float(np.log10(nsr)) if nsr > 0.0 else None,
            "restored": result.restored.get(index),
            "repairs": sorted({note for layer in group.layers for note in notes.get(layer, ())}),
            "rule": self._rule(index),
        }

    def _edges(self) -> list[list[float]]:
        edges, costs = self.result.grouping.edges, self.result.costs
        times = costs.costs.boundary_ms.tolist() if costs else [0.0] * len(edges)
        return [[i, j, time] for (i, j, _), time in zip(edges, times, strict=True)]

    def _frontier(self) -> list[dict[str, Any]]:
        losses = {candidate.partition.int8.tobytes(): candidate.answer.loss for candidate in self.result.tried}
        return [{**self._plan(plan), "loss": losses.get(plan.int8.tobytes())} for plan in self.result.frontier]

    def _candidates(self) -> list[dict[str, Any]]:
        trials = [
            {**_trial(worst_of(by_source)), "by_source": {source: _trial(one) for source, one in by_source.items()}}
            for by_source in self.result.by_source
        ]
        return [
            {
                **self._plan(candidate.partition),
                "predicted_loss": candidate.answer.loss,
                "floats": int((~candidate.partition.int8).sum()),
                "trial": trials[index] if index < len(trials) else None,
            }
            for index, candidate in enumerate(self.result.candidates)
        ]

    def _plan(self, plan: Partition) -> dict[str, Any]:
        assert self.result.costs is not None
        return {
            "time": plan.time + self.result.costs.costs.fixed_ms,
            "noise": plan.noise,
            "int8_macs_share": float(self.shares[plan.int8].sum()),
        }


def _float_loss(precision: str) -> float | None:
    """Return the loss of all float: none in FP32, which is the reference itself; FP16 was not compared."""
    return 0.0 if precision == "fp32" else None


def _trial(trial: TrialResult) -> dict[str, Any]:
    document = {**asdict(trial), "confused": list(map(asdict, trial.confused))}
    return document if trial.ious else {key: value for key, value in document.items() if key != "ious"}


def summary(plan: PrecisionPlan) -> Mapping[str, Any]:
    """Return what `tared plan --json` prints of a plan with all its evidence."""
    evidence = plan.evidence
    accepted = evidence["candidates"][evidence["chosen"]] if evidence["chosen"] is not None else None
    trial = accepted["trial"] if accepted else None
    unmeasured = _float_loss(evidence["float_precision"])
    return {
        "int8_macs_share": round(evidence["int8_macs_share"], 4),
        "predicted_loss": accepted["predicted_loss"] if accepted else unmeasured,
        "measured_loss": trial["loss"] if trial else unmeasured,
        "measured_loss_upper": trial["upper"] if trial else unmeasured,
        "certified": accepted is not None and not evidence["live"],
        "latency_ms": evidence["latency_ms"],
        "latency_float_ms": evidence["latency_float_ms"],
        "faster": evidence["faster"],
        "builds": evidence["builds"],
        "costs": evidence["costs"],
        "retraining": evidence["retraining"],
    }
