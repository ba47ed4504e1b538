"""Decode the outputs of known detectors: one image's outputs in, candidate boxes in network pixels out.

Every decoder of this module has the same arguments and the same result:

    outputs          arrays by name, without their batch axis
    size             (height, width) of the network input in pixels
    score_threshold  in [0, 1]; only candidates of a higher score are returned
    Detections       boxes (n, 4) x1 y1 x2 y2 in pixels of the network input, before overlaps are suppressed

A decoder identifies outputs by shape, since exporters name them freely, and raises ConfigError (`decoder.shape`) when
none fits.

To add a decoder: write its function here, and enter it in `BUILTIN_DECODERS` at the end of this module.
`agent.vision.tasks.detect` does the rest when it serves, and opens decoders that users keep in packages of their own.
`tared inspect` recognises a model by `CONVENTIONS` of `agent.inspection.spec_guess`.

`every_class`, `corners`, `find_output` and `no_fit` are for decoders of your own, too. A whole one, for a model whose
one output holds (N, 5) x1 y1 x2 y2 score:

    def decode(outputs, size, score_threshold):
        rows = find_output(outputs, "an output (batch, N, 5)", lambda shape: len(shape) == 2 and shape[1] == 5)
        return every_class(rows[:, :4], rows[:, 4:], score_threshold)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agent.common.errors import ConfigError
from agent.vision.boxes import FloatArray, Size
from agent.vision.detections import Detections
from engines.interface import Array

Outputs = Mapping[str, Array]
CandidateDecoder = Callable[[Outputs, Size, float], Detections]

_STRIDES = (8, 16, 32, 64)
_NANODET_BINS = 8  # reg_max + 1 of NanoDet's published models, all but nanodet-g
# FastestDet's channels before tanh; only the sides are halved, since sigmoid(x) = (1 + tanh(x / 2)) / 2.
_HALVED = np.array([[1.0], [1.0], [0.5], [0.5]], np.float32)


@dataclass(frozen=True, eq=False, kw_only=True)
class Candidates(Detections):
    """Detections with what else the model says of each.

    Args:
        extras: float32 (n, e): factors of mask prototypes, key points, or an angle, as the task reads them.
    """

    extras: FloatArray


def yolox(outputs: Outputs, size: Size, score_threshold: float) -> Detections:
    """Decode YOLOX without decoding in the graph (Megvii, demo_utils.demo_postprocess): (N, 5 + classes).

    A grid cell holds the centre offset and log size in strides, the objectness and a sigmoid per class.
    """
    expected = "an undecoded YOLOX output (batch, N, 5 + classes)"
    output = find_output(outputs, expected, lambda shape: len(shape) == 2 and shape[1] > 5)
    grid, strides = _stride_grid(size, len(output), "YOLOX")
    likely = (output[:, 4] > score_threshold).nonzero()[0]
    rows = output[likely].astype(np.float32, copy=False)
    centres = (rows[:, :2] + grid[likely]) * strides[likely]
    sides = np.exp(rows[:, 2:4]) * strides[likely]
    return every_class(corners(centres, sides), rows[:, 4:5] * rows[:, 5:], score_threshold)


def yolov5(outputs: Outputs, _size: Size, score_threshold: float, extras: int = 0) -> Detections:
    """Decode Ultralytics YOLOv5 with its decoding in the graph (export.py), YOLOv7 too: (N, 5 + classes).

    A row holds the box cx cy w h in pixels, the objectness and a sigmoid per class; score = objectness * class, as in
    its non_max_suppression. Maps of rank 4, which older exports also put out, are ignored.

    extras: columns behind the classes, see `Candidates`.
    """
    expected = f"a decoded YOLOv5 output (batch, N, 5 + classes{_and_extras(extras)})"
    output = find_output(outputs, expected, lambda shape: len(shape) == 2 and shape[1] > 5 + extras)
    rows = output[output[:, 4] > score_threshold].astype(np.float32, copy=False)
    end = rows.shape[1] - extras
    scores = rows[:, 4:5] * rows[:, 5:end]
    return every_class(corners(rows[:, :2], rows[:, 2:4]), scores, score_threshold, rows[:, end:])


def yolov8(outputs: Outputs, _size: Size, score_threshold: float, extras: int = 0) -> Detections:
    """Decode Ultralytics' default head since YOLOv8, YOLOv9 and YOLO11 too: (4 + classes, N), cx cy w h in pixels.

    extras: channels behind the classes, see `Candidates`.

    >>> output = np.zeros((6, 100), np.float32)               # two classes, a hundred candidates
    >>> output[:, 7] = 50.0, 40.0, 20.0, 10.0, 0.1, 0.9
    >>> found = yolov8({"output0": output}, (96, 96), 0.3)
    >>> found.boxes.tolist(), found.classes.tolist()
    ([[40.0, 35.0, 60.0, 45.0]], [1])
    """
    expected = f"a YOLOv8 output (batch, 4 + classes{_and_extras(extras)}, N), N above its channels"
    output = find_output(outputs, expected, lambda shape: len(shape) == 2 and 4 + extras < shape[0] < shape[1])
    end = len(output) - extras
    likely = (output[4:end].max(axis=0) > score_threshold).nonzero()[0]
    rows = output[:, likely].T.astype(np.float32, copy=False)
    return every_class(corners(rows[:, :2], rows[:, 2:4]), rows[:, 4:end], score_threshold, rows[:, end:])


def end2end(outputs: Outputs, _size: Size, score_threshold: float, extras: int = 0) -> Detections:
    """Decode a graph that suppresses by itself, or needs not to (YOLOv10, YOLO26): (N, 6) x1 y1 x2 y2 score class.

    RT-DETR, D-FINE and DEIM, exported with their postprocessor, put out labels (N,), boxes (N, 4) and scores (N,).

    extras: columns behind the class, see `Candidates`.
    """
    expected = f"an end-to-end output (batch, N, 6{_and_extras(extras)})"
    if not extras:
        expected += ", or labels (batch, N), boxes (batch, N, 4) and scores (batch, N)"
        if (judged := _judged(outputs)) is not None:
            boxes, classes, scores = judged
            sure = (scores > score_threshold).nonzero()[0]
            sure_boxes, sure_scores = (each[sure].astype(np.float32) for each in (boxes, scores))
            return Detections(boxes=sure_boxes, classes=classes[sure].astype(np.int64), scores=sure_scores)
    output = find_output(outputs, expected, lambda shape: len(shape) == 2 and shape[1] == 6 + extras)
    rows = output[output[:, 4] > score_threshold].astype(np.float32, copy=False)
    boxes, classes, scores = rows[:, :4], rows[:, 5].astype(np.int64), rows[:, 4]
    if not extras:
        return Detections(boxes=boxes, classes=classes, scores=scores)
    return Candidates(boxes=boxes, classes=classes, scores=scores, extras=rows[:, 6:])


def _judged(outputs: Outputs) -> tuple[Array, Array, Array] | None:
    """Return boxes (N, 4), labels (N,) and scores (N,), each an output of its own; None where there are none such."""
    boxes = [output for output in outputs.values() if output.shape[1:] == (4,)]
    rows = {name: output for name, output in outputs.items() if output.ndim == 1}
    are_labels = {name: output.dtype.kind in "iu" or "label" in name.lower() for name, output in rows.items()}
    labels, scores = ([rows[name] for name in rows if are_labels[name] is wanted] for wanted in (True, False))
    if [len(each) for each in (boxes, labels, scores)] != [1, 1, 1] or len({*map(len, boxes + labels + scores)}) != 1:
        return None
    return boxes[0], labels[0], scores[0]


def detr(outputs: Outputs, size: Size, score_threshold: float) -> Detections:
    """Decode the original DETR (Carion et al., arXiv:2005.12872; transformers' DetrForObjectDetection).

    A query has logits (Q, classes + 1), of which a softmax makes scores, and a box (Q, 4) cx cy w h as fractions of the
    input. The last logit says that there is no object. A query is an object of its strongest class.
    """
    logits, boxes = _queries(outputs, "DETR outputs: logits (batch, Q, classes + 1) and boxes (batch, Q, 4)", 2)
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    scores = weights[:, :-1] / weights.sum(axis=1, keepdims=True)
    classes = scores.argmax(axis=1)
    best = scores[np.arange(len(scores)), classes]
    sure = (best > score_threshold).nonzero()[0]
    return Detections(boxes=_in_pixels(boxes[sure], size), classes=classes[sure], scores=best[sure])


def rtdetr(outputs: Outputs, size: Size, score_threshold: float) -> Detections:
    """Decode a DETR whose classes are judged each by itself: RT-DETR, D-FINE, RF-DETR, Deformable and Conditional DETR.

    A query has logits (Q, classes), of which a sigmoid makes scores, and a box (Q, 4) cx cy w h as fractions of the
    input. A last logit without a class, as RF-DETR has one, stays low by its training.

    Ultralytics' RT-DETR (RTDETRDecoder) has one output, with the sigmoid in it: (Q, 6) cx cy w h score class; in older
    exports (Q, 4 + classes). Of two classes both have 6 columns; a class is a whole number in every row.
    """
    if len(outputs) == 1:
        expected = "RT-DETR outputs: logits (batch, Q, classes) and boxes (batch, Q, 4), or one (batch, Q, 4 + classes)"
        rows = find_output(outputs, expected, lambda shape: len(shape) == 2 and shape[1] > 4).astype(np.float32)
        if rows.shape[1] == 6 and (rows[:, 5] == np.floor(rows[:, 5])).all():
            rows = rows[rows[:, 4] > score_threshold]
            boxes, classes = _in_pixels(rows[:, :4], size), rows[:, 5].astype(np.int64)
            return Detections(boxes=boxes, classes=classes, scores=rows[:, 4])
        return every_class(_in_pixels(rows[:, :4], size), rows[:, 4:], score_threshold)
    logits, boxes = _queries(outputs, "RT-DETR outputs: logits (batch, Q, classes) and boxes (batch, Q, 4)", 1)
    likely = (_sigmoid(logits.max(axis=1)) > score_threshold).nonzero()[0]
    return every_class(_in_pixels(boxes[likely], size), _sigmoid(logits[likely]), score_threshold)


def _queries(outputs: Outputs, expected: str, fewest: int) -> tuple[FloatArray, FloatArray]:
    """Return the logits of queries, at least `fewest` each, and their boxes (Q, 4)."""
    boxes, logits = _boxes_and_scores(outputs, expected, fewest)
    return logits.astype(np.float32), boxes.astype(np.float32)


def _sigmoid(logits: FloatArray) -> FloatArray:
    """Return 1 / (1 + exp(-x)), by powers that cannot overflow."""
    scores: FloatArray = np.exp(np.minimum(logits, np.float32(0.0))) / (np.float32(1.0) + np.exp(-np.abs(logits)))
    return scores


def _in_pixels(boxes: FloatArray, size: Size) -> FloatArray:
    """Return boxes x1 y1 x2 y2 in pixels from (n, 4) cx cy w h as fractions of the input."""
    sides = np.array((size[1], size[0]), np.float32)
    return corners(boxes[:, :2] * sides, boxes[:, 2:] * sides)


def ssd(outputs: Outputs, size: Size, score_threshold: float) -> Detections:
    """Decode SSD with its box decoding in the graph (UltraFace): boxes (N, 4) and scores (N, 1 + classes).

    Boxes are x1 y1 x2 y2 as fractions of the input. Column 0 of the scores is the background; classes are
    numbered from the column after it.
    """
    expected = "SSD outputs: boxes (batch, N, 4) and scores (batch, N, 1 + classes)"
    boxes, scores = _boxes_and_scores(outputs, expected, 2)
    likely = (scores[:, 1:].max(axis=1) > score_threshold).nonzero()[0]
    rows = scores[likely, 1:].astype(np.float32, copy=False)
    pixels = np.array((size[1], size[0]) * 2, np.float32)
    classes = rows.argmax(axis=1)
    best = rows[np.arange(len(rows)), classes]
    return Detections(boxes=boxes[likely].astype(np.float32) * pixels, classes=classes, scores=best)


def _boxes_and_scores(outputs: Outputs, expected: str, fewest: int) -> tuple[Array, Array]:
    """Return the outputs boxes (N, 4) and scores (N, columns), of at least `fewest` columns.

    Where both have 4 columns, the boxes are named so.
    """
    named = [name for name in outputs if outputs[name].shape[1:] == (4,)]
    boxes_name = next((name for name in named if len(named) == 1 or _is_of_boxes(name)), None)
    if boxes_name is None:
        raise no_fit(outputs, expected)
    boxes = outputs[boxes_name]
    rest = {name: outputs[name] for name in outputs if name != boxes_name}
    scores = find_output(
        rest, expected, lambda shape: len(shape) == 2 and len(boxes) == shape[0] and shape[1] >= fewest
    )
    return boxes, scores


def _is_of_boxes(name: str) -> bool:
    return "box" in name.lower() or name.lower() == "dets"  # RF-DETR's name


def fastestdet(outputs: Outputs, size: Size, score_threshold: float) -> Detections:
    """Decode FastestDet (dog-qiuqiu/FastestDet): (5 + classes, rows, columns), score = objectness^0.6 * class^0.4.

    A cell holds the objectness, the centre offset in cells (tanh), width and height (sigmoid), and a class softmax.
    """
    expected = "a FastestDet output (batch, 5 + classes, rows, columns)"
    output = find_output(outputs, expected, lambda shape: len(shape) == 3 and shape[0] > 5)
    cells = output.reshape(len(output), -1)
    likely = (cells[0] > score_threshold ** (1.0 / 0.6)).nonzero()[0]  # a class probability is at most 1
    columns = cells.take(likely, axis=1).astype(np.float32, copy=False)
    scores = columns[0] ** 0.6 * columns[5:].max(axis=0) ** 0.4
    is_sure = scores > score_threshold
    if not is_sure.all():
        likely, scores, columns = likely[is_sure], scores[is_sure], columns[:, is_sure]
    corner, cell_px, quarter_px = _grid(size, output.shape[1:])
    tanh = np.tanh(columns[1:5] * _HALVED)
    centres = (corner.take(likely, axis=1) + tanh[:2]) * cell_px
    half = (1.0 + tanh[2:]) * quarter_px  # half of each side, by a sigmoid that cannot overflow
    boxes = np.empty((len(likely), 4), np.float32)
    np.subtract(centres, half, out=boxes.T[:2])
    np.add(centres, half, out=boxes.T[2:])
    return Detections(boxes=boxes, classes=columns[5:].argmax(axis=0), scores=scores)


@functools.lru_cache(maxsize=8)
def _grid(size: Size, cells: tuple[int, int]) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return, of a map of `cells` (rows, columns), each cell's column and row (2, n), the sides of a cell and a quarter
    of the input's sides, the last two (2, 1) in pixels.
    """
    (height, width), (rows, columns) = size, cells
    cell_px = np.array([[width / columns], [height / rows]], np.float32)
    return np.ascontiguousarray(_cells(rows, columns).T), cell_px, np.array([[width / 4], [height / 4]], np.float32)


def nanodet(outputs: Outputs, size: Size, score_threshold: float) -> Detections:
    """Decode NanoDet, not Plus (RangiLyu, gfl_head.py): distances from each cell's middle, (column + 0.5) * stride.

    A cell of strides 8, 16, 32 holds a sigmoid per class and, for each side of the box, reg_max + 1 logits over
    distances of 0 to reg_max strides (generalised focal loss, arXiv:2006.04388). Either there is one output (N,
    classes + 32), of reg_max 7, or per stride the classes (n, classes) and the distances (n, 4 * (reg_max + 1)), whose
    names contain `dis`.
    """
    return _distances(outputs, size, score_threshold, np.float32(0.5))


def nanodet_plus(outputs: Outputs, size: Size, score_threshold: float) -> Detections:
    """Decode NanoDet-Plus (RangiLyu, nanodet_plus_head.py): as `nanodet`, with stride 64 too.

    Its distances count from each cell's top left corner, column * stride: it dropped the half cell (its issue 373).
    """
    return _distances(outputs, size, score_threshold, np.float32(0.0))


def _distances(outputs: Outputs, size: Size, score_threshold: float, offset: np.float32) -> Detections:
    """Decode boxes from the mean distances of their sides to a point `offset` cells from each cell's top left corner.

    The boxes are cut at the input's border, as NanoDet cuts them.
    """
    scores, sides = _nanodet_outputs(outputs)
    grid, strides = _stride_grid(size, len(scores), "NanoDet")
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
    """Return the scores (N, classes) and the logits of the sides (N, 4 * bins) of all strides, finest first."""
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


def yunet(outputs: Outputs, size: Size, score_threshold: float) -> Detections:
    """Decode YuNet of OpenCV Zoo, 2023 (OpenCV, face_detect.cpp, FaceDetectorYN): score = sqrt(class * objectness).

    Each stride 8, 16, 32 with n cells has outputs class (n, 1), objectness (n, 1) and box (n, 4): centre offset from
    the cell's top left corner and log size, in strides. The landmarks (n, 10) are ignored. Class 0 is the face.
    """
    expected = "YuNet outputs per stride 8, 16, 32: class and objectness (batch, n, 1), box (batch, n, 4)"
    boxes = _finest_first([output for output in outputs.values() if output.shape[1:] == (4,)])
    columns = _finest_first([output for output in outputs.values() if output.shape[1:] == (1,)])
    counts = [len(output) for output in boxes]
    # Class and objectness have the same shape and need not be distinguished: the score is symmetric in them.
    if len(set(counts)) != 3 or [len(output) for output in columns] != [count for count in counts for _ in range(2)]:
        raise no_fit(outputs, expected)
    grid, strides = _stride_grid(size, sum(counts), "YuNet")
    first, second = (np.concatenate(columns[index::2])[:, 0].clip(0.0, 1.0) for index in (0, 1))
    scores = np.sqrt(first.astype(np.float32) * second.astype(np.float32))
    likely = (scores > score_threshold).nonzero()[0]
    rows = np.concatenate(boxes)[likely].astype(np.float32, copy=False)
    centres = (grid[likely] + rows[:, :2]) * strides[likely]
    sides = np.exp(rows[:, 2:]) * strides[likely]
    return Detections(boxes=corners(centres, sides), classes=np.zeros(len(likely), np.int64), scores=scores[likely])


def torchvision(outputs: Outputs, _size: Size, score_threshold: float) -> Detections:
    """Decode torchvision's detection models: boxes (N, 4) x1 y1 x2 y2 in pixels, labels (N) and scores (N).

    They come without a batch axis, see `WITHOUT_BATCH`. Overlaps are suppressed in the graph. Class 0 is the
    background, as in torchvision's lists of categories.
    """
    boxes = [each for each in outputs.values() if each.shape[1:] == (4,)]
    labels = [each for each in outputs.values() if each.ndim == 1 and each.dtype.kind in "iu"]
    scores = [each for each in outputs.values() if each.ndim == 1 and each.dtype.kind == "f"]
    if [len(boxes), len(labels), len(scores)] != [1, 1, 1] or not len(boxes[0]) == len(labels[0]) == len(scores[0]):
        raise no_fit(outputs, "torchvision's outputs without a batch: boxes (N, 4), whole labels (N) and scores (N)")
    likely = (scores[0] > score_threshold).nonzero()[0]
    rows, classes = boxes[0][likely].astype(np.float32), labels[0][likely].astype(np.int64)
    return Detections(boxes=rows, classes=classes, scores=scores[0][likely].astype(np.float32))


def _finest_first(levels: list[Array]) -> list[Array]:
    """Sort the outputs (n, columns) of several strides, the map with most cells first."""
    return sorted(levels, key=len, reverse=True)


@functools.lru_cache(maxsize=8)
def _stride_grid(size: Size, count: int, peer: str) -> tuple[FloatArray, FloatArray]:
    """Return the cell coordinates (count, 2) and strides (count, 1) of the feature maps, finest first.

    The strides are the first of 8, 16, 32, 64 whose maps have `count` cells together.
    """
    maps = [tuple(-(-side // stride) for side in size) for stride in _STRIDES]
    sizes = [rows * columns for rows, columns in maps]
    for levels in range(1, len(maps) + 1):
        if sum(sizes[:levels]) == count:
            cells = [_cells(rows, columns) for rows, columns in maps[:levels]]
            each = np.repeat(np.array(_STRIDES[:levels], np.float32), sizes[:levels])
            return np.concatenate(cells), each[:, np.newaxis]
    raise ConfigError(
        "decoder.shape",
        f"{count} {peer} cells for an input of {size[0]}x{size[1]}",
        f"as many as maps of strides {', '.join(map(str, _STRIDES))}, or of the first of these, have",
        "check the model's input size, or name a decoder of your own as 'package.module:function'",
    )


def _cells(rows: int, columns: int) -> FloatArray:
    """Return the column and row of each cell of a map, row by row: (rows * columns, 2)."""
    y, x = np.divmod(np.arange(rows * columns, dtype=np.float32), np.float32(columns))
    return np.stack((x, y), axis=1)


def every_class(
    boxes: FloatArray, scores: FloatArray, score_threshold: float, extras: FloatArray | None = None
) -> Detections:
    """Return the candidates of every class above the threshold, since sigmoid scores are trained independently.

    Args:
        boxes: float32 (n, 4), x1 y1 x2 y2 in pixels of the network input.
        scores: float32 (n, classes), in [0, 1].
        score_threshold: Only candidates of a higher score are returned. A box may be returned for several classes.
        extras: float32 (n, e), what else each has; the result is `Candidates` where e > 0.

    >>> boxes = np.float32([[0, 0, 10, 10], [5, 5, 9, 9]])
    >>> found = every_class(boxes, np.float32([[0.9, 0.5], [0.1, 0.2]]), 0.3)
    >>> found.boxes.tolist(), found.classes.tolist()
    ([[0.0, 0.0, 10.0, 10.0], [0.0, 0.0, 10.0, 10.0]], [0, 1])
    """
    rows, classes = (scores > score_threshold).nonzero()
    if extras is None or not extras.shape[1]:
        return Detections(boxes=boxes[rows], classes=classes, scores=scores[rows, classes])
    return Candidates(boxes=boxes[rows], classes=classes, scores=scores[rows, classes], extras=extras[rows])


def corners(centres: FloatArray, sides: FloatArray) -> FloatArray:
    """Return boxes from their centres and sides.

    Args:
        centres: float32 (n, 2), x and y.
        sides: float32 (n, 2), width and height, in the same unit.

    Returns:
        float32 (n, 4), x1 y1 x2 y2.

    >>> corners(np.float32([[50.0, 40.0]]), np.float32([[20.0, 10.0]])).tolist()
    [[40.0, 35.0, 60.0, 45.0]]
    """
    half = sides * np.float32(0.5)
    boxes = np.empty((len(centres), 4), np.float32)
    np.subtract(centres, half, out=boxes[:, :2])
    np.add(centres, half, out=boxes[:, 2:])
    return boxes


def find_output(outputs: Outputs, expected: str, fits: Callable[[tuple[int, ...]], bool]) -> NDArray[np.floating]:
    """Return the one output whose shape fits.

    Args:
        outputs: Arrays by name, without their batch axis.
        expected: The outputs that the decoder takes, in words, for the error.
        fits: Returns True for a shape, without the batch axis, that the decoder takes.

    Raises ConfigError (`decoder.shape`) where none or several fit.
    """
    fitting = [output for output in outputs.values() if fits(output.shape)]
    if len(fitting) != 1:
        raise no_fit(outputs, expected)
    return fitting[0]  # an engine's detections are floats


def _and_extras(extras: int) -> str:
    return f" + {extras}" if extras else ""


def no_fit(outputs: Outputs, expected: str) -> ConfigError:
    """Return the error `decoder.shape`: these outputs are not as expected.

    Args:
        outputs: Arrays by name, without their batch axis.
        expected: The outputs that the decoder takes, in words.
    """
    shapes = ", ".join(f"{name} (batch, {', '.join(map(str, outputs[name].shape))})" for name in outputs)
    return ConfigError(
        "decoder.shape", f"outputs {shapes}", expected, "name the decoder that fits this model in its spec"
    )


EXTENDED_DECODERS: Mapping[str, Callable[[Outputs, Size, float, int], Detections]] = {
    "yolov5": yolov5,
    "yolov8": yolov8,
    "end2end": end2end,
}
BUILTIN_DECODERS: Mapping[str, CandidateDecoder] = {
    "yolox": yolox,
    "yolov5": yolov5,
    "yolov8": yolov8,
    "end2end": end2end,
    "detr": detr,
    "rtdetr": rtdetr,
    "ssd": ssd,
    "fastestdet": fastestdet,
    "nanodet": nanodet,
    "nanodet-plus": nanodet_plus,
    "yunet": yunet,
    "torchvision": torchvision,
}
WITHOUT_BATCH = frozenset(("torchvision",))  # their outputs are of the one image, and have no axis for it
