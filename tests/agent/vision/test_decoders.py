"""The decoders of dense heads against loops over the formulas of their peers, at any input size."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plain_decoders import Row, around, assert_same, cells

from agent.common.errors import ConfigError
from agent.vision.answer import Decoder
from agent.vision.decoders import BUILTIN_DECODERS
from agent.vision.detections import Detections
from agent.vision.spec import ModelSpec
from agent.vision.tasks.opening import open_task
from engines.interface import TensorSpec

SIDES = st.integers(17, 130)  # odd ones too; below, two strides have maps of one cell
STRIDES = (8, 16, 32, 64)


def count(height: int, width: int, strides: tuple[int, ...]) -> int:
    return len(list(cells(height, width, strides)))


@given(st.integers(1, 40), st.integers(1, 5), st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.3, 0.95]))
def test_yolov5(rows: int, classes: int, seed: int, threshold: float) -> None:
    output = np.random.default_rng(seed).random((rows, 5 + classes), np.float32)
    output[:, :4] *= 300
    expected = [
        (around(*map(float, row[:4])), index, float(row[4] * row[5 + index]))
        for row in output
        for index in range(classes)
        if row[4] * row[5 + index] > threshold
    ]
    assert_same(BUILTIN_DECODERS["yolov5"]({"output": output}, (320, 320), threshold), expected)


def test_yolov5_passes_over_the_maps_of_older_exports() -> None:
    output = np.zeros((3, 7), np.float32)
    output[1] = [50, 40, 20, 10, 0.5, 0.25, 0.75]
    maps = {f"map{side}": np.ones((3, side, side, 7), np.float32) for side in (4, 2, 1)}
    assert_same(
        BUILTIN_DECODERS["yolov5"]({"output": output, **maps}, (32, 32), 0.3), [((40.0, 35.0, 60.0, 45.0), 1, 0.375)]
    )


def naive_nanodet(
    scores: np.ndarray, logits: np.ndarray, size: tuple[int, int], strides: tuple[int, ...], offset: float, least: float
) -> list[Row]:
    """distance2bbox of the integral over each side's distribution, cut at the border, every class above `least`."""
    height, width = size
    found: list[Row] = []
    for index, (stride, row, column) in enumerate(cells(height, width, strides)):
        x, y = (column + offset) * stride, (row + offset) * stride
        distances = []
        for side in np.split(logits[index].astype(np.float64), 4):
            powers = [math.exp(logit) for logit in side]
            distances.append(stride * sum(bin_ * power for bin_, power in enumerate(powers)) / sum(powers))
        left, top, right, bottom = distances
        x1, y1 = min(max(x - left, 0), width), min(max(y - top, 0), height)
        box = x1, y1, max(min(x + right, width), 0), max(min(y + bottom, height), 0)
        found += [(box, label, float(score)) for label, score in enumerate(scores[index]) if score > least]
    return found


@pytest.mark.parametrize(
    ("name", "strides", "offset"), [("nanodet", (8, 16, 32), 0.5), ("nanodet-plus", (8, 16, 32, 64), 0.0)]
)
@given(SIDES, SIDES, st.integers(1, 4), st.sampled_from([7, 10, 15]), st.booleans(), st.integers(0, 2**32 - 1))
def test_nanodet(
    name: str,
    strides: tuple[int, ...],
    offset: float,
    height: int,
    width: int,
    classes: int,
    reg_max: int,
    is_one_output: bool,
    seed: int,
) -> None:
    random = np.random.default_rng(seed)
    reg_max = 7 if is_one_output else reg_max
    rows = count(height, width, strides)
    scores = random.random((rows, classes), np.float32)
    logits = random.normal(0.0, 3.0, (rows, 4 * (reg_max + 1))).astype(np.float32)
    outputs = {"output": np.hstack((scores, logits))}
    if not is_one_output:  # as the exporter lists them: classes of every stride, then distances
        ends = np.cumsum([count(height, width, (stride,)) for stride in strides])[:-1]
        outputs = {f"cls_pred_stride_{s}": part for s, part in zip(strides, np.split(scores, ends), strict=True)}
        outputs |= {f"dis_pred_stride_{s}": part for s, part in zip(strides, np.split(logits, ends), strict=True)}
    expected = naive_nanodet(scores, logits, (height, width), strides, offset, 0.6)
    assert_same(BUILTIN_DECODERS[name](outputs, (height, width), 0.6), expected)


@given(SIDES, SIDES, st.integers(0, 2**32 - 1), st.permutations(["cls", "obj", "bbox", "kps"]))
def test_yunet(height: int, width: int, seed: int, order: list[str]) -> None:
    random = np.random.default_rng(seed)
    columns = {"cls": 1, "obj": 1, "bbox": 4, "kps": 10}
    outputs = {
        f"{kind}_{stride}": random.normal(0.5, 0.6, (count(height, width, (stride,)), columns[kind])).astype(np.float32)
        for kind in order
        for stride in (8, 16, 32)
    }
    expected: list[Row] = []
    index = dict.fromkeys(STRIDES, 0)
    for stride, row, column in cells(height, width, (8, 16, 32)):
        at, index[stride] = index[stride], index[stride] + 1
        cls, obj = (min(max(float(outputs[f"{kind}_{stride}"][at, 0]), 0.0), 1.0) for kind in ("cls", "obj"))
        x, y, w, h = map(float, outputs[f"bbox_{stride}"][at])
        if math.sqrt(cls * obj) > 0.6:
            box = around((column + x) * stride, (row + y) * stride, math.exp(w) * stride, math.exp(h) * stride)
            expected.append((box, 0, math.sqrt(cls * obj)))
    assert_same(BUILTIN_DECODERS["yunet"](outputs, (height, width), 0.6), expected)


def yunet_shapes(**changed: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    columns = {"cls": 1, "obj": 1, "bbox": 4, "kps": 10}
    shapes = {f"{kind}_{s}": (1, 64 * 64 // s**2, columns[kind]) for kind in columns for s in (8, 16, 32)}
    return shapes | changed


def nanodet_shapes(**changed: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    columns = {"cls_pred": 80, "dis_pred": 32}
    shapes = {f"{kind}_{s}": (1, 64 * 64 // s**2, columns[kind]) for kind in columns for s in (8, 16, 32)}
    return shapes | changed


def opened(name: str, shapes: dict[str, tuple[int, ...]]) -> Decoder:
    spec = ModelSpec(path=Path("a.onnx"), task="detect", decoder=name)
    outputs = [TensorSpec(output, np.dtype(np.float32), shape) for output, shape in shapes.items()]
    return open_task(spec).open_decoder((64, 64), outputs)


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        *((name, {"logits": (1, 10)}) for name in BUILTIN_DECODERS),
        ("detr", {"logits": (1, 9, 1), "boxes": (1, 9, 4)}),
        ("detr", {"logits": (1, 9, 3), "boxes": (1, 8, 4)}),
        ("detr", {"first": (1, 9, 4), "second": (1, 9, 4)}),
        ("rtdetr", {"logits": (1, 9, 3), "boxes": (1, 9, 5)}),
        ("rtdetr", {"logits": (1, 9, 3), "more": (1, 9, 3), "boxes": (1, 9, 4)}),
        ("rtdetr", {"output": (1, 9, 4)}),
        ("end2end", {"labels": (1, 9), "boxes": (1, 9, 4), "scores": (1, 8)}),
        ("end2end", {"one": (1, 9), "boxes": (1, 9, 4), "other": (1, 9)}),
        ("yolov5", {"output": (1, 252, 5)}),
        ("yolov5", {"first": (1, 252, 85), "second": (1, 252, 85)}),
        ("nanodet", {"output": (1, 84, 32)}),
        ("nanodet", {"output": (1, 84, 112, 1)}),
        ("nanodet", nanodet_shapes(dis_pred_8=(1, 64, 33))),
        ("nanodet", nanodet_shapes(cls_pred_8=(1, 64, 79))),
        ("nanodet", nanodet_shapes(cls_pred_8=(1, 80, 8, 8))),
        ("nanodet", {f"out{s}": (1, 64 * 64 // s**2, 80) for s in (8, 16, 32)}),
        ("yunet", yunet_shapes(obj_8=(1, 63, 1))),
        ("yunet", yunet_shapes(obj_32=(1, 4, 2))),
        ("yunet", {name: shape for name, shape in yunet_shapes().items() if "32" not in name}),
        ("torchvision", {"boxes": (None, 4), "scores": (None,)}),
        ("torchvision", {"boxes": (9, 4), "scores": (9,), "more": (9,)}),
    ],
)
def test_outputs_of_other_shapes_are_refused(name: str, shapes: dict[str, tuple[int, ...]]) -> None:
    with pytest.raises(ConfigError) as caught:
        opened(name, shapes)
    assert caught.value.code == "decoder.shape"


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e30])
@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("yolox", {"output": (1, 84, 7)}),
        ("yolov8", {"output": (1, 6, 20)}),
        ("end2end", {"output": (1, 9, 6)}),
        ("end2end", {"labels": (1, 9), "boxes": (1, 9, 4), "scores": (1, 9)}),
        ("detr", {"logits": (1, 9, 3), "boxes": (1, 9, 4)}),
        ("rtdetr", {"logits": (1, 9, 3), "boxes": (1, 9, 4)}),
        ("rtdetr", {"output": (1, 9, 6)}),
        ("rtdetr", {"output": (1, 9, 84)}),
        ("fastestdet", {"output": (1, 7, 2, 3)}),
        ("yolov5", {"output": (1, 252, 85)}),
        ("nanodet", {"output": (1, 84, 112)}),
        ("nanodet", nanodet_shapes()),
        ("nanodet-plus", {"output": (1, 85, 112)}),
        ("yunet", yunet_shapes()),
    ],
)
def test_a_broken_engine_yields_finite_boxes_and_no_warning(
    name: str, shapes: dict[str, tuple[int, ...]], value: float
) -> None:
    decode = opened(name, shapes)
    found = decode({output: np.full(shape, value, np.float32) for output, shape in shapes.items()})
    assert isinstance(found, Detections)
    assert np.isfinite(found.boxes).all()
    assert np.isfinite(found.scores).all()
