"""The built-in decoders of heads that leave it to others to add a grid: one row of outputs per cell.

They are called as those of `agent.decoders`. Cells go stride by stride, the finest map first, each row by row; a map
has ceil(side / stride) cells along a side of the input.
"""

from __future__ import annotations

import functools

import numpy as np

from agent.decoders import Outputs, Size, corners, every_class, find_output, no_fit
from agent.detections import Detections, FloatArray
from agent.errors import ConfigError
from engines.backend import Array

_STRIDES = (8, 16, 32, 64)
_NANODET_BINS = 8  # reg_max + 1 of NanoDet's published models, all but nanodet-g


def yolox(outputs: Outputs, size: Size, score_threshold: float) -> Detections:
    """YOLOX without decoding in the graph (Megvii, demo_utils.demo_postprocess): (N, 5 + classes).

    Per grid cell: centre offset and log size in strides, objectness and a sigmoid per class.
    """
    expected = "an undecoded YOLOX output (batch, N, 5 + classes)"
    output = find_output(outputs, expected, lambda shape: len(shape) == 2 and shape[1] > 5)
    grid, strides = _grid(size, len(output), "YOLOX")
    likely = (output[:, 4] > score_threshold).nonzero()[0]
    rows = output[likely].astype(np.float32, copy=False)
    centres = (rows[:, :2] + grid[likely]) * strides[likely]
    sides = np.exp(rows[:, 2:4]) * strides[likely]
    return every_class(corners(centres, sides), rows[:, 4:5] * rows[:, 5:], score_threshold)


def nanodet(outputs: Outputs, size: Size, score_threshold: float) -> Detections:
    """NanoDet, not Plus (RangiLyu, gfl_head.py): distances from the middle of each cell, (column + 0.5) * stride.

    Per cell of strides 8, 16, 32: a sigmoid per class and, for each side of the box, reg_max + 1 logits over distances
    of 0 to reg_max strides (generalised focal loss, arXiv:2006.04388). Either one output (N, classes + 32), of reg_max
    7, or per stride classes (n, classes) and distances (n, 4 * (reg_max + 1)), whose names contain `dis`.
    """
    return _distances(outputs, size, score_threshold, np.float32(0.5))


def nanodet_plus(outputs: Outputs, size: Size, score_threshold: float) -> Detections:
    """NanoDet-Plus (RangiLyu, nanodet_plus_head.py): as `nanodet`, with stride 64 besides.

    Its distances count from each cell's top left corner, column * stride: it dropped the half cell (its issue 373).
    """
    return _distances(outputs, size, score_threshold, np.float32(0.0))


def yunet(outputs: Outputs, size: Size, score_threshold: float) -> Detections:
    """YuNet of OpenCV Zoo, 2023 (OpenCV, face_detect.cpp, FaceDetectorYN): score = sqrt(class * objectness).

    Per stride 8, 16, 32 with n cells: class (n, 1), objectness (n, 1) and box (n, 4), centre offset from the cell's
    top left corner and log size, in strides. The landmarks (n, 10) are passed over. Class 0 is the face.
    """
    expected = "YuNet outputs per stride 8, 16, 32: class and objectness (batch, n, 1), box (batch, n, 4)"
    boxes = _finest_first([output for output in outputs.values() if output.shape[1:] == (4,)])
    columns = _finest_first([output for output in outputs.values() if output.shape[1:] == (1,)])
    counts = [len(output) for output in boxes]
    # Class and objectness are told from no other by shape, nor need be: the score is symmetric in them.
    if len(set(counts)) != 3 or [len(output) for output in columns] != [count for count in counts for _ in range(2)]:
        raise no_fit(outputs, expected)
    grid, strides = _grid(size, sum(counts), "YuNet")
    first, second = (np.concatenate(columns[index::2])[:, 0].clip(0.0, 1.0) for index in (0, 1))
    scores = np.sqrt(first.astype(np.float32) * second.astype(np.float32))
    likely = (scores > score_threshold).nonzero()[0]
    rows = np.concatenate(boxes)[likely].astype(np.float32, copy=False)
    centres = (grid[likely] + rows[:, :2]) * strides[likely]
    sides = np.exp(rows[:, 2:]) * strides[likely]
    return Detections(boxes=corners(centres, sides), classes=np.zeros(len(likely), np.int64), scores=scores[likely])


def _distances(outputs: Outputs, size: Size, score_threshold: float, offset: np.float32) -> Detections:
    """Boxes from the mean distances of their sides to a point in each cell, `offset` cells from its top left corner.

    They are cut at the input's border, as NanoDet cuts them.
    """
    scores, sides = _nanodet_outputs(outputs)
    grid, strides = _grid(size, len(scores), "NanoDet")
    likely = (scores.max(axis=1) > score_threshold).nonzero()[0]
    logits = sides[likely].astype(np.float32).reshape(len(likely), 4, sides.shape[1] // 4)
    weights = np.exp(logits - logits.max(axis=2, keepdims=True))
    bins = np.arange(weights.shape[2], dtype=np.float32)
    distances = (weights @ bins) / weights.sum(axis=2) * strides[likely]
    points = (grid[likely] + offset) * strides[likely]
    border = np.array((size[1], size[0]) * 2, np.float32)
    boxes = np.clip(np.hstack((points - distances[:, :2], points + distances[:, 2:])), 0.0, border)
    return every_class(boxes, scores[likely].astype(np.float32, copy=False), score_threshold)


def _nanodet_outputs(outputs: Outputs) -> tuple[Array, Array]:
    """Scores (N, classes) and logits of the sides (N, 4 * bins) of all strides, finest first."""
    expected = (
        "a NanoDet output (batch, N, classes + 32), or per stride cls_pred (batch, n, classes) and dis_pred "
        "(batch, n, 4 * (reg_max + 1))"
    )
    if len(outputs) == 1:
        output = find_output(outputs, expected, lambda shape: len(shape) == 2 and shape[1] > 4 * _NANODET_BINS)
        return output[:, : -4 * _NANODET_BINS], output[:, -4 * _NANODET_BINS :]
    if any(output.ndim != 2 or not output.shape[1] for output in outputs.values()):
        raise no_fit(outputs, expected)
    scores = _finest_first([outputs[name] for name in outputs if "dis" not in name.lower()])
    sides = _finest_first([outputs[name] for name in outputs if "dis" in name.lower()])
    widths = [{output.shape[1] for output in maps} for maps in (scores, sides)]
    are_pairs = [len(output) for output in scores] == [len(output) for output in sides]
    if not are_pairs or [len(each) for each in widths] != [1, 1] or widths[1].pop() % 4:
        raise no_fit(outputs, expected)
    return np.concatenate(scores), np.concatenate(sides)


def _finest_first(levels: list[Array]) -> list[Array]:
    """Outputs (n, columns) of several strides, the map with most cells first."""
    return sorted(levels, key=len, reverse=True)


@functools.lru_cache(maxsize=8)
def _grid(size: Size, count: int, peer: str) -> tuple[FloatArray, FloatArray]:
    """Cell coordinates (count, 2) and strides (count, 1) of the feature maps, finest first.

    The strides are the first of 8, 16, 32, 64 whose maps have `count` cells together.
    """
    cells: list[FloatArray] = []
    strides: list[FloatArray] = []
    total = 0
    for stride in _STRIDES:
        rows, columns = (-(-side // stride) for side in size)
        y, x = np.divmod(np.arange(rows * columns, dtype=np.float32), np.float32(columns))
        cells.append(np.stack((x, y), axis=1))
        strides.append(np.full((rows * columns, 1), stride, np.float32))
        total += rows * columns
        if total == count:
            return np.concatenate(cells), np.concatenate(strides)
    raise ConfigError(
        "decoder.shape",
        f"{count} {peer} cells for an input of {size[0]}x{size[1]}",
        f"as many as maps of strides {', '.join(map(str, _STRIDES))}, or of the first of these, have",
        "check the model's input size, or name a decoder of your own as 'package.module:function'",
    )
