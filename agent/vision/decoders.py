"""The built-in detection decoders: one image's outputs in, candidate boxes in network pixels out.

Each takes the outputs by name without their batch axis, the input size (height, width) and the score
threshold, and returns the candidates above it, before suppression of overlaps. Outputs are identified by
shape, since exporters name them freely; ConfigError (`decoder.shape`) says when none fits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from agent.detections import Detections, FloatArray
from agent.errors import ConfigError
from engines.backend import Array

Size = tuple[int, int]  # (height, width) of the network input in pixels
Outputs = Mapping[str, Array]
CandidateDecoder = Callable[[Outputs, Size, float], Detections]

_HALVED = np.array([[1.0], [1.0], [0.5], [0.5]], np.float32)  # sides, as sigmoid(x) = (1 + tanh(x / 2)) / 2


def yolov5(outputs: Outputs, _size: Size, score_threshold: float) -> Detections:
    """Ultralytics YOLOv5 with its decoding in the graph (export.py), YOLOv7 too: (N, 5 + classes).

    Boxes cx cy w h in pixels, objectness and a sigmoid per class; score = objectness * class, as its
    non_max_suppression has it. Maps of rank 4, which older exports give beside it, are passed over.
    """
    expected = "a decoded YOLOv5 output (batch, N, 5 + classes)"
    output = find_output(outputs, expected, lambda shape: len(shape) == 2 and shape[1] > 5)
    rows = output[output[:, 4] > score_threshold].astype(np.float32, copy=False)
    scores = rows[:, 4:5] * rows[:, 5:]
    return every_class(corners(rows[:, :2], rows[:, 2:4]), scores, score_threshold)


def yolov8(outputs: Outputs, _size: Size, score_threshold: float) -> Detections:
    """Ultralytics' default head since YOLOv8 (YOLOv9, YOLO11 too): (4 + classes, N), boxes cx cy w h in pixels."""
    expected = "a YOLOv8 output (batch, 4 + classes, N), N above its channels"
    output = find_output(outputs, expected, lambda shape: len(shape) == 2 and 4 < shape[0] < shape[1])
    likely = (output[4:].max(axis=0) > score_threshold).nonzero()[0]
    rows = output[:, likely].T.astype(np.float32, copy=False)
    return every_class(corners(rows[:, :2], rows[:, 2:4]), rows[:, 4:], score_threshold)


def end2end(outputs: Outputs, _size: Size, score_threshold: float) -> Detections:
    """A graph that suppresses by itself, or needs not (YOLOv10): (N, 6) x1 y1 x2 y2 score class."""
    expected = "an end-to-end output (batch, N, 6)"
    output = find_output(outputs, expected, lambda shape: len(shape) == 2 and shape[1] == 6)
    rows = output[output[:, 4] > score_threshold].astype(np.float32, copy=False)
    return Detections(boxes=rows[:, :4], classes=rows[:, 5].astype(np.int64), scores=rows[:, 4])


def ssd(outputs: Outputs, size: Size, score_threshold: float) -> Detections:
    """SSD with its box decoding in the graph (UltraFace): boxes (N, 4) and scores (N, 1 + classes).

    Boxes are x1 y1 x2 y2 as fractions of the input. Column 0 of the scores is the background; classes are
    numbered from the column after it.
    """
    named = [name for name in outputs if outputs[name].shape[1:] == (4,)]
    boxes_name = next((name for name in named if len(named) == 1 or "box" in name.lower()), None)
    rest = {name: outputs[name] for name in outputs if name != boxes_name}
    expected = "SSD outputs: boxes (batch, N, 4) and scores (batch, N, 1 + classes)"
    if boxes_name is None:
        raise no_fit(outputs, expected)
    boxes = outputs[boxes_name]
    scores = find_output(rest, expected, lambda shape: len(shape) == 2 and shape[0] == len(boxes) and shape[1] > 1)
    likely = (scores[:, 1:].max(axis=1) > score_threshold).nonzero()[0]
    rows = scores[likely, 1:].astype(np.float32, copy=False)
    pixels = np.array((size[1], size[0]) * 2, np.float32)
    classes = rows.argmax(axis=1)
    best = rows[np.arange(len(rows)), classes]
    return Detections(boxes=boxes[likely].astype(np.float32) * pixels, classes=classes, scores=best)


def fastestdet(outputs: Outputs, size: Size, score_threshold: float) -> Detections:
    """FastestDet (dog-qiuqiu/FastestDet): (5 + classes, rows, columns), score = objectness^0.6 * class^0.4.

    Per cell: objectness, tanh centre offset in cells, sigmoid width and height, class softmax.
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
    half = (1.0 + tanh[2:]) * quarter_px  # of the sides, by a sigmoid that cannot overflow
    boxes = np.empty((len(likely), 4), np.float32)
    np.subtract(centres, half, out=boxes.T[:2])
    np.add(centres, half, out=boxes.T[2:])
    return Detections(boxes=boxes, classes=columns[5:].argmax(axis=0), scores=scores)


def every_class(boxes: FloatArray, scores: FloatArray, score_threshold: float) -> Detections:
    """Candidates of every class above the threshold, since sigmoid scores are trained independently.

    Boxes (n, 4), scores (n, classes).
    """
    rows, classes = (scores > score_threshold).nonzero()
    return Detections(boxes=boxes[rows], classes=classes, scores=scores[rows, classes])


def corners(centres: FloatArray, sides: FloatArray) -> FloatArray:
    """Boxes (n, 4) x1 y1 x2 y2 of centres (n, 2) and widths and heights (n, 2)."""
    half = sides * np.float32(0.5)
    boxes = np.empty((len(centres), 4), np.float32)
    np.subtract(centres, half, out=boxes[:, :2])
    np.add(centres, half, out=boxes[:, 2:])
    return boxes


@functools.lru_cache(maxsize=8)
def _grid(size: Size, cells: tuple[int, int]) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Of a map of `cells` (rows, columns): each one's column and row (2, n), a cell's sides, a quarter of the input's.

    The last two (2, 1), in pixels.
    """
    (height, width), (rows, columns) = size, cells
    y, x = np.divmod(np.arange(rows * columns, dtype=np.float32), np.float32(columns))
    cell_px = np.array([[width / columns], [height / rows]], np.float32)
    return np.stack((x, y)), cell_px, np.array([[width / 4], [height / 4]], np.float32)


def find_output(outputs: Outputs, expected: str, fits: Callable[[tuple[int, ...]], bool]) -> NDArray[np.floating]:
    """The one output whose shape fits. Raises ConfigError as `no_fit` where there are none or several."""
    found = [output for output in outputs.values() if fits(output.shape)]
    if len(found) != 1:
        raise no_fit(outputs, expected)
    return found[0]  # type: ignore[return-value]  # an engine's detections are floats


def no_fit(outputs: Outputs, expected: str) -> ConfigError:
    """The error `decoder.shape`: these outputs are not what was expected."""
    shapes = ", ".join(f"{name} (batch, {', '.join(map(str, outputs[name].shape))})" for name in outputs)
    return ConfigError(
        "decoder.shape", f"outputs {shapes}", expected, "name the decoder that fits this model in its spec"
    )
