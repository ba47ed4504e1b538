"""Evaluate a plan on a few frames: how far its answers diverge from the reference's, and what they lose.

`WhatIf.evaluate` simulates the plan's INT8 graph on ONNX Runtime. `choose_repairs` uses it to decide which kinds of
repair help.

Fidelity counts what a user loses, and does not move until something is lost. To measure what each layer adds, the
divergence is a squared error instead: independent noises add up in it. For a detector it is taken where something is
detected, since most of its outputs are background that nobody reads. Its boxes and scores are compared before overlaps
are suppressed: which of two neighbours survives the suppression is chance. Maps of classes diverge by the square of
what is lost: as many pixels change as the noise is large.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from agent.models.model import Model
from agent.vision.answer import Answer
from agent.vision.fidelity import fidelity
from agent.vision.task import VisionTask
from agent.vision.tasks.opening import open_task
from calibrate.plan import PrecisionPlan, Repairs
from engines.calibration import Calibration
from engines.graph.topology import Topology
from engines.interface import Array, Backend, Engine, Progress
from engines.quantise.apply_plan import quantised_graph
from engines.quantise.repairs import FAMILIES, Equalisations, Proposal, observe_channels, propose_repairs

_STATISTICS_FRAMES = 16
_TRIED_FRAMES = 12
_HOPELESS = 0.5  # noise to signal at a layer's output: in INT8 it would drown the effect of repairs elsewhere

Frames = Sequence[Array]
Remember = Callable[[str, Callable[[], float]], float]


def outputs_divergence(served: Mapping[str, Array], reference: Mapping[str, Array]) -> float:
    """Return the mean over outputs of the noise relative to the reference's variation, at most 1 each; NaN is 1."""
    return float(np.mean([_noise_to_signal(served[name], output) for name, output in reference.items()]))


def _noise_to_signal(served: Array, reference: Array) -> float:
    """If the output does not vary, such as a single number, the noise is relative to its power."""
    if served.shape != reference.shape:
        return 1.0  # the number of rows is the number of objects
    if not reference.size:
        return 0.0
    signal = reference.astype(np.float64)
    with np.errstate(all="ignore"):
        noise = np.square(served.astype(np.float64) - signal).mean()
        power = float(signal.var() or np.square(signal).mean())
        ratio = noise / max(power, float(np.finfo(np.float32).tiny))
    return float(min(ratio, 1.0)) if np.isfinite(ratio) else 1.0


@dataclass(frozen=True)
class WhatIfResult:
    """A plan's answers compared with the reference's.

    divergence: mean over frames. loss: 1 - mean fidelity over the `telling` frames that show something. sqnr_db: the
    median over frames of each part of outputs that no decoder reads, by its name.
    """

    divergence: float
    loss: float
    telling: int
    sqnr_db: Mapping[str, float] = field(default_factory=dict)


class WhatIf:
    """Compare plans with the reference on a few network inputs (1, C, H, W).

    model, calibration, runtime: as given. The choice of repairs reads them to propose on the same model.
    """

    def __init__(self, model: Model, calibration: Calibration, frames: Frames, runtime: Backend) -> None:
        self.model = model
        self.calibration = calibration
        self.runtime = runtime
        self._kind = open_task(model.spec)
        with closing(runtime.load(model.master.SerializeToString())) as engine:
            task, *listening = (
                VisionTask(spec, engine.inputs, engine.outputs) for spec in (model.spec, *self._kind.listening_specs)
            )
            self._task, self._listening = task, listening
            answered = [(frame, outputs := engine.infer(frame), self._read(outputs, frame)) for frame in frames]
        self._known = sorted(answered, key=lambda known: not _shows_something(known[2]))
        self._any_shows = any(_shows_something(answers) for *_, answers in self._known)

    def evaluate(self, plan: PrecisionPlan, frames: int | None = None) -> WhatIfResult:
        """Answer the first `frames` frames, or all, with the plan's INT8 graph; frames that show anything are first."""
        numbers = self.runtime.takes_unsigned, self.runtime.weight_bits
        graph = quantised_graph(self.model.master, plan, self.calibration, *numbers).graph
        with closing(self.runtime.load(graph.SerializeToString())) as engine:
            return self.compare(engine, frames)

    def compare(self, engine: Engine, frames: int | None = None) -> WhatIfResult:
        """Answer the first `frames` frames, or all, with an engine of this model."""
        divergences, losses = list[float](), list[float]()
        parts = defaultdict[str, list[float]](list)
        for frame, expected, reference_answers in self._known[:frames]:
            outputs = engine.infer(frame)
            divergence = self._divergence(outputs, frame, expected, reference_answers)
            if divergence is not None:
                divergences.append(divergence)
            served, reference = (self._task.answer(each, frame) for each in (outputs, expected))
            agreement = fidelity(served, reference)
            for name, sqnr_db in served.sqnr_by_part(reference).items():
                parts[name].append(sqnr_db)
            finite = all(np.isfinite(output).all() for output in outputs.values())
            if not (agreement.is_empty and finite):
                losses.append(1.0 - agreement.value if finite else 1.0)
        medians = {name: float(np.median(values)) for name, values in parts.items()}
        return WhatIfResult(_mean(divergences), _mean(losses), len(losses), medians)

    def _read(self, outputs: Mapping[str, Array], frame: Array) -> Sequence[Answer]:
        """Return the answers that the task compares."""
        return [task.answer(outputs, frame) for task in self._listening]

    def _divergence(
        self,
        outputs: Mapping[str, Array],
        frame: Array,
        expected: Mapping[str, Array],
        reference: Sequence[Answer],
    ) -> float | None:
        """Compare answers if the task does and the frames show anything, else the outputs."""
        if not self._any_shows:
            return outputs_divergence(outputs, expected)
        return self._kind.divergence(self._read(outputs, frame), reference)


def _shows_something(answers: Sequence[Answer]) -> bool:
    return bool(answers) and not answers[0].is_empty


def _mean(values: list[float]) -> float:
    return float(np.mean(values)) if values else 0.0


@dataclass(frozen=True)
class RepairChoice:
    """The chosen repairs, and why.

    nsr: per layer the predicted noise to signal at its output with the repairs. notes: per layer its repairs in words.
    tried: per kind of repair the number of layers that it was proposed for, the divergence of the INT8 network with it
    and without it (with all others that were kept), and whether it was kept.
    """

    repairs: Repairs
    nsr: Mapping[str, float]
    notes: Mapping[str, Sequence[str]]
    tried: Mapping[str, Mapping[str, Any]]


def choose_repairs(what_if: WhatIf, frames: Frames, remember: Remember, progress: Progress) -> RepairChoice:
    """Propose repairs from the channels that the frames show, and try each kind by leaving it out.

    Args:
        what_if: Has the frames that try.
        frames: Those that propose.
        remember: Returns the number of a name, which it computes if it is not known.
    """
    model, runtime = what_if.model, what_if.runtime
    topology = Topology(model.master)
    layers = [node for node in topology.nodes if node.name in model.placement.layers]
    statistics = observe_channels(
        model.master, layers, frames[:_STATISTICS_FRAMES], runtime, lambda done, doing: progress(0.5 * done, doing)
    )

    equalisations: Equalisations = {}
    unsigned, calibration = runtime.takes_unsigned, what_if.calibration

    def propose(families: Sequence[str]) -> Proposal:
        return propose_repairs(
            model.master, model.placement, calibration, statistics, families, equalisations, unsigned
        )

    kept, tried = list(FAMILIES), dict[str, Mapping[str, Any]]()
    proposal = propose(kept)
    for number, family in enumerate(FAMILIES):
        layers_of = len(getattr(proposal.repairs, family))
        if not layers_of:
            kept.remove(family)  # repairs of another kind may have taken its place at all layers
            proposal = propose(kept)
            continue
        progress(0.5 + 0.5 * number / len(FAMILIES), f"trying the network without {family}")
        without = propose([other for other in kept if other != family])
        hopeless = _hopeless(proposal) & _hopeless(without)
        better, worse = (_divergence(what_if, each, hopeless, remember) for each in (proposal, without))
        tried[family] = {
            "layer_count": layers_of,
            "divergence": better,
            "divergence_without": worse,
            "kept": better < worse,
        }
        if better >= worse:
            kept.remove(family)
            proposal = without
    progress(1.0, "repairs chosen")
    return RepairChoice(proposal.repairs, proposal.after, proposal.notes, tried)


def _hopeless(proposal: Proposal) -> frozenset[str]:
    return frozenset(layer for layer, nsr in proposal.after.items() if nsr > _HOPELESS)


def _divergence(what_if: WhatIf, proposal: Proposal, hopeless: frozenset[str], remember: Remember) -> float:
    """Return the divergence of the network in INT8, but for the layers that neither of two proposals saves."""
    plan = PrecisionPlan({**what_if.model.plan.floats, **dict.fromkeys(hopeless, "hopeless")}, proposal.repairs)
    key = f"repairs {' '.join(sorted(proposal.repairs.as_dict()))} without {' '.join(sorted(hopeless))}"
    return float(remember(key, lambda: what_if.evaluate(plan, _TRIED_FRAMES).divergence))
