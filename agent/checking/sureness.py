"""Measure how sure a model is of its answers under a spec, and decide whether it is surer under another one.

A network that is fed wrongly may well be sure: values 255 times too large drive its scores to 1 wherever they are not
0. So only what the mirrored frame confirms counts, as in test-time augmentation, of which the spread is a known sign of
how far an answer can be trusted (Ayhan and Berens, MIDL 2018). A detection counts with the geometric mean of its
score and that of the detection of its class in the mirrored frame, times their overlap, from MATCH_IOU on. A class
counts with the geometric mean of its probabilities in the two frames. From a class is taken off what the frame gives
it in disorder, its tiles exchanged: an engine that says the same of everything is sure of nothing.

Two specs are compared on the same frames, pair by pair. One is surer if its mean is above MARGIN times the other's,
and the mean of the differences above T standard errors; by chance alone one of a dozen
alternatives passes for surer at most once in some 25 checks (one-sided t-test of 24 frames, Bonferroni). Of fewer
frames than FEW the spread is not known: then it has to be FEW_MARGIN times as sure. Whichever way frames are
resized, some objects become larger for the network, and more of them are found; so the surest object of each frame has
to be surer too, else the spec only finds more.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from agent.vision.decode import class_probabilities
from agent.vision.detections import Detections, iou_matrix
from agent.vision.fidelity import MATCH_IOU
from agent.vision.spec import ModelSpec
from agent.vision.task import VisionTask
from engines.interface import Engine

MARGIN = 1.1
T = 3.0
FEW = 8
FEW_MARGIN = 2.0
LEAST = 0.1  # a frame; below it, nothing is found that could be compared
_TILES = 32  # along each side of a frame that is put in disorder

Image = NDArray[np.uint8]
Means = NDArray[np.float64]
Finding = Literal["surer", "finds more", "no difference", "finds less", "less sure"]


@dataclass(frozen=True)
class Sureness:
    """How sure the model is of each frame's answer under one spec.

    Args:
        sums: confirmed confidence of all that was found (frames,); of a classifier that of the class, 0 to 1.
        tops: that of the surest object (frames,); of a classifier the same as `sums`.
    """

    sums: Means
    tops: Means

    @property
    def mean(self) -> float:
        return float(self.sums.mean())

    @property
    def top(self) -> float:
        return float(self.tops.mean())


def measure(engine: Engine, spec: ModelSpec, images: Iterable[Image]) -> Sureness:
    """Infer each frame, BGR uint8 (H, W, 3), and its mirror image; a classifier's also in disorder.

    Raises ConfigError as `VisionTask` where the spec does not fit the engine.
    """
    task = VisionTask(spec, engine.inputs, engine.outputs)
    find = _class_confidence if spec.task == "classify" else _confirmed_scores
    found = [find(task, engine, image) for image in images]
    return Sureness(
        np.array([scores.sum() for scores in found], np.float64),
        np.array([scores.max(initial=0.0) for scores in found], np.float64),
    )


def compare(ours: Sureness, theirs: Sureness, resizes: bool) -> Finding:
    """Return how sure the model is under our spec, compared with theirs. resizes: the two differ in `resize`."""
    for first, second, surer, more in (
        (ours, theirs, "surer", "finds more"),
        (theirs, ours, "less sure", "finds less"),
    ):
        if _is_above(first.sums, second.sums):
            return surer if not resizes or _is_above(first.tops, second.tops) else more  # type: ignore[return-value]
    return "no difference"


def _is_above(ours: Means, theirs: Means) -> bool:
    count, mean, other = len(ours), float(ours.mean()), float(theirs.mean())
    if mean < LEAST or mean < (MARGIN if count >= FEW else FEW_MARGIN) * other:
        return False
    differences = ours - theirs
    return count < FEW or bool(differences.mean() > T * differences.std(ddof=1) / np.sqrt(count))


def _confirmed_scores(task: VisionTask, engine: Engine, image: Image) -> Means:
    """Return the confirmed confidence of each detection of a frame (n,)."""
    seen, seen_at = task.infer(engine, image)
    mirrored, mirrored_at = task.infer(engine, np.ascontiguousarray(image[:, ::-1]))
    assert isinstance(seen, Detections)
    assert isinstance(mirrored, Detections)
    if not len(seen) or not len(mirrored):
        return np.zeros(0)
    width = np.float32(image.shape[1])
    boxes = mirrored_at.to_frame(mirrored.boxes)
    boxes[:, [0, 2]] = width - boxes[:, [2, 0]]
    overlaps = iou_matrix(seen_at.to_frame(seen.boxes), boxes)
    overlaps[(overlaps < MATCH_IOU) | (seen.classes[:, np.newaxis] != mirrored.classes)] = 0.0
    # Scores are sigmoids or probabilities; a decoder that misreads an output may give more than 1.
    first, second = (np.clip(each.scores.astype(np.float64), 0.0, 1.0) for each in (seen, mirrored))
    confirmed: Means = (np.sqrt(first[:, np.newaxis] * second) * overlaps).max(axis=1)
    return confirmed


def _class_confidence(task: VisionTask, engine: Engine, image: Image) -> Means:
    """Return the confirmed confidence of the class that a frame and its mirror image agree on best (1,)."""
    views = image, np.ascontiguousarray(image[:, ::-1]), disordered(image)
    seen, mirrored, scattered = (probabilities(task, engine, view) for view in views)
    agreed = np.sqrt(seen * mirrored)
    class_id = int(agreed.argmax())
    confidence = float(agreed[class_id] - np.sqrt(seen[class_id] * scattered[class_id]))
    return np.array([max(0.0, confidence) if np.isfinite(confidence) else 0.0])


def probabilities(task: VisionTask, engine: Engine, image: Image) -> Means:
    """Return a classifier's probability of each class (classes,)."""
    tensor, _ = task.preprocess(image)
    return class_probabilities({name: output[0] for name, output in engine.infer(tensor).items()})


def disordered(image: Image) -> Image:
    """Return a copy of a frame whose tiles have changed places; the strip that fills no tile stays."""
    height, width = (max(1, side // _TILES) for side in image.shape[:2])
    rows, columns = image.shape[0] // height, image.shape[1] // width
    whole = image[: rows * height, : columns * width]
    tiles = whole.reshape(rows, height, columns, width, 3).swapaxes(1, 2).reshape(-1, height, width, 3)
    shuffled = tiles[np.random.default_rng(0).permutation(len(tiles))]
    copy: Image = image.copy()
    copy[: rows * height, : columns * width] = (
        shuffled.reshape(rows, columns, height, width, 3).swapaxes(1, 2).reshape(whole.shape)
    )
    return copy
