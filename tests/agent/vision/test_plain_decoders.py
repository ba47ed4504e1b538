"""Each decoder against its peer's formula in plain loops: on any outputs, and on what real models put out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path

import numpy as np
import plain_decoders as plain
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lab import COCO, FACES, SPECS

from agent.camera.reader import read_images
from agent.camera.source import parse_source
from agent.vision.answer import Answer
from agent.vision.decoders import BUILTIN_DECODERS
from agent.vision.detections import Detections
from agent.vision.spec import ModelSpec
from agent.vision.task import VisionTask
from agent.vision.tasks.classify import Classification
from agent.vision.tasks.opening import open_task
from engines.interface import Array, TensorSpec
from engines.registry import open_backend

SIDES = st.integers(17, 130)  # odd ones too
SEEDS = st.integers(0, 2**32 - 1)
LEAST = st.sampled_from([0.0, 0.3, 0.9])


def found_by(name: str, size: tuple[int, int], least: float, **outputs: Array) -> Detections:
    return BUILTIN_DECODERS[name](outputs, size, least)


@given(SIDES, SIDES, st.integers(1, 5), SEEDS, LEAST)
def test_yolox(height: int, width: int, classes: int, seed: int, least: float) -> None:
    random, size = np.random.default_rng(seed), (height, width)
    count = len(list(plain.cells(height, width, (8, 16, 32))))
    output = random.normal(0, 1.5, (count, 5 + classes)).astype(np.float32)
    output[:, 4:] = random.random((count, 1 + classes))
    plain.assert_same(found_by("yolox", size, least, output=output), plain.yolox(output, size, least))


@given(st.integers(1, 5), st.integers(1, 60), SEEDS, LEAST)
def test_yolov8(classes: int, more: int, seed: int, least: float) -> None:
    output = np.random.default_rng(seed).random((4 + classes, 4 + classes + more), np.float32)
    output[:4] *= 300
    plain.assert_same(found_by("yolov8", (320, 320), least, output0=output), plain.yolov8(output, (320, 320), least))


@given(st.integers(1, 50), SEEDS, LEAST)
def test_end2end(count: int, seed: int, least: float) -> None:
    random = np.random.default_rng(seed)
    output = random.random((count, 6), np.float32) * np.array([300, 300, 300, 300, 1, 0], np.float32)
    output[:, 5] = random.integers(0, 80, count)
    plain.assert_same(found_by("end2end", (320, 320), least, out=output), plain.end2end(output, (320, 320), least))


@pytest.mark.parametrize(("name", "fewest"), [("detr", 2), ("rtdetr", 1)])
@given(SIDES, SIDES, st.integers(0, 4), st.sampled_from([0, 1, 24, 1000]), SEEDS, LEAST)
def test_queries(
    name: str, fewest: int, height: int, width: int, more: int, count: int, seed: int, least: float
) -> None:
    """Four logits and four coordinates too, which names distinguish."""
    random, size = np.random.default_rng(seed), (height, width)
    logits = random.normal(0, 3, (count, fewest + more)).astype(np.float32)
    boxes = random.random((count, 4), np.float32)
    peer = {"detr": plain.detr, "rtdetr": plain.rtdetr}[name]
    found = found_by(name, size, least, logits=logits, pred_boxes=boxes)
    plain.assert_same(found, peer(logits, boxes, size, least))


@given(st.integers(1, 5), st.sampled_from([0, 1, 300]), SEEDS, LEAST)
def test_rows_of_an_rtdetr(classes: int, count: int, seed: int, least: float) -> None:
    """The older rows have a sigmoid for each class, today's the best one and its class; two classes have 6 columns."""
    random, size = np.random.default_rng(seed), (320, 480)
    boxes, scores = random.random((count, 4), np.float32), random.random((count, classes), np.float32)
    with np.errstate(divide="ignore"):
        logits = np.log(scores.astype(np.float64) / (1 - scores))
    plain.assert_same(
        found_by("rtdetr", size, least, out=np.hstack((boxes, scores))), plain.rtdetr(logits, boxes, size, least)
    )
    best, numbers = scores.max(axis=1, keepdims=True), scores.argmax(axis=1)[:, np.newaxis]
    today = np.hstack((boxes, best, numbers)).astype(np.float32)
    rows = [
        (plain.around(x * 480, y * 320, w * 480, h * 320), int(number), float(score))
        for x, y, w, h, score, number in today
        if score > least
    ]
    plain.assert_same(found_by("rtdetr", size, least, out=today), rows)


@given(st.sampled_from([0, 1, 4, 300]), st.sampled_from([np.int64, np.int32, np.float32]), SEEDS, LEAST)
def test_labels_boxes_and_scores(count: int, dtype: type[np.generic], seed: int, least: float) -> None:
    """In any order; a runtime may make floats of whole numbers."""
    random = np.random.default_rng(seed)
    boxes, scores = random.uniform(0, 300, (count, 4)).astype(np.float32), random.random(count, np.float32)
    labels = random.integers(0, 80, count).astype(dtype)
    found = found_by("end2end", (320, 320), least, scores=scores, labels=labels, boxes=boxes)
    rows = plain.end2end(np.column_stack((boxes, scores, labels)), (320, 320), least)
    plain.assert_same(found, rows)


@given(SIDES, SIDES, st.integers(1, 5), st.integers(1, 50), SEEDS, LEAST)
def test_ssd(height: int, width: int, classes: int, count: int, seed: int, least: float) -> None:
    random, size = np.random.default_rng(seed), (height, width)
    boxes, scores = random.random((count, 4), np.float32), random.random((count, 1 + classes), np.float32)
    plain.assert_same(found_by("ssd", size, least, boxes=boxes, scores=scores), plain.ssd(boxes, scores, size, least))


@given(st.integers(0, 9), SEEDS, LEAST)
def test_torchvision(count: int, seed: int, least: float) -> None:
    """Frames without an object, too: no output has an axis for the image."""
    random = np.random.default_rng(seed)
    boxes, scores = random.random((count, 4), np.float32) * 300, random.random(count, np.float32)
    boxes[:, 2:] += boxes[:, :2]
    outputs: dict[str, Array] = {"boxes": boxes, "scores": scores, "labels": random.integers(1, 91, count)}
    plain.assert_same(
        found_by("torchvision", (320, 320), least, **outputs),
        plain.torchvision(boxes, outputs["labels"], scores, least),
    )
    spec = ModelSpec(path=Path("a.onnx"), task="detect", decoder="torchvision", score_threshold=least)
    open_shapes = {"boxes": (None, 4), "scores": (None,), "labels": (None,)}
    tensors = [TensorSpec(name, outputs[name].dtype, shape) for name, shape in open_shapes.items()]
    answer = open_task(spec).open_decoder((320, 320), tensors)(outputs)
    assert isinstance(answer, Detections)
    assert sorted(answer.scores.tolist()) == sorted(scores[scores > least].tolist())


@given(SIDES, SIDES, st.integers(1, 5), st.integers(1, 9), st.integers(1, 9), SEEDS, LEAST)
def test_fastestdet(height: int, width: int, classes: int, rows: int, columns: int, seed: int, least: float) -> None:
    random, size = np.random.default_rng(seed), (height, width)
    output = random.normal(0, 2, (5 + classes, rows, columns)).astype(np.float32)
    output[0], output[5:] = random.random((rows, columns)), random.random((classes, rows, columns))
    plain.assert_same(found_by("fastestdet", size, least, out=output), plain.fastestdet(output, size, least))


@given(st.integers(2, 9), SEEDS)
def test_classify(classes: int, seed: int) -> None:
    logits = np.random.default_rng(seed).normal(0, 5, (1, classes)).astype(np.float32)
    spec = ModelSpec(path=Path("a.onnx"), task="classify")
    found = open_task(spec).open_decoder((8, 8), [TensorSpec("out", logits.dtype, logits.shape)])({"out": logits})
    top, score = plain.softmax_top_1(logits)
    assert found == Classification(top, pytest.approx(score))  # type: ignore[arg-type]  # equals a float


def only(outputs: dict[str, Array]) -> Array:
    (output,) = outputs.values()
    return output


REAL: dict[str, tuple[str, Callable[..., list[plain.Row]]]] = {
    "fastestdet": (COCO, lambda outputs, size, least: plain.fastestdet(only(outputs), size, least)),
    "yolox_nano": (COCO, lambda outputs, size, least: plain.yolox(only(outputs), size, least)),
    "ultraface": (FACES, lambda outputs, size, least: plain.ssd(outputs["boxes"], outputs["scores"], size, least)),
}


def answers(name: str, frames: Path, least: float) -> Iterator[tuple[dict[str, Array], tuple[int, int], Answer]]:
    """Yield the outputs of a real model on a few images, the size of its input, and its predictions."""
    data = {key: value for key, value in SPECS[name].items() if key != "labels"}
    spec = ModelSpec.model_validate({**data, "path": frames.parent / data["path"], "score_threshold": least})
    with closing(open_backend("onnxruntime").load(spec.path.read_bytes())) as engine:
        task = VisionTask(spec, engine.inputs, engine.outputs)
        for _, image in islice(read_images(parse_source(str(frames))), 5):
            tensor, _ = task.preprocess(image)
            outputs = engine.infer(tensor)
            yield (
                {key: output[0] for key, output in outputs.items()},
                tensor.shape[2:],
                task.decode(outputs, tensor.shape),
            )


@pytest.mark.parametrize("name", REAL)
def test_outputs_of_real_detectors_are_decoded_as_by_their_peers(name: str, shared_data: Path) -> None:
    """At a threshold so low that there is much to suppress."""
    frames, decode = REAL[name]
    threshold, least, seen = SPECS[name]["iou_threshold"], 0.1, 0
    for outputs, size, found in answers(name, shared_data / frames, least):
        rows = decode(outputs, size, least)
        kept = [rows[index] for index in plain.suppressed(rows, threshold, "per-class")]
        assert isinstance(found, Detections)
        plain.assert_same(found, kept)
        seen += len(rows)
        assert len(kept) < len(rows)
    assert seen > 50
