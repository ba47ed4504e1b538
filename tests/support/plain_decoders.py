"""The peers' decoders and suppression, in loops over floats, which share nothing with ours."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from agent.vision.detections import Detections
from engines.interface import Array

Box = tuple[float, float, float, float]
Point = tuple[float, float]
Row = tuple[Box, int, float]  # box, class, score


def around(x: float, y: float, width: float, height: float) -> Box:
    return x - width / 2, y - height / 2, x + width / 2, y + height / 2


def cells(height: int, width: int, strides: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(stride, row, column), finest map first."""
    for stride in strides:
        for row in range(math.ceil(height / stride)):
            for column in range(math.ceil(width / stride)):
                yield stride, row, column


def yolox(output: Array, size: tuple[int, int], least: float) -> list[Row]:
    """Megvii's demo_postprocess: offsets and log sizes in strides; every class whose product is above."""
    found: list[Row] = []
    for values, (stride, row, column) in zip(output, cells(*size, (8, 16, 32)), strict=True):
        if values[4] > least:
            x, y, w, h = map(float, values[:4])
            box = around((x + column) * stride, (y + row) * stride, math.exp(w) * stride, math.exp(h) * stride)
            found += [(box, k, float(values[4] * s)) for k, s in enumerate(values[5:]) if values[4] * s > least]
    return found


def yolov8(output: Array, size: tuple[int, int], least: float) -> list[Row]:  # noqa: ARG001 - all are called alike
    """Ultralytics: a column per place; every class whose score is above."""
    return [
        (around(*map(float, column[:4])), index, float(score))
        for column in output.T
        for index, score in enumerate(column[4:])
        if score > least
    ]


def end2end(output: Array, size: tuple[int, int], least: float) -> list[Row]:  # noqa: ARG001 - all are called alike
    """Rows x1 y1 x2 y2 score class."""
    return [((float(a), float(b), float(c), float(d)), int(k), float(s)) for a, b, c, d, s, k in output if s > least]


def detr(logits: Array, boxes: Array, size: tuple[int, int], least: float) -> list[Row]:
    """DETR's PostProcess: a softmax, the last class left out; a query is an object of its strongest class."""
    height, width = size
    found: list[Row] = []
    for values, (x, y, w, h) in zip(logits.tolist(), boxes.tolist(), strict=True):
        powers = [math.exp(value - max(values)) for value in values]
        *scores, _ = (power / sum(powers) for power in powers)
        if max(scores) > least:
            found.append((around(x * width, y * height, w * width, h * height), scores.index(max(scores)), max(scores)))
    return found


def rtdetr(logits: Array, boxes: Array, size: tuple[int, int], least: float) -> list[Row]:
    """RT-DETR's postprocessor: a sigmoid; every class whose score is above."""
    height, width = size
    found: list[Row] = []
    for values, (x, y, w, h) in zip(logits.tolist(), boxes.tolist(), strict=True):
        box = around(x * width, y * height, w * width, h * height)
        scores = [1 / (1 + math.exp(-value)) for value in values]
        found += [(box, k, score) for k, score in enumerate(scores) if score > least]
    return found


def ssd(boxes: Array, scores: Array, size: tuple[int, int], least: float) -> list[Row]:
    """Fractions of the input; column 0 is the background; of a box the first of its strongest classes."""
    height, width = size
    found: list[Row] = []
    for (x1, y1, x2, y2), (_, *classes) in zip(boxes.tolist(), scores.tolist(), strict=True):
        best = max(classes)
        if best > least:
            found.append(((x1 * width, y1 * height, x2 * width, y2 * height), classes.index(best), best))
    return found


def torchvision(boxes: Array, labels: Array, scores: Array, least: float) -> list[Row]:
    """Return the objects of torchvision's models above a score."""
    return [
        (tuple(map(float, box)), int(label), float(score))  # type: ignore[misc]  # four of them
        for box, label, score in zip(boxes, labels, scores, strict=True)
        if score > least
    ]


def fastestdet(output: Array, size: tuple[int, int], least: float) -> list[Row]:
    """FastestDet's handle_preds: tanh of the offsets, sigmoid of the sides, objectness^0.6 * class^0.4."""
    (height, width), (_, rows, columns) = size, output.shape
    found: list[Row] = []
    for row in range(rows):
        for column in range(columns):
            objectness, dx, dy, w, h, *classes = output[:, row, column].tolist()
            score = objectness**0.6 * max(classes) ** 0.4
            if score > least:
                x, y = (column + math.tanh(dx)) / columns * width, (row + math.tanh(dy)) / rows * height
                sides = (1 / (1 + math.exp(-w))) * width, (1 / (1 + math.exp(-h))) * height
                found.append((around(x, y, *sides), classes.index(max(classes)), score))
    return found


def softmax_top_1(output: Array) -> tuple[int, float]:
    """The class of the largest logit, and its probability."""
    logits = output.ravel().tolist()
    powers = [math.exp(logit - max(logits)) for logit in logits]
    return logits.index(max(logits)), max(powers) / sum(powers)


def iou(a: Box, b: Box) -> float:
    """Intersection over union; 0 where either has no area."""
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    if width <= 0 or height <= 0:
        return 0.0
    areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (a, b)]
    return width * height / (sum(areas) - width * height)


def is_empty(box: Box) -> bool:
    return box[2] <= box[0] or box[3] <= box[1]


def suppressed(rows: Sequence[Row], threshold: float, nms: str) -> list[int]:
    """Indices of what greedy suppression keeps, best first, equal scores in their order."""
    kept: list[int] = []
    for index in sorted(range(len(rows)), key=lambda index: -rows[index][2]):
        box, label, _ = rows[index]
        rivals = [rows[k] for k in kept if nms == "agnostic" or (nms == "per-class" and rows[k][1] == label)]
        if is_empty(box) or all(is_empty(other[0]) or iou(box, other[0]) <= threshold for other in rivals):
            kept.append(index)
    return kept


def assert_same(found: Detections, rows: Sequence[Row]) -> None:
    """Compare detections with these rows, in this order, but for float32."""
    assert found.classes.tolist() == [label for _, label, _ in rows]
    assert np.allclose(found.scores, [score for _, _, score in rows], rtol=2e-5)
    expected = np.array([box for box, _, _ in rows], np.float64).reshape(-1, 4)
    assert np.allclose(found.boxes, expected, rtol=1e-4, atol=1e-2)


def dbnet(map_: Array, size: tuple[int, int], least: float) -> list[tuple[list[Point], float]]:
    """Decode a map of probabilities cell by cell: corners and score of each region, for regions without holes."""
    rows, columns = map_.shape
    found = []
    for region in _regions(map_ > 0.3):
        centre, sides, axis = _least_rectangle(_hull(region))
        (ux, uy), half = axis, (sides[0] / 2, sides[1] / 2)
        signs = ((-1, -1), (1, -1), (1, 1), (-1, 1))
        around_it = [
            (centre[0] + s * half[0] * ux - t * half[1] * uy, centre[1] + s * half[0] * uy + t * half[1] * ux)
            for s, t in signs
        ]
        whole = [(float(round(x)), float(round(y))) for x, y in around_it]
        inside = [float(map_[y, x]) for y, x in np.ndindex(rows, columns) if _is_covered(whole, x, y)]
        score = sum(inside) / len(inside)
        if min(sides) < 3 or score < least:
            continue
        more = 1.6 * sides[0] * sides[1] / (2 * (sides[0] + sides[1]))
        along, across = half[0] + more, half[1] + more
        corners = [
            (centre[0] + s * along * ux - t * across * uy + 0.5, centre[1] + s * along * uy + t * across * ux + 0.5)
            for s, t in signs
        ]
        found.append(([(x * size[1] / columns, y * size[0] / rows) for x, y in corners], score))
    return found


def _is_covered(corners: list[Point], x: int, y: int) -> bool:
    """Return whether a cell is in a convex shape, or on its border: a line covers the nearest cell in each step."""
    turns = []
    for (ax, ay), (bx, by) in zip(corners, [*corners[1:], corners[0]], strict=True):
        turns.append((bx - ax) * (y - ay) - (by - ay) * (x - ax))
        steps = int(max(abs(bx - ax), abs(by - ay), 1))
        for step in range(steps + 1):
            at = ax + (bx - ax) * step / steps, ay + (by - ay) * step / steps
            if abs(at[0] - x) <= 0.5 and abs(at[1] - y) <= 0.5:
                return True
    return min(turns) >= 0 or max(turns) <= 0


def _regions(mask: NDArray[np.bool_]) -> Iterator[list[Point]]:
    left = {(int(x), int(y)) for y, x in np.argwhere(mask)}
    while left:
        waiting, region = [left.pop()], []
        while waiting:
            x, y = waiting.pop()
            region.append((float(x), float(y)))
            near = {(x + dx, y + dy) for dx in (-1, 0, 1) for dy in (-1, 0, 1)} & left
            left -= near
            waiting.extend(near)
        yield region


def _hull(points: list[Point]) -> list[Point]:
    """Return the convex hull, by Andrew's monotone chain."""
    halves = []
    for ordered in (sorted(points), sorted(points, reverse=True)):
        chain: list[Point] = []
        for x, y in ordered:
            while len(chain) > 1:
                (ax, ay), (bx, by) = chain[-2:]
                if (bx - ax) * (y - ay) - (by - ay) * (x - ax) > 0:
                    break
                chain.pop()
            chain.append((x, y))
        halves += chain[:-1]
    return halves


def _least_rectangle(hull: list[Point]) -> tuple[Point, Point, Point]:
    """Return centre, sides and the direction of the first side: the least rectangle lies on a side of the hull."""
    best: tuple[float, Point, Point, Point] | None = None
    for (ax, ay), (bx, by) in zip(hull, [*hull[1:], hull[0]], strict=True):
        length = math.hypot(bx - ax, by - ay)
        ux, uy = (bx - ax) / length, (by - ay) / length
        along = [x * ux + y * uy for x, y in hull]
        across = [y * ux - x * uy for x, y in hull]
        sides = max(along) - min(along), max(across) - min(across)
        middle = (max(along) + min(along)) / 2, (max(across) + min(across)) / 2
        centre = middle[0] * ux - middle[1] * uy, middle[0] * uy + middle[1] * ux
        if best is None or sides[0] * sides[1] < best[0]:
            best = sides[0] * sides[1], centre, sides, (ux, uy)
    assert best is not None
    return best[1:]
