"""Turn DBNet's map of probabilities into oriented boxes of text, for the task obb.

Liao et al. (AAAI 2020) train the map on text that has been shrunk, so that lines stay apart: each region of it is grown
again. The steps and their numbers are those of PaddleOCR's detector (DBPostProcess).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from agent.vision.boxes import FloatArray, Size
from agent.vision.decoders import Outputs, no_fit
from agent.vision.tasks.maps import find_maps

_TEXT = 0.3  # the probability from which on a cell belongs to a region
_GROWN = 1.6  # a region grows by this times its area, by its outline
_LEAST_SIDE, _LEAST_GROWN = 3.0, 5.0  # cells; shorter ones are noise
_MOST_REGIONS = 1000

Contour = NDArray[np.int32]


def text_regions(outputs: Outputs, size: Size, score_threshold: float) -> tuple[FloatArray, FloatArray]:
    """Return the corners float32 (n, 4, 2), in pixels of the input, and the scores float32 (n,) of regions of text.

    A region is what hangs together above 0.3, enclosed by its least rectangle. Its score is the mean probability in
    that rectangle, and has to reach the threshold. Each side then moves outwards by 1.6 times area / perimeter of the
    rectangle. Of more than a thousand regions the largest count.

    Args:
        outputs: One map of probabilities (1, rows, columns), (rows, columns, 1) or (rows, columns).
        size: (height, width) of the network input in pixels.
        score_threshold: In [0, 1].

    Raises ConfigError (`decoder.shape`) where no output, or several, are such a map.
    """
    probabilities = _find_map(outputs, size)
    rows, columns = probabilities.shape
    mask = (probabilities > _TEXT).view(np.uint8)
    contours, _ = cv2.findContours(mask, cv2.RETR_LIST, cv2.CHAIN_APPROX_SIMPLE)
    found: list[FloatArray] = []
    scores: list[float] = []
    for contour in _largest(contours):
        rectangle = cv2.minAreaRect(contour)
        if min(rectangle[1]) < _LEAST_SIDE:
            continue
        score = _mean_inside(probabilities, cv2.boxPoints(rectangle))
        if not score >= score_threshold:  # nor NaN
            continue
        grown = _grown(rectangle)
        if min(grown[1]) >= _LEAST_GROWN:
            found.append(np.asarray(cv2.boxPoints(grown), np.float32))
            scores.append(score)
    # A contour goes through the middles of cells.
    corners = np.array(found, np.float32).reshape(-1, 4, 2) + np.float32(0.5)
    return corners * np.array((size[1] / columns, size[0] / rows), np.float32), np.array(scores, np.float32)


def _find_map(outputs: Outputs, size: Size) -> FloatArray:
    maps = find_maps({name: each.shape for name, each in outputs.items()}, size, channels=1)
    if len(maps) != 1:
        raise no_fit(outputs, "one map of probabilities (batch, 1, rows, columns), in the proportions of the input")
    ((name, axis),) = maps
    return np.ascontiguousarray(outputs[name] if axis is None else outputs[name].squeeze(axis), np.float32)


def _largest(contours: Sequence[Any]) -> Sequence[Contour]:
    """Return the contours that may enclose something, a thousand at most: a broken engine may emit a cell in two."""
    wide = [each for each in contours if len(each) > 2]
    return wide if len(wide) <= _MOST_REGIONS else sorted(wide, key=cv2.contourArea, reverse=True)[:_MOST_REGIONS]


def _mean_inside(probabilities: FloatArray, corners: Any) -> float:
    """Return the mean of the cells in a convex shape, its border included; corners: (4, 2), in cells."""
    rows, columns = probabilities.shape
    bounds = np.clip((*np.floor(corners.min(axis=0)), *np.ceil(corners.max(axis=0))), 0, (columns - 1, rows - 1) * 2)
    left, top, right, bottom = bounds.astype(int).tolist()
    mask = np.zeros((bottom - top + 1, right - left + 1), np.uint8)
    cv2.fillPoly(mask, [np.rint(corners - (left, top)).astype(np.int32)], (1,))
    return float(cv2.mean(probabilities[top : bottom + 1, left : right + 1], mask)[0])


def _grown(rectangle: Any) -> Any:
    """Return a rectangle (centre, sides, angle) whose sides have moved outwards.

    That is the least rectangle around what its offset with round corners covers, which PaddleOCR computes.
    """
    centre, (width, height), angle = rectangle
    more = _GROWN * width * height / (width + height)  # twice area / perimeter: both ends of a side move
    return centre, (width + more, height + more), angle
