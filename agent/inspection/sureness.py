"""Measure how sure a model is of its answers under a spec, and decide whether it is surer under another one.

A network that is fed wrongly may well be sure: values 255 times too large drive its scores to 1 wherever they are not
0. So only what the mirrored frame confirms counts, as in test-time augmentation, of which the spread is a known sign of
how far an answer can be trusted (Ayhan and Berens, MIDL 2018):

- A detection's confirmed confidence is the geometric mean of its score and that of the detection of its class in the
  mirrored frame, times their overlap, from MATCH_IOU on. A frame's sureness is the sum of their squares, so that one
  sure object counts more than several doubtful ones, times the share of all scores that is confirmed: a saturated
  network takes everything for an object, and some of it is confirmed by chance.
- A class's confirmed confidence is the geometric mean of its probabilities in the two frames.
- A map of classes, and the key points of one object, are confirmed as far as the mirrored frame has the same.

From each of these comes off what the frame in disorder, its tiles exchanged, gives likewise: an engine that says the
same of everything is sure of nothing.

Two specs are compared on the same frames, pair by pair. One is surer if its mean is above MARGIN times the other's,
and the frames speak for it beyond CHANCE (Wilcoxon's signed-rank test, one-sided): so one of a dozen alternatives
passes for surer by chance at most once in some 28 checks. The test goes by ranks, because a frame may have one object
in it or thirty. Fewer frames than FEW cannot pass it: then a spec has to be FEW_MARGIN times as sure. Whichever way
frames are resized, some objects become larger for the network, and more of them are found; so the surest object of each
frame has to be surer too, else the spec only finds more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from agent.vision.answer import Answer
from agent.vision.spec import ModelSpec
from agent.vision.task import VisionTask
from agent.vision.tasks.opening import open_task
from engines.interface import Array, Engine

MARGIN = 1.1
CHANCE = 0.003
FEW = 8
FEW_MARGIN = 2.0
LEAST = 0.02  # a frame; below it, nothing is found that could be compared
_EXACT = 50  # differences; of more, the normal distribution is as good

Image = NDArray[np.uint8]
Means = NDArray[np.float64]
Finding = Literal["surer", "finds more", "no difference", "finds less", "less sure"]


@dataclass(frozen=True)
class Sureness:
    """The model's confidence in each frame's answer under one spec.

    Args:
        sums: of all that was found in a frame (frames,); of a class, a map or one object, 0 to 1.
        tops: confirmed confidence of the surest object, 0 to 1 (frames,); without objects the same as `sums`.
    """

    sums: Means
    tops: Means

    @property
    def mean(self) -> float:
        return float(self.sums.mean())

    @property
    def top(self) -> float:
        return float(self.tops.mean())


NO_SURENESS = Sureness(np.zeros(1), np.zeros(1))


def measure(engine: Engine, spec: ModelSpec, images: Iterable[Image]) -> Sureness:
    """Infer each frame, BGR uint8 (H, W, 3), its mirror image, and the frame in disorder.

    Raises ConfigError as `VisionTask` where the spec does not fit the engine.
    """
    vision, task = VisionTask(spec, engine.inputs, engine.outputs), open_task(spec)

    def see(image: Image) -> tuple[Mapping[str, Array], Answer]:
        tensor, geometry = vision.preprocess(image)
        outputs = engine.infer(tensor)
        return outputs, vision.answer(outputs, tensor).in_frame(geometry)

    found = np.array([task.confirmed(see, image) for image in images])
    return Sureness(found[:, 0], found[:, 1])


def compare(ours: Sureness, theirs: Sureness, resizes: bool) -> Finding:
    """Return how sure the model is under our spec, compared with theirs. resizes: the two differ in `resize`."""
    if _is_above(ours.sums, theirs.sums):
        return "surer" if not resizes or _is_above(ours.tops, theirs.tops) else "finds more"
    if _is_above(theirs.sums, ours.sums):
        return "less sure" if not resizes or _is_above(theirs.tops, ours.tops) else "finds less"
    return "no difference"


def _is_above(ours: Means, theirs: Means) -> bool:
    count, mean, other = len(ours), float(ours.mean()), float(theirs.mean())
    if mean < LEAST or mean < (MARGIN if count >= FEW else FEW_MARGIN) * other:
        return False
    if count < FEW:
        return True
    from scipy.stats import wilcoxon  # slow to import, and few comparisons need it

    differences = (ours - theirs)[ours != theirs]
    method = "exact" if len(differences) <= _EXACT else "auto"
    return bool(wilcoxon(differences, alternative="greater", method=method).pvalue < CHANCE)
