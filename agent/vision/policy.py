"""Show of an answer what the board's owner wants to see under one engine: its policy.

A policy changes what results, preview and snapshots show, and nothing else: fidelity, drift and accuracy are measured
on the answers as the engine gave them. Which policy holds is decided by the engine that answered the frame.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from agent.vision.boxes import FloatArray, Size

Polygon = Sequence[Sequence[float]]  # corners (x, y), as shares of the picture's width and height
Region = tuple[float, float, float, float]  # left, top, right, bottom of the frame, as shares of the whole picture


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

    def is_of_interest(self, classes: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Mark the classes (n,) of interest."""
        if self.classes is None:
            return np.ones(len(classes), np.bool_)
        return np.isin(classes, list(self.classes))

    def is_wanted(
        self, classes: NDArray[np.int64], boxes: FloatArray | None, camera: str, size: Size
    ) -> NDArray[np.bool_]:
        """Mark the objects that are of interest and in no mask, whatever their score.

        Args:
            classes: (n,).
            boxes: (n, 4), in frame pixels; None of objects that are in no place, which no mask is for.
            camera: Of the frame.
            size: (height, width) of the frame.
        """
        wanted = self.is_of_interest(classes)
        masks = self.masks.get(camera)
        if masks and boxes is not None:
            centres = (boxes[:, :2] + boxes[:, 2:]).astype(np.float64) / (2.0 * size[1], 2.0 * size[0])
            for polygon in masks:
                wanted &= ~_is_inside(centres, np.array(polygon, np.float64))
        return wanted


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
