"""How far an engine's answers are from the reference's, as a number that small noise moves in proportion.

Fidelity counts what a user loses, and stands still until something is lost. To tell what each layer adds, the
divergence is a squared error: independent noises add up in it. For a detector it is taken where something is detected:
most of its outputs are background that nobody reads. Its boxes and scores are compared before overlaps are suppressed,
since which of two neighbours survives the suppression is chance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agent.common.state_files import Journal
from agent.models.model import Model
from agent.vision.decode import RawOutputs
from agent.vision.detections import Detections, iou_matrix
from agent.vision.fidelity import fidelity
from agent.vision.spec import ModelSpec
from agent.vision.task import VisionTask
from calibrate.plan import PrecisionPlan, Repairs
from engines.calibration import Calibration
from engines.graph.topology import Topology
from engines.interface import Array, Backend, Engine, Progress
from engines.quantise.apply_plan import quantised_graph
from engines.quantise.repairs import FAMILIES, Proposal, observe_channels, propose_repairs

# Of the score threshold. Objects count down to a third of it: there are more of them, and what is only just not served
# today is what tomorrow's scene serves. Their nearest candidates are looked for down to a tenth.
_SEEN, _FAINT = 1.0 / 3.0, 0.1


@dataclass(frozen=True)
class Sighting:
    """What a detector says of one frame: its detections, and the candidates that they were chosen from."""

    found: Detections
    candidates: Detections


class DetectorDivergence:
    """Reads the outputs of one detector, and compares two readings."""

    def __init__(self, spec: ModelSpec, engine: Engine) -> None:
        seen = {"score_threshold": _SEEN * spec.score_threshold}
        faint = {"score_threshold": _FAINT * spec.score_threshold, "iou_threshold": 1.0}
        self._found = VisionTask(spec.model_copy(update=seen), engine.inputs, engine.outputs)
        self._candidates = VisionTask(spec.model_copy(update=faint), engine.inputs, engine.outputs)

    def read(self, outputs: RawOutputs, shape: tuple[int, ...]) -> Sighting:
        """From the outputs for a network input of a shape (1, C, h, w)."""
        found, candidates = (task.decode(outputs, shape) for task in (self._found, self._candidates))
        assert isinstance(found, Detections)
        assert isinstance(candidates, Detections)
        return Sighting(found, candidates)


def sightings_divergence(served: Sighting, reference: Sighting) -> float | None:
    """Mean over what either detects of (1 - IoU)**2 + (score difference)**2 to the other's nearest candidate.

    Of candidates of its class; at most 1, which is also the cost of having none. None where neither detects anything.
    """
    missed = _errors(reference.found, served.candidates)
    invented = _errors(served.found, reference.candidates)
    errors = np.concatenate((missed, invented))
    return float(errors.mean()) if len(errors) else None


def _errors(found: Detections, candidates: Detections) -> NDArray[np.float64]:
    """(found,): the error of each detection's nearest candidate."""
    distance = np.square(1.0 - iou_matrix(found.boxes, candidates.boxes))
    distance += np.square(found.scores[:, np.newaxis] - candidates.scores[np.newaxis])
    distance[found.classes[:, np.newaxis] != candidates.classes[np.newaxis]] = 1.0
    nearest: NDArray[np.float64] = distance.min(axis=1, initial=1.0)
    return nearest


def outputs_divergence(served: RawOutputs, reference: RawOutputs) -> float:
    """Mean over outputs of the noise relative to the reference's own variation, at most 1 each; NaN counts as 1."""
    return float(np.mean([_noise_to_signal(served[name], output) for name, output in reference.items()]))


def _noise_to_signal(served: Array, reference: Array) -> float:
    """Of one output; of one that does not vary, such as a single number, relative to its power."""
    if served.shape != reference.shape:
        return 1.0  # it holds as many rows as were found
    if not reference.size:
        return 0.0
    signal = reference.astype(np.float64)
    with np.errstate(all="ignore"):
        noise = np.square(served.astype(np.float64) - signal).mean()
        power = float(signal.var() or np.square(signal).mean())
        ratio = noise / max(power, float(np.finfo(np.float32).tiny))
    return float(min(ratio, 1.0)) if np.isfinite(ratio) else 1.0


Frames = Sequence[Array]


@dataclass(frozen=True)
class WhatIfResult:
    """divergence: mean over frames, see divergence.py. loss: 1 - mean fidelity over the telling frames."""

    divergence: float
    loss: float
    telling: int


class WhatIf:
    """The reference's answers to a few network inputs (1, C, H, W), and a plan's beside them."""

    def __init__(self, model: Model, calibration: Calibration, frames: Frames, runtime: Backend) -> None:
        self._model = model
        self._calibration = calibration
        self._runtime = runtime
        with closing(runtime.load(model.master.SerializeToString())) as engine:
            self._task = VisionTask(model.spec, engine.inputs, engine.outputs)
            self._detector = DetectorDivergence(model.spec, engine) if model.spec.task == "detect" else None
            answered = [(frame, outputs := engine.infer(frame), self._read(outputs, frame)) for frame in frames]
        self._known = sorted(answered, key=lambda known: not _is_telling(known[2]))
        self._telling = any(_is_telling(sighting) for *_, sighting in self._known)

    def ask(self, plan: PrecisionPlan, frames: int | None = None) -> WhatIfResult:
        """The answers of a plan's INT8 graph on so many frames, on all by default; first those that show something."""
        graph = quantised_graph(self._model.master, plan, self._calibration).graph
        divergences, losses = list[float](), list[float]()
        with closing(self._runtime.load(graph.SerializeToString())) as engine:
            for frame, expected, sighting in self._known[:frames]:
                outputs = engine.infer(frame)
                divergence = self._divergence(outputs, frame, expected, sighting)
                if divergence is not None:
                    divergences.append(divergence)
                served, reference = (self._task.decode(each, frame.shape) for each in (outputs, expected))
                agreement = fidelity(served, reference, self._model.spec.min_sqnr_db)
                finite = all(np.isfinite(output).all() for output in outputs.values())
                if not (agreement.is_empty and finite):
                    losses.append(1.0 - agreement.value if finite else 1.0)
        return WhatIfResult(_mean(divergences), _mean(losses), len(losses))

    def _read(self, outputs: RawOutputs, frame: Array) -> Sighting | None:
        return self._detector.read(outputs, frame.shape) if self._detector is not None else None

    def _divergence(
        self, outputs: RawOutputs, frame: Array, expected: RawOutputs, reference: Sighting | None
    ) -> float | None:
        """Of detections where the frames show any, else of the outputs as they are."""
        if reference is None or not self._telling:
            return outputs_divergence(outputs, expected)
        sighting = self._read(outputs, frame)
        assert sighting is not None
        return sightings_divergence(sighting, reference)


def _is_telling(sighting: Sighting | None) -> bool:
    return sighting is not None and len(sighting.found) > 0


def _mean(values: list[float]) -> float:
    return float(np.mean(values)) if values else 0.0


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
