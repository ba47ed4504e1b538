"""Which repairs a plan takes: those proposed layer by layer, of the kinds that make the network's answers better."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent.journal import Journal
from agent.model import Model
from agent.planning.what_if import WhatIf
from calibrate.plan import PrecisionPlan, Repairs
from engines.backend import Array, Backend, Progress
from engines.calibration import Calibration
from engines.channels import observe_channels
from engines.repairs import FAMILIES, Proposal, propose_repairs
from engines.topology import Topology

_STATISTICS_FRAMES = 16
_TRIED_FRAMES = 12
_HOPELESS = 0.5  # noise to signal at a layer's output: in INT8 it would drown what repairs do elsewhere


@dataclass(frozen=True)
class Chosen:
    """repairs; per layer the predicted noise to signal at its output with them (`nsr`), and what was done (`notes`).

    tried: per kind of repair how many layers it was proposed for, the divergence of the INT8 network with it and
    without it (beside all others that were kept), and whether it was kept.
    """

    repairs: Repairs
    nsr: Mapping[str, float]
    notes: Mapping[str, Sequence[str]]
    tried: Mapping[str, Mapping[str, Any]]


def choose_repairs(
    model: Model,
    calibration: Calibration,
    frames: Sequence[Array],
    what_if: WhatIf,
    runtime: Backend,
    journal: Journal,
    progress: Progress,
) -> Chosen:
    """Propose repairs from the channels that the frames show, and try each kind by leaving it out."""
    topology = Topology(model.master)
    layers = [node for node in topology.nodes if node.name in model.placement.weights]
    statistics = observe_channels(
        model.master, layers, frames[:_STATISTICS_FRAMES], runtime, lambda done, doing: progress(0.5 * done, doing)
    )

    def proposed(families: Sequence[str]) -> Proposal:
        return propose_repairs(model.master, model.placement, calibration, statistics, families)

    kept, tried = list(FAMILIES), dict[str, Mapping[str, Any]]()
    proposal = proposed(kept)
    for number, family in enumerate(FAMILIES):
        layers_of = len(getattr(proposal.repairs, family))
        if not layers_of:
            kept.remove(family)  # others of its layers' repairs may have taken its place
            proposal = proposed(kept)
            continue
        progress(0.5 + 0.5 * number / len(FAMILIES), f"trying the network without {family}")
        without = proposed([other for other in kept if other != family])
        better, worse = (_divergence(model, each, what_if, journal) for each in (proposal, without))
        tried[family] = {"layers": layers_of, "divergence": better, "without": worse, "kept": better < worse}
        if better >= worse:
            kept.remove(family)
            proposal = without
    progress(1.0, "repairs chosen")
    return Chosen(proposal.repairs, proposal.after, proposal.notes, tried)


def _divergence(model: Model, proposal: Proposal, what_if: WhatIf, journal: Journal) -> float:
    """Of the network in INT8, without the layers that no repair saves."""
    hopeless = {layer: "hopeless" for layer, nsr in proposal.after.items() if nsr > _HOPELESS}
    plan = PrecisionPlan({**model.plan.floats, **hopeless}, proposal.repairs)
    key = f"repairs {' '.join(sorted(proposal.repairs.as_dict()))}"
    return float(journal.remember(key, lambda: what_if.ask(plan, _TRIED_FRAMES).divergence))
