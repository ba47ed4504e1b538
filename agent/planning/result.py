"""What a search found, as a plan: which layers stay float and why, its repairs, and the evidence for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from agent.planning.certificate import ERROR, Terms
from agent.planning.report import show_share
from agent.planning.search import PlanSearch, SearchResult
from calibrate.partition import Partition
from calibrate.plan import PrecisionPlan, Repairs
from engines.quantise.fusion import node_macs

_NOT_CERTIFIED = "no plan with INT8 in it was certified"


def planned(planner: PlanSearch) -> PrecisionPlan:
    """The certified plan, or the one in which all is float but what the owner forces into INT8.

    Its evidence is without what the caller knows of the run.
    """
    told = _Evidence(planner)
    floats = planner.plan_of(told.chosen, dict(told.reasons()))
    repairs = planner.builder.repairs if any(told.int8) else Repairs()
    return PrecisionPlan(floats, PrecisionPlan(floats, repairs).effective, told.as_dict())


def verdict(planner: PlanSearch) -> str:
    """The result in one sentence or two, for people."""
    found = planner.found
    if found.accepted is None:
        own = " but what the model itself has in INT8" if planner.model.placement.own else ""
        forced = ", and what precision.force_int8 names, whose loss nobody knows" if planner.rules.int8 else ""
        return f"All float{own}{forced}: {_why_not(planner)}."
    trial = found.trials[found.accepted]
    times = f"{trial.latency_ms:.3g} ms against {trial.latency_float_ms:.3g} ms in float"
    speed = f"{times}." if trial.is_faster else f"INT8 is not faster on this machine, {times}: serve float here."
    told = f"a loss of at most {trial.upper:.3g}, where {planner.options.max_loss:g} is accepted. {speed}"
    if planner.split.certificate is None:  # its frames came in the order of time, and are no sample of any other
        return f"Kept, on the stretch of a live camera that was seen and for no other: {told}"
    return f"Certified: {told}"


def _why_not(planner: PlanSearch) -> str:
    found, options = planner.found, planner.options
    if found.interrupted and (not found.tried or len(found.trials) < len(found.candidates)):
        return "the time was up before a plan with INT8 in it was certified"
    if found.costs is None:
        reasons = dict.fromkeys(group.fixed or "precision.keep_float" for group in found.grouping.groups)
        return f"no layer may be INT8 ({'; '.join(reasons)})" if reasons else "there is no layer that could be INT8"
    if not found.tried:
        return "no plan with INT8 in it takes less time than float"
    if not found.candidates:
        least = min(candidate.answer.loss for candidate in found.tried)
        return (
            f"every plan with INT8 in it lost more than {options.max_loss:g} on the search frames already, "
            f"{least:.3g} at least"
        )
    return f"none of {len(found.trials)} plans was certified. The last: {found.trials[-1].reason}"


class _Evidence:
    """All that a plan's evidence tells of the search."""

    def __init__(self, planner: PlanSearch) -> None:
        found = planner.found
        self.planner = planner
        self.found: SearchResult = found
        self.groups = found.grouping.groups
        self.rules = planner.rules
        macs = sum(node_macs(planner.model.master).values())
        self.shares = np.array([group.macs for group in self.groups], np.float64) / max(macs, 1)
        self.chosen = np.zeros(len(self.groups), np.bool_)
        if found.accepted is not None:
            self.chosen = found.candidates[found.accepted].partition.int8
        floats = planner.plan_of(self.chosen, "")
        self.int8 = [not group.fixed and not floats.keys() >= set(group.layers) for group in self.groups]

    def as_dict(self) -> dict[str, Any]:
        found, options = self.found, self.planner.options
        trial = found.trials[found.accepted] if found.accepted is not None else None
        last = found.trials[-1] if found.trials else None
        return {
            "max_loss": options.max_loss,
            "max_confusion": options.max_confusion,
            "seed": options.seed,
            "costs": self._costs(),
            "repairs": {name: dict(row) for name, row in found.chosen.tried.items()} if found.chosen else {},
            "groups": [self._group(index, why) for index, (_, why) in enumerate(self.reasons())],
            "edges": self._edges(),
            "frontier": self._frontier(),
            "candidates": self._candidates(),
            "accepted": found.accepted,
            "verdict": verdict(self.planner),
            "certificate": {
                "error": ERROR,
                "frames_needed": Terms(options.max_loss, options.max_confusion, max(1, len(found.candidates))).needed,
            },
            "latency_ms": trial.latency_ms if trial else (last.latency_float_ms if last else None),
            "latency_float_ms": last.latency_float_ms if last else None,
            "faster": trial is not None and trial.is_faster,
            "frames": {
                "search": self.planner.split.search if found.chosen else 0,
                "certificate": last.frames if last else 0,
            },
            "sensed": len(found.predicted) > 0,
            "live": trial is not None and self.planner.split.certificate is None,
            "builds": self.planner.builder.builds,
            "interrupted": found.interrupted,
        }

    def reasons(self) -> Iterator[tuple[str, str]]:
        """Every group by its name, and why it is what it is."""
        for index, group in enumerate(self.groups):
            yield group.name, group.fixed or self._rule(index) or self._lacking(index) or self._weighed(index)

    def _rule(self, index: int) -> str:
        """The rule that decided a group; one that keeps it float goes before one that forces it."""
        layers = self.groups[index].layers
        found = [rules[layer] for rules in (self.rules.floats, self.rules.int8) for layer in layers if layer in rules]
        return found[0] if found else ""

    def _lacking(self, index: int) -> str:
        without = self.planner.builder.without_int8
        return next((without[layer] for layer in self.groups[index].layers if layer in without), "")

    def _weighed(self, index: int) -> str:
        """Of a group that was free: what INT8 would bring, and what it would do."""
        if self.found.accepted is None or self.found.costs is None:
            return _NOT_CERTIFIED
        costs = self.found.costs.costs
        saved = float(costs.float_ms[index] - costs.int8_ms[index]) / max(float(costs.float_ms.sum()), 1e-30)
        noise = float(self.found.noise[index]) / max(float(self.found.noise.sum()), 1e-30)
        if saved <= 0.0 and not self.int8[index]:
            return "INT8 is not faster here"
        gain = f"saves {show_share(saved)}" if saved >= 0.0 else f"takes {show_share(-saved)} more"
        what = "cost" if self.found.costs.why else "time"
        return f"INT8 {gain} of the {what} and makes {show_share(noise)} of the noise"

    def _costs(self) -> dict[str, Any]:
        found = self.found.costs
        measured = found is not None and not found.why
        return {
            "source": "measured" if measured else "macs" if found else "none",
            "why": found.why if found else "",
            "unit": "ms" if measured else "MACs",
            "noise": found.costs.noise if found else 0.0,
            "builds": found.costs.builds if found else 0,
            "fixed": found.costs.fixed_ms if found else 0.0,
        }

    def _group(self, index: int, why: str) -> dict[str, Any]:
        found, group = self.found, self.groups[index]
        noise, nsr = (float(each[index]) if len(found.predicted) else 0.0 for each in (found.noise, found.predicted))
        notes = found.chosen.notes if found.chosen else {}
        return {
            "name": group.name,
            "layers": list(group.layers),
            "macs_share": float(self.shares[index]),
            "precision": "int8" if self.int8[index] else "float",
            "why": why,
            "time_int8": float(found.costs.costs.int8_ms[index]) if found.costs else 0.0,
            "time_float": float(found.costs.costs.float_ms[index]) if found.costs else 0.0,
            "nsr_db": 10.0 * float(np.log10(nsr)) if nsr > 0.0 else None,
            "sensitivity": noise,
            "measured": any(block.members == (index,) for block in found.blocks),
            "restored": found.restored.get(index),
            "repairs": sorted({note for layer in group.layers for note in notes.get(layer, ())}),
            "rule": self._rule(index),
        }

    def _edges(self) -> list[list[float]]:
        edges, costs = self.found.grouping.edges, self.found.costs
        times = costs.costs.boundary_ms.tolist() if costs else [0.0] * len(edges)
        return [[i, j, time] for (i, j, _), time in zip(edges, times, strict=True)]

    def _frontier(self) -> list[dict[str, Any]]:
        losses = {candidate.partition.int8.tobytes(): candidate.answer.loss for candidate in self.found.tried}
        return [{**self._plan(plan), "loss": losses.get(plan.int8.tobytes())} for plan in self.found.frontier]

    def _candidates(self) -> list[dict[str, Any]]:
        trials = [{**asdict(trial), "confused": list(map(asdict, trial.confused))} for trial in self.found.trials]
        return [
            {
                **self._plan(candidate.partition),
                "predicted_loss": candidate.answer.loss,
                "floats": int((~candidate.partition.int8).sum()),
                "trial": trials[index] if index < len(trials) else None,
            }
            for index, candidate in enumerate(self.found.candidates)
        ]

    def _plan(self, plan: Partition) -> dict[str, Any]:
        assert self.found.costs is not None
        return {
            "time": plan.time + self.found.costs.costs.fixed_ms,
            "noise": plan.noise,
            "int8_macs_share": float(self.shares[plan.int8].sum()),
        }


def summary(plan: PrecisionPlan) -> Mapping[str, Any]:
    """What `tared plan --json` prints of a plan with all its evidence."""
    evidence = plan.evidence
    accepted = evidence["candidates"][evidence["accepted"]] if evidence["accepted"] is not None else None
    trial = accepted["trial"] if accepted else None
    unmeasured = 0.0 if evidence["float_precision"] == "fp32" else None  # the reference itself; FP16 was not compared
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
    }
