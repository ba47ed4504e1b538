"""What a search found, as a plan: which layers stay float and why, its repairs, and the evidence for people."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agent.planning.candidates import Candidate
from agent.planning.found import Found
from agent.planning.search import Planner
from agent.planning.trial import ERROR, Terms
from calibrate.partition import Partition
from calibrate.plan import PrecisionPlan
from engines.fusion import FusionGroup, Grouping
from engines.macs import node_macs

_NOT_CERTIFIED = "no plan with INT8 in it was certified"


def planned(planner: Planner) -> PrecisionPlan:
    """The certified plan, or the one in which all is float; its evidence without what the caller knows of the run."""
    found = planner.found
    grouping = found.grouping
    assert grouping is not None
    evidence = _evidence(planner, grouping)
    if found.accepted is None:
        floats = grouping.plan([False] * len(grouping.groups), _NOT_CERTIFIED)
        return PrecisionPlan({**floats, **planner.rules.floats}, evidence=evidence)
    int8 = found.candidates[found.accepted].partition.int8
    why = {group["name"]: group["why"] for group in evidence["groups"]}
    floats = {**grouping.plan(int8.tolist(), why), **planner.rules.floats, **planner.builder.without_int8}
    assert found.chosen is not None
    chosen = PrecisionPlan(floats, found.chosen.repairs)
    return PrecisionPlan(floats, chosen.effective, evidence)


def verdict(planner: Planner) -> str:
    """The result in one sentence or two, for people."""
    found, options = planner.found, planner.options
    slower = f" {found.costs.slower}: serve float here." if found.costs and found.costs.slower else ""
    if found.accepted is not None:
        trial = found.trials[found.accepted]
        faster = "" if slower else f" {trial.latency_ms:.3g} ms against {trial.latency_float_ms:.3g} ms in float."
        return (
            f"Certified: a loss of at most {trial.upper:.3g}, where {options.max_loss:g} is accepted.{faster}{slower}"
        )
    if found.interrupted:
        return "All float: the time was up before a plan with INT8 in it was certified."
    if found.costs is None:
        reasons = dict.fromkeys(group.fixed for group in found.grouping.groups if group.fixed) if found.grouping else {}
        return f"All float: no layer may be INT8{': ' + next(iter(reasons)) if reasons else ' by the rules'}."
    if not found.candidates:
        least = min((candidate.answer.loss for candidate in found.tried), default=0.0)
        return (
            f"All float: every plan with INT8 in it lost more than {options.max_loss:g} on the search frames already, "
            f"{least:.3g} at least."
        )
    return f"All float: none of {len(found.trials)} plans was certified. The last: {found.trials[-1].reason}."


def _evidence(planner: Planner, grouping: Grouping) -> dict[str, Any]:
    found, options = planner.found, planner.options
    costs = found.costs
    accepted = found.accepted
    trial = found.trials[accepted] if accepted is not None else None
    macs = sum(node_macs(planner.model.master).values())
    shares = np.array([group.macs for group in grouping.groups], np.float64) / max(macs, 1)
    chosen = found.candidates[accepted].partition.int8 if accepted is not None else np.zeros(len(shares), np.bool_)
    answers = {candidate.partition.int8.tobytes(): candidate.answer.loss for candidate in found.tried}
    last = found.trials[-1] if found.trials else None
    return {
        "max_loss": options.max_loss,
        "max_confusion": options.max_confusion,
        "seed": options.seed,
        "costs": _costs(found),
        "repairs": {name: dict(row) for name, row in found.chosen.tried.items()} if found.chosen else {},
        "groups": [_group(planner, grouping, index, bool(chosen[index]), shares) for index in range(len(shares))],
        "edges": [
            [i, j, float(costs.costs.boundary_ms[k]) if costs else 0.0] for k, (i, j, _) in enumerate(grouping.edges)
        ],
        "frontier": [
            {**_plan(found, plan, shares), "loss": answers.get(plan.int8.tobytes())} for plan in found.frontier
        ],
        "candidates": [
            _candidate(found, candidate, shares, found.trials[index] if index < len(found.trials) else None)
            for index, candidate in enumerate(found.candidates)
        ],
        "accepted": accepted,
        "verdict": verdict(planner),
        "certificate": {
            "error": ERROR,
            "frames_needed": Terms(options.max_loss, options.max_confusion, max(1, len(found.candidates))).needed,
        },
        "latency_ms": trial.latency_ms if trial else (last.latency_float_ms if last else None),
        "latency_float_ms": last.latency_float_ms if last else None,
        "faster": trial is not None and trial.latency_ms < trial.latency_float_ms,
        "frames": {"search": planner.search_count(), "certificate": last.frames if last else 0},
        "builds": planner.builds,
        "interrupted": found.interrupted,
    }


def _costs(found: Found) -> dict[str, Any]:
    if found.costs is None:
        return {
            "source": "macs",
            "why": "nothing was measured",
            "unit": "MACs",
            "noise": 0.0,
            "builds": 0,
            "fixed": 0.0,
        }
    costs = found.costs.costs
    measured = not found.costs.why
    return {
        "source": "measured" if measured else "macs",
        "why": found.costs.why,
        "unit": "ms" if measured else "MACs",
        "noise": costs.noise,
        "builds": costs.builds,
        "fixed": costs.fixed_ms,
    }


def _group(planner: Planner, grouping: Grouping, index: int, int8: bool, shares: NDArray[np.float64]) -> dict[str, Any]:
    found = planner.found
    group = grouping.groups[index]
    noise = float(found.noise[index]) if len(found.predicted) else 0.0
    nsr = float(found.predicted[index]) if len(found.predicted) else 0.0
    block = next((block for block in found.blocks if index in block.members), None)
    rule = next((rule for layer in group.layers if (rule := _rule(planner, layer))), "")
    return {
        "name": group.name,
        "layers": list(group.layers),
        "macs_share": float(shares[index]),
        "precision": "int8" if int8 else "float",
        "why": _why(planner, group, index, int8, rule),
        "time_int8": float(found.costs.costs.int8_ms[index]) if found.costs else 0.0,
        "time_float": float(found.costs.costs.float_ms[index]) if found.costs else 0.0,
        "nsr_db": 10.0 * float(np.log10(nsr)) if nsr > 0.0 else None,
        "sensitivity": noise,
        "measured": block is not None and len(block.members) == 1,
        "restored": found.restored.get(index),
        "repairs": sorted({note for layer in group.layers for note in _notes(found, layer)}),
        "rule": rule,
    }


def _rule(planner: Planner, layer: str) -> str:
    return planner.rules.floats.get(layer) or planner.rules.int8.get(layer, "")


def _notes(found: Found, layer: str) -> tuple[str, ...]:
    return tuple(found.chosen.notes.get(layer, ())) if found.chosen else ()


def _why(planner: Planner, group: FusionGroup, index: int, int8: bool, rule: str) -> str:
    found = planner.found
    if group.fixed or rule:
        return group.fixed or rule
    lacking = next((layer for layer in group.layers if layer in planner.without_int8), None)
    if lacking:
        return planner.without_int8[lacking]
    if found.accepted is None:
        return _NOT_CERTIFIED
    assert found.costs is not None
    costs = found.costs.costs
    saved = float(costs.float_ms[index] - costs.int8_ms[index]) / max(float(costs.float_ms.sum()), 1e-30)
    noise = float(found.noise[index]) / max(float(found.noise.sum()), 1e-30)
    told = f"INT8 saves {saved:.1%} of the time and makes {noise:.1%} of the noise"
    return told if int8 or saved > 0.0 else "INT8 is not faster here"


def _plan(found: Found, plan: Partition, shares: NDArray[np.float64]) -> dict[str, Any]:
    assert found.costs is not None
    return {
        "time": plan.time + found.costs.costs.fixed_ms,
        "noise": plan.noise,
        "int8_macs_share": float(shares[plan.int8].sum()),
    }


def _candidate(found: Found, candidate: Candidate, shares: NDArray[np.float64], trial: Any) -> dict[str, Any]:
    return {
        **_plan(found, candidate.partition, shares),
        "predicted_loss": candidate.answer.loss,
        "floats": int((~candidate.partition.int8).sum()),
        "trial": asdict(trial) if trial is not None else None,
    }


def summary(plan: PrecisionPlan, int8_macs_share: float) -> Mapping[str, Any]:
    """What `tared plan --json` prints of a plan."""
    evidence = plan.evidence
    accepted = evidence["candidates"][evidence["accepted"]] if evidence["accepted"] is not None else None
    trial = accepted["trial"] if accepted else None
    return {
        "int8_macs_share": round(int8_macs_share, 4),
        "predicted_loss": accepted["predicted_loss"] if accepted else 0.0,
        "measured_loss": trial["loss"] if trial else 0.0,
        "measured_loss_upper": trial["upper"] if trial else 0.0,
        "certified": accepted is not None,
        "latency_ms": evidence["latency_ms"],
        "latency_float_ms": evidence["latency_float_ms"],
        "faster": evidence["faster"],
        "builds": evidence["builds"],
    }
