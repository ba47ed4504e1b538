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
from dataclasses import asdict, dataclass, field
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
from engines.store.artefact import fingerprint

_STATISTICS_FRAMES = 16
_TRIED_FRAMES = 12
_HOPELESS = 0.5  # noise to signal at a layer's output: in INT8 it would drown the effect of repairs elsewhere

Frames = Sequence[Array]
_Known = tuple[Array, Mapping[str, Array], Sequence[Answer]]  # a network input, the reference's outputs and answers
# Returns what is known under a name, or computes it. It must be what JSON gives back.
Remember = Callable[[str, Callable[[], dict[str, Any]]], dict[str, Any]]


def remember_nothing(_: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Remember nothing."""
    return measure()


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
    """Compare plans with the reference on a few network inputs (1, C, H, W) of each scene.

    model, calibration, runtime: as given. The choice of repairs reads them to propose on the same model.
    """

    def __init__(
        self,
        model: Model,
        calibration: Calibration,
        scenes: Sequence[Frames],
        runtime: Backend,
        remember: Remember = remember_nothing,
    ) -> None:
        self.model = model
        self.calibration = calibration
        self.runtime = runtime
        self._remember = remember
        self._kind = open_task(model.spec)
        with closing(runtime.load(model.master.SerializeToString())) as engine:
            task, *listening = (
                VisionTask(spec, engine.inputs, engine.outputs) for spec in (model.spec, *self._kind.listening_specs)
            )
            self._task, self._listening = task, listening
            answered = [
                [(frame, outputs := engine.infer(frame), self._read(outputs, frame)) for frame in frames]
                for frames in scenes
            ]
        self._scenes = [sorted(known, key=lambda each: not _shows_something(each[2])) for known in answered]

    def evaluate(self, plan: PrecisionPlan, frames: int | None = None) -> WhatIfResult:
        """Answer the first `frames` frames, or all, with the plan's INT8 graph; frames that show anything are first.

        frames: of all scenes together. The loss is that in the worst scene, the divergence the mean over scenes in
        which something is seen.
        """
        key = f"ask {frames} {fingerprint(plan.essence)}"
        return WhatIfResult(**self._remember(key, lambda: asdict(self._evaluated(plan, frames))))

    def _evaluated(self, plan: PrecisionPlan, frames: int | None) -> WhatIfResult:
        numbers = self.runtime.takes_unsigned, self.runtime.weight_bits
        graph = quantised_graph(self.model.master, plan, self.calibration, *numbers).graph
        with closing(self.runtime.load(graph.SerializeToString())) as engine:
            return self.compare(engine, frames)

    def compare(self, engine: Engine, frames: int | None = None) -> WhatIfResult:
        """Answer the first `frames` frames, or all, with an engine of this model, as `evaluate`."""
        of_each = None if frames is None else -(-frames // len(self._scenes))
        parts = defaultdict[str, list[float]](list)
        found = [self._in_scene(engine, known[:of_each], parts) for known in self._scenes]
        divergences = [each.divergence for each in found if each.telling] or [each.divergence for each in found]
        loss, telling = max(each.loss for each in found), sum(each.telling for each in found)
        medians = {name: float(np.median(values)) for name, values in parts.items()}
        return WhatIfResult(_mean(divergences), loss, telling, medians)

    def _in_scene(self, engine: Engine, known: Sequence[_Known], parts: dict[str, list[float]]) -> WhatIfResult:
        """Answer the frames of one scene. parts: collects the SQNR of each part of outputs that no decoder reads."""
        shows = any(_shows_something(answers) for *_, answers in known)
        divergences, losses = list[float](), list[float]()
        for frame, expected, reference_answers in known:
            outputs = engine.infer(frame)
            if not shows:
                divergences.append(outputs_divergence(outputs, expected))
            else:
                divergence = self._kind.divergence(self._read(outputs, frame), reference_answers)
                divergences += [] if divergence is None else [divergence]
            served, reference = (self._task.answer(each, frame) for each in (outputs, expected))
            agreement = fidelity(served, reference)
            for name, sqnr_db in served.sqnr_by_part(reference).items():
                parts[name].append(sqnr_db)
            finite = all(np.isfinite(output).all() for output in outputs.values())
            if not (agreement.is_empty and finite):
                losses.append(1.0 - agreement.value if finite else 1.0)
        return WhatIfResult(_mean(divergences), _mean(losses), len(losses))

    def _read(self, outputs: Mapping[str, Array], frame: Array) -> Sequence[Answer]:
        """Return the answers that the task compares."""
        return [task.answer(outputs, frame) for task in self._listening]


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


def choose_repairs(what_if: WhatIf, frames: Frames, progress: Progress) -> RepairChoice:
    """Propose repairs from the channels that the frames show, and try each kind by leaving it out.

    what_if: has the frames that try. frames: those that propose.
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
        better, worse = (_divergence(what_if, each, hopeless) for each in (proposal, without))
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


def _divergence(what_if: WhatIf, proposal: Proposal, hopeless: frozenset[str]) -> float:
    """Return the divergence of the network in INT8, but for the layers that neither of two proposals saves."""
    plan = PrecisionPlan({**what_if.model.plan.floats, **dict.fromkeys(hopeless, "hopeless")}, proposal.repairs)
    return what_if.evaluate(plan, _TRIED_FRAMES).divergence
