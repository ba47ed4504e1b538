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

_YOLOX_STRIDES = (8, 16, 32, 64)


def yolox(outputs: Outputs, size: Size, score_threshold: float) -> Detections:
    """YOLOX without decoding in the graph (Megvii, demo_utils.demo_postprocess): (N, 5 + classes).

    Per grid cell: centre offset and log size in strides, objectness and a sigmoid per class.
    """
    expected = "an undecoded YOLOX output (batch, N, 5 + classes)"
    output = _find(outputs, expected, lambda shape: len(shape) == 2 and shape[1] > 5)
    grid, strides = _yolox_grid(size, len(output))
    likely = np.flatnonzero(output[:, 4] > score_threshold)
    rows = output[likely].astype(np.float32, copy=False)
    centres = (rows[:, :2] + grid[likely]) * strides[likely]
    sides = np.exp(rows[:, 2:4]) * strides[likely]
    return _every_class(centres, sides, rows[:, 4:5] * rows[:, 5:], score_threshold)


def yolov8(outputs: Outputs, _size: Size, score_threshold: float) -> Detections:
    """Ultralytics YOLOv8 and its successors' default head: (4 + classes, N), boxes cx cy w h in pixels."""
    expected = "a YOLOv8 output (batch, 4 + classes, N), N above its channels"
    output = _find(outputs, expected, lambda shape: len(shape) == 2 and 4 < shape[0] < shape[1])
    likely = np.flatnonzero(output[4:].max(axis=0) > score_threshold)
    rows = output[:, likely].T.astype(np.float32, copy=False)
    return _every_class(rows[:, :2], rows[:, 2:4], rows[:, 4:], score_threshold)


def end2end(outputs: Outputs, _size: Size, score_threshold: float) -> Detections:
    """A graph that suppresses by itself, or needs not (YOLOv10): (N, 6) x1 y1 x2 y2 score class."""
    expected = "an end-to-end output (batch, N, 6)"
    output = _find(outputs, expected, lambda shape: len(shape) == 2 and shape[1] == 6)
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
        raise _no_fit(outputs, expected)
    boxes = outputs[boxes_name]
    scores = _find(rest, expected, lambda shape: len(shape) == 2 and shape[0] == len(boxes) and shape[1] > 1)
    likely = np.flatnonzero(scores[:, 1:].max(axis=1) > score_threshold)
    pixels = np.array((size[1], size[0]) * 2, np.float32)
    return _strongest_class(
        boxes[likely].astype(np.float32) * pixels, scores[likely, 1:].astype(np.float32), score_threshold
    )


def fastestdet(outputs: Outputs, size: Size, score_threshold: float) -> Detections:
    """FastestDet (dog-qiuqiu/FastestDet): (5 + classes, rows, columns), score = objectness^0.6 * class^0.4.

    Per cell: objectness, tanh centre offset in cells, sigmoid width and height, class softmax.
    """
    expected = "a FastestDet output (batch, 5 + classes, rows, columns)"
    output = _find(outputs, expected, lambda shape: len(shape) == 3 and shape[0] > 5)
    cells = output.reshape(len(output), -1)
    likely = np.flatnonzero(cells[0] > score_threshold ** (1.0 / 0.6))  # a class probability is at most 1
    rows = cells[:, likely].T.astype(np.float32, copy=False)
    grid_rows, grid_columns = output.shape[1:]
    cell = np.stack((likely % grid_columns, likely // grid_columns), axis=1).astype(np.float32)
    pixels = np.array((size[1], size[0]), np.float32)
    centres = (cell + np.tanh(rows[:, 1:3])) / np.array((grid_columns, grid_rows), np.float32) * pixels
    sides = 0.5 * (1.0 + np.tanh(0.5 * rows[:, 3:5])) * pixels  # sigmoid, as it cannot overflow
    scores = rows[:, :1] ** 0.6 * rows[:, 5:] ** 0.4
    return _strongest_class(_corners(centres, sides), scores, score_threshold)


def _every_class(centres: FloatArray, sides: FloatArray, scores: FloatArray, score_threshold: float) -> Detections:
    """Candidates of every class above the threshold, since sigmoid scores are trained independently.

    Centres and sides (n, 2), scores (n, classes).
    """
    rows, classes = np.nonzero(scores > score_threshold)
    return Detections(boxes=_corners(centres, sides)[rows], classes=classes, scores=scores[rows, classes])


def _strongest_class(boxes: FloatArray, scores: FloatArray, score_threshold: float) -> Detections:
    """One candidate per box (n, 4), of its strongest class, since softmax scores (n, classes) compete."""
    classes = scores.argmax(axis=1)
    best = scores[np.arange(len(scores)), classes]
    return Detections(boxes=boxes, classes=classes, scores=best)[best > score_threshold]


def _corners(centres: FloatArray, sides: FloatArray) -> FloatArray:
    half = sides * np.float32(0.5)
    corners: FloatArray = np.hstack((centres - half, centres + half))
    return corners


@functools.lru_cache(maxsize=8)
def _yolox_grid(size: Size, count: int) -> tuple[FloatArray, FloatArray]:
    """Cell coordinates (count, 2) and strides (count, 1) of the feature maps, finest first.

    The strides are the first of 8, 16, 32, 64 whose maps have `count` cells together.
    """
    cells: list[FloatArray] = []
    strides: list[FloatArray] = []
    total = 0
    for stride in _YOLOX_STRIDES:
        rows, columns = (-(-side // stride) for side in size)
        y, x = np.divmod(np.arange(rows * columns, dtype=np.float32), np.float32(columns))
        cells.append(np.stack((x, y), axis=1))
        strides.append(np.full((rows * columns, 1), stride, np.float32))
        total += rows * columns
        if total == count:
            return np.concatenate(cells), np.concatenate(strides)
    raise ConfigError(
        "decoder.shape",
        f"{count} YOLOX cells for an input of {size[0]}x{size[1]}",
        f"as many as maps of strides {', '.join(map(str, _YOLOX_STRIDES))}, or of the first of these, have",
        "check the model's input size, or name a decoder of your own as 'package.module:function'",
    )


def _find(outputs: Outputs, expected: str, fits: Callable[[tuple[int, ...]], bool]) -> NDArray[np.floating]:
    """The one output whose shape fits."""
    found = [output for output in outputs.values() if fits(output.shape)]
    if len(found) != 1:
        raise _no_fit(outputs, expected)
    return found[0]  # type: ignore[return-value]  # an engine's detections are floats


def _no_fit(outputs: Outputs, expected: str) -> ConfigError:
    shapes = ", ".join(f"{name} (batch, {', '.join(map(str, outputs[name].shape))})" for name in outputs)
    return ConfigError(
        "decoder.shape", f"outputs {shapes}", expected, "name the decoder that fits this model in its spec"
    )
