"""How far an engine's answers are from the reference's, as a number that small noise moves in proportion.

Fidelity counts what a user loses, and stands still until something is lost. To tell what each layer adds, the
divergence is a squared error: independent noises add up in it. For a detector it is taken where something is detected:
most of its outputs are background that nobody reads. Its boxes and scores are compared before overlaps are suppressed,
since which of two neighbours survives the suppression is chance.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agent.decode import RawOutputs
from agent.detections import Detections, iou_matrix
from agent.model_spec import ModelSpec
from agent.vision import VisionTask
from engines.backend import Array, Engine

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
