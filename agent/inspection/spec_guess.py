"""Guess a model's spec from the facts of its graph: task, decoder, colours, scaling, each with its sureness.

`guess_head` recognises the task and the decoder by the shapes of the outputs and the operators that make them.
`guess_spec` guesses the other keys. What no graph shows, as resizing and thresholds, comes from `CONVENTIONS`: how the
project that publishes each family of models prepares its images, as its own demo does it. These are Megvii YOLOX
(preproc), Ultralytics (LetterBox, default.yaml), UltraFace (run_video_face_detect_onnx.py), FastestDet (test.py),
NanoDet (its configurations), OpenCV's FaceDetectorYN, torchvision's references, RT-DETR and D-FINE (their onnxruntime
demos), RF-DETR (predict), DETR (transformers, DetrImageProcessor), PaddleOCR (DetResizeForTest, NormalizeImage),
MediaPipe, MMPose, PoseEstimationForMobile, MiDaS and Pytorch-UNet.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from agent.common.errors import ConfigError
from agent.inspection.graph_facts import GraphFacts, GraphOutput, Scaling
from agent.vision.decoders import BUILTIN_DECODERS
from agent.vision.registry import task_class
from agent.vision.tasks.classify import class_count
from agent.vision.tasks.maps import find_maps, has_proportions
from engines.graph.constant_inputs import box_size

IMAGENET = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
_NANODET = {"color": "bgr", "mean": [103.53, 116.28, 123.675], "std": [57.375, 57.12, 58.395]}


class Convention(NamedTuple):
    """The way in which one project prepares its images.

    Args:
        input: keys of a spec's `input`; those left out have its defaults.
        score: the threshold of scores.
        iou: the threshold of overlaps; None: there is nothing to suppress.
        sides: the least and the longest side of an input of open size; None: the assumed one alone.
    """

    peer: str
    input: Mapping[str, Any]
    score: float = 0.3
    iou: float | None = 0.5
    sides: tuple[int, int] | None = None


_STRETCHED = {"color": "rgb", "resize": "stretch", "scale": 1 / 255}
_CROPPED = {"resize": "letterbox", "anchor": "center", "pad": 0}  # a person's proportions stay
_LETTERBOXED = {"color": "rgb", "resize": "letterbox", "anchor": "center", "pad": 114, "scale": 1 / 255}
CONVENTIONS: Mapping[str, Convention] = {
    "yolox": Convention("YOLOX", {"color": "bgr", "resize": "letterbox", "anchor": "top-left", "pad": 114}, 0.3, 0.45),
    "yolov5": Convention("YOLOv5", _LETTERBOXED, 0.25, 0.45),
    "yolov8": Convention("Ultralytics", _LETTERBOXED, 0.25, 0.7),
    "end2end": Convention("Ultralytics", _LETTERBOXED, 0.25),
    # Frames keep their proportions in a DETR, and lie on the mean color, which is 0 behind mean and std.
    "detr": Convention("DETR", {**_LETTERBOXED, "anchor": "top-left", **IMAGENET}, 0.5),
    "rtdetr": Convention("RT-DETR", _STRETCHED, 0.5),
    "rf-detr": Convention("RF-DETR", {**_STRETCHED, **IMAGENET}, 0.5),
    "ssd": Convention("UltraFace", {"color": "rgb", "resize": "stretch", "mean": [127.0], "std": [128.0]}, 0.7, 0.3),
    "fastestdet": Convention("FastestDet", {"color": "bgr", "resize": "stretch", "scale": 1 / 255}, 0.65, 0.45),
    "nanodet": Convention("NanoDet", {"resize": "letterbox", "anchor": "center", "pad": 0, **_NANODET}, 0.35, 0.6),
    "nanodet-plus": Convention("NanoDet-Plus", {"resize": "stretch", **_NANODET}, 0.35, 0.6),
    "yunet": Convention("YuNet", {"color": "bgr", "resize": "letterbox", "anchor": "top-left", "pad": 0}, 0.9, 0.3),
    "torchvision": Convention("torchvision", _STRETCHED, 0.5, None),  # the graph subtracts the means itself
    # Its means are those of red, green and blue, though its images are BGR.
    "dbnet": Convention(
        "PaddleOCR",
        {"color": "bgr", "resize": "nearest", "multiple": 32, "scale": 1 / 255, **IMAGENET},
        *(0.6, None, (32, 960)),
    ),
    "heatmaps": Convention("MMPose", {"color": "rgb", **_CROPPED, "scale": 1 / 255, **IMAGENET}, 0.1, None),
    "landmarks": Convention("MediaPipe", {"color": "rgb", **_CROPPED, "scale": 1 / 255}, 0.3, None),
    "classify": Convention("torchvision", {**_STRETCHED, **IMAGENET}),
    "segment": Convention("torchvision", {**_STRETCHED, **IMAGENET}, 0.5),
    "depth": Convention("MiDaS and Depth Anything", {**_STRETCHED, **IMAGENET}),
    "raw": Convention("no particular project", {"color": "bgr", "resize": "letterbox", "anchor": "top-left"}),
}

# Its classifiers are fed values of 0 to 1, and the middle of the picture, which a stretched one comes next to.
_ULTRALYTICS_CLASSIFY = Convention("Ultralytics", _STRETCHED)
_ULTRALYTICS_DETR = Convention("Ultralytics", _STRETCHED, 0.25)
# Of TensorFlow's graphs, with channels last.
_MEDIAPIPE_MASK = Convention("MediaPipe", _STRETCHED, 0.5)
_MOBILE_POSE = Convention("PoseEstimationForMobile", {"color": "bgr", **_CROPPED}, 0.1, None)
# Trained from nothing, not from ImageNet's weights.
_PLAIN_UNET = Convention("Pytorch-UNet", _STRETCHED, 0.5)
_UNET, _PRETRAINED = frozenset(("MaxPool", "Concat")), frozenset(("Add", "Clip", "HardSwish", "GlobalAveragePool"))
_ULTRALYTICS_TASKS = {"segment": "instance", "pose": "pose", "obb": "obb"}  # its names and ours

Sureness = Literal["sure", "likely", "guess"]

_WIDEST = 10.0  # networks are fed values of about -3 to 3; a far wider range has not been scaled yet
_STRIDES = (8, 16, 32, 64)
_ANCHORS = 3  # per cell, of YOLOv5 and YOLOv7
_SUPPRESSING = frozenset(("NonMaxSuppression", "TopK"))
_LINEAR = frozenset(("Conv", "ConvTranspose", "Gemm", "MatMul", "Add"))  # the last of a head, with its bias
# A last layer of 1 x 1 is pooled before or behind.
_POOLED = _LINEAR | {"GlobalAveragePool", "AveragePool", "ReduceMean"}
_COARSEST_MAP = 8  # pixels of the image to one of a map of classes
_PICTURE = 3  # channels
# Joints of a body as data sets count them (AI Challenger, MPII, COCO, OpenPose, COCO-WholeBody), and points of a face.
_BODIES = frozenset((14, 16, 17, 18, 133, 68, 98, 106))
_FEWEST_POINTS, _MOST_POINTS = 3, 133
_POINTS_NAME = re.compile("heat_?map|key_?point|pose|landmark", re.IGNORECASE)
# MediaPipe's models by the length of their vector: a body with and without auxiliary points, a hand, a face.
_LANDMARKS = {39 * 5: 39, 33 * 5: 33, 21 * 3: 21, 468 * 3: 468, 478 * 3: 478}
_MOST_VALUES = 1 << 25  # in all outputs; a detector of 1280 x 1280 with 80 classes has 3 million


@dataclass(frozen=True)
class Head:
    """The task and the decoder of one that takes any.

    Args:
        classes: how many the outputs have; 0 where that cannot be known.
        keypoints: how many an object has.
        convention: a key of `CONVENTIONS`; empty: the decoder's own, or the task's.
    """

    task: str
    decoder: str | None
    sureness: Sureness
    reason: str
    classes: int = 0
    keypoints: int = 0
    convention: str = ""


def guess_head(facts: GraphFacts) -> Head:
    """Return the first reading of the outputs that fits; task `raw` where none does."""
    task = facts.metadata.get("task")  # Ultralytics' exporter writes it
    if task not in (None, "detect", "classify", *_ULTRALYTICS_TASKS):
        return Head("raw", None, "sure", f"its metadata say task '{task}', which no decoder here reads")
    if facts.size is None:
        return Head("raw", None, "sure", "its input is not one image")
    if task in _ULTRALYTICS_TASKS:
        unread = Head("raw", None, "likely", f"its metadata say task '{task}', and no decoder fits its outputs")
        return next(_extended(facts, facts.size, _ULTRALYTICS_TASKS[task]), unread)
    return next(_readings(facts, facts.size), Head("raw", None, "likely", "no decoder fits its outputs"))


def fitting_heads(facts: GraphFacts) -> tuple[Head, ...]:
    """Return every reading of the outputs that a decoder accepts, the surest first."""
    if facts.size is None:
        return ()
    first, size = guess_head(facts), facts.size
    if first.task in _ULTRALYTICS_TASKS.values():
        return (first,)
    heads = _readings(facts, size)
    return tuple(
        head
        for head in heads
        if head.decoder is not None and head.decoder in BUILTIN_DECODERS and _fits(head.decoder, facts, size)
    )


def class_names(facts: GraphFacts) -> tuple[str, ...]:
    """Return the class names in an Ultralytics model's metadata, `{0: 'person', ...}`; none where it has none."""
    try:
        names = ast.literal_eval(facts.metadata.get("names", "{}"))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):  # all that `literal_eval` may raise
        return ()
    if isinstance(names, Mapping) and set(names) == set(range(len(names))):
        return tuple(str(names[index]) for index in range(len(names)))
    return tuple(map(str, names)) if isinstance(names, list | tuple) else ()


def _readings(facts: GraphFacts, size: tuple[int, int]) -> Iterator[Head]:
    """Yield the readings of the outputs that fit, the surest decoders first."""
    outputs = facts.outputs
    if _fits("yunet", facts, size):
        scores = [output for output in outputs if output.closed[2:] == (1,)]
        sureness: Sureness = "sure" if all(output.made_by == ("Sigmoid",) for output in scores) else "guess"
        yield Head("detect", "yunet", sureness, "a class, an objectness and a box per cell of strides 8, 16, 32", 1)
    distances = [output for output in outputs if "dis" in output.name.lower()]
    if len(outputs) > 2 and distances and _fits("nanodet", facts, size):
        scores = [output for output in outputs if output not in distances]
        decoder = "nanodet-plus" if sum(output.closed[1] or 0 for output in distances) == _cells(size, 4) else "nanodet"
        sureness = "sure" if all(output.made_by == ("Sigmoid",) for output in scores) else "guess"
        yield Head("detect", decoder, sureness, "class scores and distances per stride", scores[0].closed[2] or 0)
    if len(outputs) == 2 and _fits("ssd", facts, size):
        yield from _ssd(outputs)
    first = outputs[0]
    if len(outputs) == 1 and first.made_by[-1:] in (("ArgMax",), ("Relu",)):
        yield from _map(facts, size, first)
    if len(outputs) == 2 and first.closed == outputs[1].closed and first.made_by == outputs[1].made_by:
        yield from _map(facts, size, first)  # torchvision's second one helps to train
    yield from _detr(facts, size)
    yield from _landmarks(outputs)
    yield from _without_batch(outputs)
    yield from _extended(facts, size, "instance")
    flat = [output for output in outputs if len(output.closed) == 3]
    if len(flat) == 1 and None not in flat[0].closed:
        yield from _table(facts, size, flat[0])
    if len(outputs) == 1:
        yield from _single(facts, size, outputs[0])


def _landmarks(outputs: tuple[GraphOutput, ...]) -> Iterator[Head]:
    """Yield the reading of MediaPipe's landmarks: a vector of coordinates beside the score of the object."""
    lengths = [math.prod(side or 0 for side in output.closed) for output in outputs]
    count = next((_LANDMARKS[length] for length in lengths if length in _LANDMARKS), 0)
    if count and 1 in lengths:
        reason = f"{count} points in a vector, beside one score: MediaPipe's landmarks of one object"
        yield Head("pose", "landmarks", "likely", reason, 0, count)


def _without_batch(outputs: tuple[GraphOutput, ...]) -> Iterator[Head]:
    """Yield the reading of torchvision's detection models: boxes, labels and scores, as many as there are objects."""
    boxes = [output for output in outputs if len(output.shape) == 2 and output.shape[1] == 4]
    types = sorted(output.dtype for output in outputs if len(output.shape) == 1)
    if len(outputs) == 3 and len(boxes) == 1 and types == ["float32", "int64"]:
        yield Head("detect", "torchvision", "sure", "boxes (N, 4), whole labels (N) and scores (N), without a batch")


def _ssd(outputs: tuple[GraphOutput, ...]) -> Iterator[Head]:
    """Yield the readings of boxes and scores. Boxes that a run has shown to be none are offsets, or of another form."""
    boxes, scores = _boxes_first(outputs)
    classes = (scores.closed[2] or 1) - 1
    has_background = scores.made_by == ("Softmax",)
    if boxes.are_boxes and has_background:
        yield Head("detect", "ssd", "sure", "boxes, and a softmax over the background and the classes", classes)
    elif boxes.are_boxes:
        yield Head("detect", "ssd", "guess", "boxes and scores, but no softmax with a background is seen", classes)
    elif has_background and boxes.are_boxes is None:
        reason = "a softmax with a background, and boxes or offsets beside it: no run could distinguish these two"
        yield Head("detect", "ssd", "guess", reason, classes)
    elif has_background:
        reason = (
            "scores with a background, and beside them no boxes x1 y1 x2 y2 from 0 to 1, perhaps offsets from priors "
            "outside the graph: export it with its box decoding, or name a decoder of your own"
        )
        yield Head("raw", None, "likely", reason)


def _boxes_first(outputs: tuple[GraphOutput, ...]) -> list[GraphOutput]:
    return sorted(outputs, key=lambda output: (output.closed[2] != 4, "box" not in output.name.lower()))


def _detr(facts: GraphFacts, size: tuple[int, int]) -> Iterator[Head]:
    """Yield the readings of a transformer's queries: with scores in the graph, or as logits beside boxes."""
    outputs, operators = facts.outputs, facts.operators
    ranks = sorted(len(output.closed) for output in outputs)
    if ranks == [2, 2, 3] and _fits("end2end", facts, size):
        sureness: Sureness = "sure" if box_size(facts.constants) is not None else "likely"
        yield Head("detect", "end2end", sureness, "labels, boxes and scores of objects", convention="rtdetr")
    is_said = facts.metadata.get("head") == "RTDETRDecoder"  # Ultralytics' exporter writes it
    if ranks == [3] and (is_said or {"TopK", "GridSample"} <= operators) and _fits("rtdetr", facts, size):
        columns = outputs[0].closed[2] or 0
        reason = f"{columns} columns: boxes and scores of queries, as Ultralytics' RT-DETR has them"
        yield Head("detect", "rtdetr", "sure" if is_said else "likely", reason, 0 if columns == 6 else columns - 4)
    if ranks == [3, 3] and _has_attention(operators) and _fits("rtdetr", facts, size):
        boxes, logits = _boxes_first(outputs)
        is_grid = boxes.closed[1] in (_cells(size, 3), _cells(size, 4))  # a YOLO with attention has cells, no queries
        if not (is_grid or boxes.are_boxes or {"Softmax", "Sigmoid"} & {*logits.made_by[-1:]}):
            yield from _queries(facts, boxes, logits)


def _has_attention(operators: frozenset[str]) -> bool:
    return "Attention" in operators or ("Softmax" in operators and bool({"MatMul", "Einsum"} & operators))


def _queries(facts: GraphFacts, boxes: GraphOutput, logits: GraphOutput) -> Iterator[Head]:
    """Yield the readings of logits and boxes of queries.

    The shapes do not say if a sigmoid or a softmax makes the scores. A graph that chooses the best queries, or samples
    maps where they look, is a later DETR, which has sigmoids. RF-DETR's sides are multiples of those it starts from.
    """
    classes, later = logits.closed[2] or 0, sorted({"TopK", "GridSample"} & facts.operators)
    convention = "detr" if "TopK" not in later else "rf-detr" if "Mul" in boxes.made_by else "rtdetr"
    reason = f"logits and boxes of queries, by attention; {' and '.join(later) or 'no TopK and no GridSample'}"
    certainty: tuple[Sureness, Sureness] = ("likely", "guess") if later else ("guess", "likely")
    sigmoid = Head("detect", "rtdetr", certainty[0], f"{reason}: later DETRs", classes, convention=convention)
    softmax = Head("detect", "detr", certainty[1], f"{reason}: the first DETR", classes - 1)
    yield from (sigmoid, softmax) if later or classes < 2 else (softmax, sigmoid)


def _table(facts: GraphFacts, size: tuple[int, int], output: GraphOutput) -> Iterator[Head]:
    """Yield the readings of one output (batch, rows, columns)."""
    rows, columns = output.closed[1] or 0, output.closed[2] or 0
    cells = {_cells(size, strides): strides for strides in (1, 2, 3, 4)}
    is_signed = _is_signed(facts)
    anchored = [strides for count, strides in cells.items() if rows == _ANCHORS * count]
    may_have_more = columns > 6 and columns not in cells and not anchored
    if (columns == 6 or may_have_more) and _SUPPRESSING & facts.operators and rows not in cells:
        yield from _chosen_rows(columns, is_signed)
    if {*output.made_by} <= _LINEAR:  # neither scores nor boxes are decoded: no decoder here reads that
        return
    is_alone = all(len(other.closed) != 4 for other in facts.outputs)  # beside masks it is no plain detector
    if rows in cells and columns > 5:
        yield from _cell_rows(output, cells[rows], columns)
    if anchored and columns > 5:
        reason = f"{rows} rows: {_ANCHORS} anchors per cell, decoded"
        if not is_signed:
            reason += "; key points or an angle behind fewer classes would look the same, which no decoder here reads"
        sureness: Sureness = "sure" if is_signed else "likely"
        yield Head("detect", "yolov5", sureness if is_alone else "guess", reason, columns - 5)
    if 4 < rows < columns:
        # Behind the classes there may be what looks like more of them: the same number of channels fits several tasks.
        ends_in_classes = output.made_by[-1:] == ("Sigmoid",) and len({*output.made_by}) > 1
        is_decoded = columns in cells and ends_in_classes and "Conv" not in output.made_by
        reason = f"{rows} = 4 + {rows - 4} channels before {columns} places"
        if not is_signed and is_alone:
            reason += _looking_the_same(rows - 4)
        sureness = "sure" if is_signed else "likely" if is_decoded and len(facts.outputs) == 1 else "guess"
        yield Head("detect", "yolov8", sureness if is_alone else "guess", reason, rows - 4)
    if columns == 6:
        yield Head("detect", "end2end", "guess", "6 columns, in rows that are no cells of a grid")


def _chosen_rows(columns: int, is_signed: bool) -> Iterator[Head]:
    """Yield the readings of rows that the graph chooses itself: a box, its score and class, and what follows these."""
    reason = f"{columns} columns, and the graph chooses the best rows itself; their order is Ultralytics'"
    more, others = columns - 6, "classes of queries (detect, decoder rtdetr) would look the same"
    if not more:
        yield Head("detect", "end2end", "sure" if is_signed else "likely", reason)
    elif more == 1:
        yield Head("obb", "end2end", "guess", f"{reason}: an angle behind the class; {others}")
    elif count := _points_in(more):
        yield Head("pose", "end2end", "guess", f"{reason}: {count} key points; {others}", 0, count)


def _looking_the_same(channels: int) -> str:
    """Return the other meanings of channels that may be classes, and what to write for each."""
    count = _points_in(channels - 1)
    points = f"1 class and {count} key points (pose, keypoints: {count})" if count else "key points (pose, keypoints)"
    angle = f"{channels - 1} classes and an angle (obb)" if channels > 1 else ""
    return f"; {' or '.join(filter(None, (angle, points)))} would look the same: if so, write that task"


def _points_in(values: int) -> int:
    """Return how many key points have so many values, three or two each; 0 for no such number that objects have."""
    counts = [values // each for each in (3, 2) if values % each == 0]
    return next((count for count in counts if _FEWEST_POINTS <= count <= _MOST_POINTS), 0)


class _Extras(NamedTuple):
    """What objects have beside a box: how many columns, in words, and how many key points."""

    columns: int
    shown: str
    keypoints: int = 0


def _mask_factors(facts: GraphFacts, size: tuple[int, int]) -> _Extras:
    """Return a factor for each prototype. Prototypes are coarse; a map of the input's size is another task."""
    maps = [output.closed[1:] for output in facts.outputs if len(output.closed) == 4]
    if len(maps) != 1 or None in maps[0] or not has_proportions(maps[0][1:], size):
        return _Extras(0, "")
    count, rows, _ = (side or 0 for side in maps[0])
    return _Extras(count if 2 * rows <= size[0] else 0, f"{count} factors of masks")


def _point_values(facts: GraphFacts, size: tuple[int, int]) -> _Extras:
    del size
    keypoints, values = _keypoint_shape(facts)
    return _Extras(keypoints * values, f"{keypoints} key points", keypoints)


def _angle(facts: GraphFacts, size: tuple[int, int]) -> _Extras:
    del facts, size
    return _Extras(1, "an angle")


_EXTRAS = {"instance": _mask_factors, "pose": _point_values, "obb": _angle}


def _extended(facts: GraphFacts, size: tuple[int, int], task: str) -> Iterator[Head]:
    """Yield the readings of one table whose objects have more than a box: factors of masks, key points, an angle.

    The metadata say so, or there are prototypes, which masks alone have.
    """
    flat = [output for output in facts.outputs if len(output.closed) == 3 and None not in output.closed]
    extras, shown, keypoints = _EXTRAS[task](facts, size)
    if len(flat) != 1 or not extras:
        return
    rows, columns = flat[0].closed[1] or 0, flat[0].closed[2] or 0
    if columns == 6 + extras:
        reason = f"{columns} columns: a box, its score and class, and {shown}"
        yield Head(task, "end2end", "sure", reason, 0, keypoints)
    elif 4 + extras < rows < columns:
        classes = rows - 4 - extras
        reason = f"{rows} = 4 + {classes} + {extras} channels before {columns} places: {shown}"
        yield Head(task, "yolov8", "sure", reason, classes, keypoints)
    elif "yolov5" in task_class(task).decoders and columns > 5 + extras:
        reason = f"{columns} columns: a box, an objectness, classes, and {shown}"
        yield Head(task, "yolov5", "likely", reason, columns - 5 - extras)


def _keypoint_shape(facts: GraphFacts) -> tuple[int, int]:
    """Return how many key points an Ultralytics model has, and values for each; (0, 0) where its metadata lack them."""
    try:
        shape = ast.literal_eval(facts.metadata.get("kpt_shape", "[]"))
        count, values = map(int, shape)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):  # all that `literal_eval` may raise
        return 0, 0
    return (count, values) if count > 0 and values in (2, 3) else (0, 0)


def _cell_rows(output: GraphOutput, strides: int, columns: int) -> Iterator[Head]:
    """Yield the readings of one row per cell of the first `strides` strides."""
    made_by = output.made_by
    cells = f"a row per cell of {strides} stride{'s' if strides > 1 else ''}"
    if {"Mul", "Exp", "Pow"} & {*made_by}:
        yield Head("detect", "yolov5", "likely", f"{cells}, and the graph multiplies: it decodes boxes", columns - 5)
    elif columns > 32 and made_by[:1] == ("Sigmoid",):
        decoder = "nanodet-plus" if strides == 4 else "nanodet"
        yield Head("detect", decoder, "likely", f"{cells}, sigmoids first and then no activation", columns - 32)
    elif made_by[:1] == ("Conv",) and "Sigmoid" in made_by:
        yield Head("detect", "yolox", "sure", f"{cells}, boxes without activation and then sigmoids", columns - 5)
    else:
        yield Head("detect", "yolox", "guess", f"{cells}, about which the graph shows no more", columns - 5)


def _single(facts: GraphFacts, size: tuple[int, int], output: GraphOutput) -> Iterator[Head]:
    """Yield the readings of a graph with one output, a map or a vector."""
    shape, made_by = output.closed[1:], {*output.made_by}
    if _fits("fastestdet", facts, size) and {"Sigmoid", "Softmax"} <= made_by:
        classes = (shape[0] or 5) - 5
        yield Head("detect", "fastestdet", "sure", "a map with a sigmoid and a softmax among its channels", classes)
    yield from _map(facts, size, output)
    classes = class_count(output.closed) or 0
    if classes > 1:
        if made_by & {"Softmax", "LogSoftmax"} or facts.metadata.get("task") == "classify":
            yield Head("classify", None, "sure", f"{classes} scores, softmax over them", classes)
        elif made_by and made_by <= _POOLED:
            reason = f"{classes} scores of a last linear layer; an embedding would look the same: then task raw"
            yield Head("classify", None, "likely", reason, classes)


def _map(facts: GraphFacts, size: tuple[int, int], output: GraphOutput) -> Iterator[Head]:
    """Yield the readings of a map of the image's proportions. A map of three channels may be a picture."""
    made_by = output.made_by
    for _, axis in find_maps({output.name: output.closed[1:]}, size):
        sides = [side or 0 for at, side in enumerate(output.closed[1:]) if at != axis]
        channels = (output.closed[1:][axis] or 0) if axis is not None else 1
        if size[0] > _COARSEST_MAP * sides[0]:
            continue
        if made_by[-1:] == ("ArgMax",):
            yield Head("segment", None, "sure", "a map of class numbers")
        elif channels == 1:
            yield from _one_value(facts, 2 * sides[0] >= size[0], made_by)
        elif made_by[-1:] == ("Softmax",):
            yield Head("segment", None, "sure", f"a map of {channels} scores, softmax over them", channels)
        elif _is_linear(made_by) and channels != _PICTURE:
            yield from _scores(size, sides, output.name, channels)


def _one_value(facts: GraphFacts, is_fine: bool, made_by: tuple[str, ...]) -> Iterator[Head]:
    """Yield the readings of a map of one value, which may mean much. is_fine: at least half as large as the image."""
    if made_by[-1:] == ("Sigmoid",) and facts.is_open and "paddle" in facts.producer.lower():
        reason = "a map of one sigmoid, of open size, by PaddlePaddle: text; were it a mask, the task would be segment"
        yield Head("obb", "dbnet", "likely", reason, 1)
    elif made_by[-1:] == ("Sigmoid",):
        others = "disparities (depth) or text (obb, decoder dbnet) would look the same"
        yield Head("segment", None, "likely", f"a map of one sigmoid: a mask; {others}", 1)
    elif made_by[-1:] in (("Exp",), ("Softplus",)):
        reason = "a map of one value that is always above zero: a depth; counts would look the same (raw)"
        yield Head("depth", None, "guess", reason)
    elif not is_fine or facts.channels != _PICTURE:  # a count of people, or a grey picture for a grey picture
        return
    elif made_by[-1:] == ("Relu",):
        reason = "a map of one value that is never negative: a depth, or a disparity, up to a scale and a shift"
        yield Head("depth", None, "likely", reason)
    elif _is_linear(made_by):
        reason = "a map of one value of a last linear layer: a mask is where it is above 0; a depth would look the same"
        yield Head("segment", None, "guess", reason, 1)


def _is_linear(made_by: tuple[str, ...]) -> bool:
    """Return whether a last linear layer makes an output, perhaps enlarged."""
    return bool(made_by) and {*made_by} <= _LINEAR | {"Resize"}


def _scores(size: tuple[int, int], sides: list[int], name: str, channels: int) -> Iterator[Head]:
    """Yield the readings of a map of scores of a last linear layer: classes, or key points at a stride."""
    is_coarse = 2 * sides[0] <= size[0]
    if is_coarse and (channels in _BODIES or _POINTS_NAME.search(name)):
        reason = f"{channels} coarse maps of a last linear layer: key points; classes would look the same (segment)"
        yield Head("pose", "heatmaps", "likely", reason, 0, channels)
    else:
        others = "; key points would look the same (pose, decoder heatmaps)" if is_coarse else ""
        reason = f"a map of {channels} scores of a last linear layer{others}"
        yield Head("segment", None, "likely", reason, channels)


def _is_signed(facts: GraphFacts) -> bool:
    """Return whether Ultralytics' exporter made the graph."""
    return "Ultralytics" in facts.metadata.get("author", "")


def _fits(decoder: str, facts: GraphFacts, size: tuple[int, int]) -> bool:
    """Return whether a built-in decoder accepts outputs of these shapes."""
    closed = {output.name: output.closed[1:] for output in facts.outputs}
    if any(None in shape or not shape for shape in closed.values()):
        return False
    shapes = {name: [side or 0 for side in shape] for name, shape in closed.items()}
    if sum(map(math.prod, shapes.values())) > _MOST_VALUES:
        return False
    are_whole = {output.name: output.dtype.startswith("int") for output in facts.outputs}
    zeros = {name: np.zeros(shape, np.int64 if are_whole[name] else np.float32) for name, shape in shapes.items()}
    try:
        BUILTIN_DECODERS[decoder](zeros, size, 0.5)
    except ConfigError:
        return False
    return True


def _cells(size: tuple[int, int], strides: int) -> int:
    """Return how many cells the maps of the first strides have together."""
    height, width = size
    return sum(-(-height // stride) * -(-width // stride) for stride in _STRIDES[:strides])


@dataclass(frozen=True)
class Guess:
    """One key of a spec, such as 'input.color'."""

    key: str
    value: Any
    sureness: Sureness
    reason: str


def guess_spec(facts: GraphFacts, head: Head) -> Iterator[Guess]:
    """Guess every key of the spec but `path` and, where the graph names no classes, `labels`."""
    convention = _convention(facts, head)
    yield Guess("task", head.task, head.sureness, head.reason)
    if head.decoder is not None:
        yield Guess("decoder", head.decoder, head.sureness, head.reason)
    known = {name: value for name, value in facts.constants.items() if value is not None}
    if known:
        yield Guess("inputs", known, "likely", "boxes then come in pixels of the network's input")
    if head.keypoints:
        is_said = "kpt_shape" in facts.metadata
        yield Guess(
            "keypoints",
            head.keypoints,
            "sure" if is_said else head.sureness,
            "its metadata say so" if is_said else "as many as its outputs have",
        )
    if head.task == "depth":
        yield Guess("depth", "disparity", "guess", f"as {convention.peer} mostly have it; others look the same")
    as_peer = f"as {convention.peer} has it; the graph does not show it"
    yield _color(facts, convention, as_peer)
    for key in ("resize", "anchor", "pad", "multiple"):
        if key in convention.input:
            yield Guess(f"input.{key}", convention.input[key], "guess", as_peer)
    yield from _scaling(facts, convention, as_peer)
    yield from _profiles(facts, convention)
    names = class_names(facts)
    if names and "classes" in task_class(head.task).policy_keys:
        yield Guess("labels", list(names), "sure" if len(names) == head.classes else "guess", "its metadata name them")
    if head.decoder == "dbnet":
        yield Guess("labels", ["text"], "sure", "its one class")
    if head.decoder is not None:
        yield Guess("score_threshold", convention.score, "guess", as_peer)
        if convention.iou is not None:
            yield Guess("iou_threshold", convention.iou, "guess", as_peer)
    elif head.task == "segment" and head.classes == 1:
        is_logit = facts.outputs[0].made_by[-1:] != ("Sigmoid",)
        reason = "a sigmoid of 0 is a half" if is_logit else "half of what a sigmoid can be"
        yield Guess("score_threshold", 0.0 if is_logit else 0.5, "guess", reason)


def _convention(facts: GraphFacts, head: Head) -> Convention:
    """Return how the project prepares its images that most likely made the graph."""
    usual = CONVENTIONS[head.convention or head.decoder or head.task]
    is_tensorflow = facts.layout == "NHWC"
    if head.task == "classify" and _is_signed(facts):
        return _ULTRALYTICS_CLASSIFY
    if head.decoder == "rtdetr" and _is_signed(facts):
        return _ULTRALYTICS_DETR
    if head.decoder == "heatmaps" and is_tensorflow:
        return _MOBILE_POSE
    if head.task == "segment" and head.classes == 1 and is_tensorflow:
        return _MEDIAPIPE_MASK
    if head.task == "segment" and facts.operators >= _UNET and not facts.operators & _PRETRAINED:
        return _PLAIN_UNET
    if usual.input["resize"] == "nearest" and not facts.is_open:
        fixed = {key: value for key, value in usual.input.items() if key != "multiple"}
        return usual._replace(input={**fixed, "resize": "stretch"})
    return usual


def _color(facts: GraphFacts, convention: Convention, as_peer: str) -> Guess:
    if facts.channels == 1:
        return Guess("input.color", "gray", "sure", "one channel")
    scaling = facts.scaling
    if scaling is not None and scaling.bias.size == 3:
        with np.errstate(all="ignore"):  # a graph may multiply by zero
            red, green, blue = -scaling.bias / scaling.gain  # ImageNet's means fall from red to blue
        if red > green > blue or red < green < blue:
            color = "rgb" if red > blue else "bgr"
            return Guess("input.color", color, "likely", "the graph subtracts means that fall from red to blue")
    return Guess("input.color", convention.input["color"], "guess", as_peer)


def _scaling(facts: GraphFacts, convention: Convention, as_peer: str) -> Iterator[Guess]:
    """Guess scale, mean and std: what the graph does itself must not be done twice."""
    if facts.inputs and facts.inputs[0].dtype == "uint8":
        yield Guess("input.scale", 1.0, "sure", "it takes uint8")
        return
    if facts.scaling is not None:
        takes_pixels = _takes_pixels(facts.scaling)
        reason = f"the graph scales values of {'0 to 255' if takes_pixels else '0 to 1'} itself"
        yield Guess("input.scale", 1.0 if takes_pixels else 1 / 255, "likely", reason)
        return
    yield Guess("input.scale", convention.input.get("scale", 1.0), "guess", as_peer)
    for key in ("mean", "std"):
        if key in convention.input:
            values = convention.input[key]
            fits = facts.channels != 1 or len(values) == 1
            yield Guess(f"input.{key}", values if fits else [round(float(np.mean(values)), 4)], "guess", as_peer)


def _takes_pixels(scaling: Scaling) -> bool:
    """Return whether pixels of 0 to 255, rather than values of 0 to 1, come out in a range that networks are fed."""
    return 255 * float(np.abs(scaling.gain).max()) <= _WIDEST or float(np.abs(scaling.bias).max()) > _WIDEST


def _profiles(facts: GraphFacts, convention: Convention) -> Iterator[Guess]:
    if not facts.is_open or facts.size is None:
        return
    image, channels, assumed = facts.inputs[0], facts.channels or 3, facts.size
    least, most = convention.sides or (0, 0)
    sizes = {"min": (least, least) if least else assumed, "opt": assumed, "max": (most, most) if most else assumed}
    shapes = {
        name: [1, channels, *size] if facts.layout == "NCHW" else [1, *size, channels] for name, size in sizes.items()
    }
    reason = f"height or width is open: {assumed[0]}x{assumed[1]} is assumed"
    yield Guess("profiles", [{image.name: shapes}], "guess", reason)
