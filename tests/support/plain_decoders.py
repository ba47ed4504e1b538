"""The peers' decoders and suppression, in loops over floats, which share nothing with ours."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from agent.vision.detections import Detections
from engines.interface import Array

Box = tuple[float, float, float, float]
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
