"""Show of an answer what the board's owner wants to see under one engine: its policy.

A policy changes what results, preview and snapshots show, and nothing else: fidelity, drift and accuracy are measured
on the answers as the engine gave them. Which policy holds is decided by the engine that answered the frame.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from agent.vision.decode import Classification, Prediction
from agent.vision.detections import Detections, FloatArray, Size
from agent.vision.preprocess import Geometry
from agent.vision.task import ServedFrame

Polygon = Sequence[Sequence[float]]  # corners (x, y), as shares of the picture's width and height
Region = tuple[float, float, float, float]  # left, top, right, bottom of the frame, as shares of the whole picture
Show = Callable[[ServedFrame], ServedFrame]


def as_served(served: ServedFrame) -> ServedFrame:
    """Return an answer as it is: where no policy holds."""
    return served


@dataclass(frozen=True)
class Policy:
    """The part of the answers that is shown under one engine.

    Args:
        score_threshold: Answers of a lower score are left out; None: none.
        classes: Numbers of the classes of interest; None: all.
        masks: By camera: a box is left out whose centre lies in one of these polygons.
    """

    score_threshold: float | None = None
    classes: frozenset[int] | None = None
    masks: Mapping[str, Sequence[Polygon]] = field(default_factory=dict)

    def within(self, regions: Mapping[str, Region]) -> Policy:
        """Return the policy with masks as shares of the frame, which is a region of the whole picture that they are of.

        regions: By camera; those of the other cameras are whole pictures.
        """
        masks = {
            camera: [_within(polygon, regions[camera]) for polygon in polygons] if camera in regions else polygons
            for camera, polygons in self.masks.items()
        }
        return replace(self, masks=masks)

    def is_passed(self, scores: FloatArray) -> NDArray[np.bool_]:
        """Mark the scores (n,) that reach the threshold."""
        if self.score_threshold is None:
            return np.ones(len(scores), np.bool_)
        passed: NDArray[np.bool_] = scores >= np.float32(self.score_threshold)
        return passed

    def is_wanted(self, boxes: FloatArray, classes: NDArray[np.int64], camera: str, size: Size) -> NDArray[np.bool_]:
        """Mark the boxes (n, 4), in frame pixels, that are of interest and in no mask, whatever their score.

        size: (height, width) of the frame.
        """
        wanted = _is_among(classes, self.classes)
        masks = self.masks.get(camera)
        if masks:
            centres = (boxes[:, :2] + boxes[:, 2:]).astype(np.float64) / (2.0 * size[1], 2.0 * size[0])
            for polygon in masks:
                wanted &= ~_is_inside(centres, np.array(polygon, np.float64))
        return wanted


def apply_policy(policy: Policy, prediction: Prediction, camera: str, geometry: Geometry | None) -> Prediction:
    """Return a prediction as the policy lets it be shown: with fewer boxes, or as a class that is withheld.

    geometry: As of ServedFrame; None: boxes are in frame pixels, and the policy has no masks. Raw outputs stay.
    """
    if isinstance(prediction, Classification):
        is_shown = policy.is_passed(np.array([prediction.score], np.float32))[0]
        is_shown &= _is_among(np.array([prediction.class_id]), policy.classes)[0]
        return prediction if is_shown else replace(prediction, is_withheld=True)
    if not isinstance(prediction, Detections):
        return prediction
    boxes, size = prediction.boxes, (1, 1)
    if geometry is not None:
        boxes, size = geometry.to_frame(boxes), (geometry.frame_height_px, geometry.frame_width_px)
    elif policy.masks.get(camera):
        raise ValueError("masks need the size of the frame, which a geometry has")
    return prediction[policy.is_passed(prediction.scores) & policy.is_wanted(boxes, prediction.classes, camera, size)]


def count_left_out(served: ServedFrame, shown: ServedFrame) -> int:
    """Return how many boxes, or classes, of an answer a policy has left out."""
    if isinstance(served.result, Detections) and isinstance(shown.result, Detections):
        return len(served.result) - len(shown.result)
    return int(isinstance(shown.result, Classification) and shown.result.is_withheld)


def _is_among(classes: NDArray[np.int64], wanted: Collection[int] | None) -> NDArray[np.bool_]:
    if wanted is None:
        return np.ones(len(classes), np.bool_)
    return np.isin(classes, list(wanted))


def _is_inside(points: NDArray[np.float64], polygon: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Mark the points (n, 2) in a polygon (corners, 2), by the even-odd rule, as camera.masks are painted.

    Counts the edges that a ray to the right crosses.
    """
    x, y = points[:, :1], points[:, 1:]
    starts, ends = polygon, np.roll(polygon, -1, axis=0)
    spans = (starts[:, 1] > y) != (ends[:, 1] > y)
    rise = np.where(starts[:, 1] == ends[:, 1], 1.0, ends[:, 1] - starts[:, 1])  # a flat edge spans no height
    crossings = starts[:, 0] + (y - starts[:, 1]) * (ends[:, 0] - starts[:, 0]) / rise
    inside: NDArray[np.bool_] = ((spans & (x < crossings)).sum(axis=1) % 2).astype(np.bool_)
    return inside


def _within(polygon: Polygon, region: Region) -> Polygon:
    left, top, right, bottom = region
    return [((x - left) / (right - left), (y - top) / (bottom - top)) for x, y in polygon]
