from __future__ import annotations

import math
import zipfile
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import cv2
import numpy as np
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.camera.images import ImageFiles
from agent.common.errors import DatasetError
from agent.vision.detections import Detections, LabelledBoxes, iou_matrix
from agent.vision.evaluation import IOU_THRESHOLDS, AveragePrecision, DetectionImages, evaluate
from agent.vision.fidelity import MatchCounts, count_matches
from agent.vision.spec import InputSpec, ModelSpec, ProfileShapes
from agent.vision.task import VisionTask
from engines.interface import Array, TensorSpec

CIFAR_SHAPE = (1, 3, 32, 32)


class Reference:
    """ONNX Runtime at its plainest: the oracle that the measured baselines were computed with."""

    def __init__(self, path: Path) -> None:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # UltraFace lists its initialisers as inputs; said once per tensor
        self._session = onnxruntime.InferenceSession(str(path), options)
        self.inputs = [_spec(tensor) for tensor in self._session.get_inputs()]
        self.outputs = [_spec(tensor) for tensor in self._session.get_outputs()]

    def infer(self, batch: Array) -> dict[str, Array]:
        names = [output.name for output in self.outputs]
        return dict(zip(names, self._session.run(names, {self.inputs[0].name: batch}), strict=True))

    def close(self) -> None:
        pass


def _spec(tensor: onnxruntime.NodeArg) -> TensorSpec:
    shape = tuple(size if isinstance(size, int) else None for size in tensor.shape)
    return TensorSpec(tensor.name, np.dtype(np.float32), shape)


def found_at(boxes: list[tuple[float, ...]], classes: list[int], scores: list[float]) -> Detections:
    return Detections(
        boxes=np.array(boxes, np.float32).reshape(-1, 4),
        classes=np.array(classes, np.int64),
        scores=np.array(scores, np.float32),
    )


def test_perfect_detections_have_ap_1() -> None:
    precision = AveragePrecision()
    for shift in range(3):
        found = found_at([(shift, 0, shift + 10, 10), (50, 0, 60, 10)], [0, 4], [0.9, 0.2])
        precision.add(found, found)
    np.testing.assert_allclose(precision.by_threshold(), 1.0)


def test_ap_by_hand() -> None:
    # Two objects of class 0: found first, a false alarm second, the other object third, at IoU 0.8.
    truth = LabelledBoxes(boxes=np.array([[0, 0, 10, 10], [50, 0, 60, 10]], np.float32), classes=np.array([0, 0]))
    found = found_at([(0, 0, 10, 10), (80, 0, 90, 10), (50, 0, 60, 8)], [0, 0, 0], [0.9, 0.8, 0.7])
    precision = AveragePrecision()
    precision.add(found, truth)
    both, one = (51 * 1 + 50 * 2 / 3) / 101, 51 / 101  # recalls 0 .. 0.50, then up to 1
    expected = [both if threshold < 0.8 + 1e-9 else one for threshold in IOU_THRESHOLDS]
    np.testing.assert_allclose(precision.by_threshold(), expected)


def test_classes_that_never_occur_do_not_count() -> None:
    precision = AveragePrecision()
    truth = found_at([(0, 0, 10, 10)], [0], [1.0])
    precision.add(found_at([(0, 0, 10, 10), (0, 0, 10, 10)], [0, 1], [0.5, 0.9]), truth)
    np.testing.assert_allclose(precision.by_threshold(), 1.0)


def test_missed_classes_count_as_zero() -> None:
    precision = AveragePrecision()
    truth = found_at([(0, 0, 10, 10), (0, 0, 10, 10)], [0, 1], [1.0, 1.0])
    precision.add(truth[:1], truth)
    np.testing.assert_allclose(precision.by_threshold(), 0.5)


def test_the_hundred_best_detections_count() -> None:
    precision = AveragePrecision()
    rows = [(200.0 + 20 * i, 0.0, 210.0 + 20 * i, 10.0) for i in range(100)]
    precision.add(
        found_at([(0, 0, 10, 10), *rows], [0] * 101, [0.1] + [0.9] * 100),
        found_at([(0, 0, 10, 10)], [0], [1]),
    )
    np.testing.assert_allclose(precision.by_threshold(), 0.0)


def test_without_objects_there_is_no_ap() -> None:
    assert np.isnan(AveragePrecision().by_threshold()).all()


def test_a_resample_is_the_precision_of_its_images() -> None:
    truth = LabelledBoxes(boxes=np.array([[0, 0, 10, 10]], np.float32), classes=np.zeros(1, np.int64))
    precision = AveragePrecision()
    for left in (0, 100):  # a hit, then a miss
        precision.add(found_at([(left, 0, left + 10, 10)], [0], [0.9]), truth)
    whole, hits, misses = (precision.resampled(images).by_threshold()[0] for images in ([0, 1], [0, 0], [1]))
    assert (whole, hits, misses) == (precision.by_threshold()[0], 1.0, 0.0)
    assert precision.resampled([0, 1, 1]).by_threshold()[0] < whole < 1.0


def naive_ap(images: list[tuple[Detections, LabelledBoxes]], threshold: float) -> float:
    """COCO's AP of class 0 from the definition: rank, match greedily, best precision at each recall."""
    ranked = sorted(
        ((float(f.scores[i]), k, i) for k, (f, _) in enumerate(images) for i in range(len(f))),
        key=lambda r: -r[0],
    )
    claimed: set[tuple[int, int]] = set()
    hits = []
    for _, k, i in ranked:
        found, truth = images[k]
        overlaps = iou_matrix(found.boxes[i : i + 1], truth.boxes)[0]
        free = [(overlaps[j], -j) for j in range(len(truth)) if (k, j) not in claimed]
        best = max(free, default=(0.0, 0))
        hits.append(best[0] >= threshold)
        if hits[-1]:
            claimed.add((k, -best[1]))
    total = sum(len(truth) for _, truth in images)
    curve = [(sum(hits[:n]) / total, sum(hits[:n]) / n) for n in range(1, len(hits) + 1)]
    at = [max((p for recall, p in curve if recall >= r), default=0.0) for r in np.linspace(0, 1, 101)]
    return sum(at) / 101


@given(seed=st.integers(0, 2**32 - 1))
def test_ap_agrees_with_its_definition(seed: int) -> None:
    generator = np.random.default_rng(seed)
    images, precision = [], AveragePrecision()
    for _ in range(3):
        corners = generator.integers(0, 12, (2, 6, 2)).astype(np.float32)
        boxes = np.concatenate((corners, corners + generator.integers(4, 9, (2, 6, 2))), axis=2).astype(np.float32)
        scores = generator.permutation(6).astype(np.float32) + generator.random()
        found = Detections(boxes=boxes[0], classes=np.zeros(6, np.int64), scores=scores)
        truth = LabelledBoxes(boxes=boxes[1, :3], classes=np.zeros(3, np.int64))
        images.append((found, truth))
        precision.add(found, truth)
    by_threshold = precision.by_threshold()
    assert by_threshold[0] == pytest.approx(naive_ap(images, 0.5))
    assert by_threshold[5] == pytest.approx(naive_ap(images, 0.75))


class Oracle:
    """A classifier of solid images: the class is the brightness."""

    inputs = (TensorSpec("x", np.dtype(np.float32), (1, 3, 8, 8)),)
    outputs = (TensorSpec("y", np.dtype(np.float32), (1, 3)),)

    def infer(self, batch: Array) -> dict[str, Array]:
        return {"y": np.eye(3, dtype=np.float32)[[int(batch[0, 0, 0, 0].real)]]}

    def close(self) -> None:
        pass


def solid(folder: Path, names: dict[str, int]) -> Path:
    for name, value in names.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(folder / name), np.full((8, 8, 3), value, np.uint8))
    return folder


def test_top_1_over_folders(tmp_path: Path) -> None:
    spec = ModelSpec(path=Path("a.onnx"), task="classify", labels=("a", "b", "c"))
    folder = solid(tmp_path, {"a/0.png": 0, "b/0.png": 1, "b/1.png": 2, "b/2.png": 0})
    result = evaluate(Oracle(), spec, folder)
    assert (result.task, result.images, result.scores) == ("classify", 4, {"top1": 0.5})


def test_folders_that_cannot_number_the_classes_are_refused(tmp_path: Path) -> None:
    spec = ModelSpec(path=Path("a.onnx"), task="classify")
    with pytest.raises(DatasetError, match="2 folders for 3 classes"):
        evaluate(Oracle(), spec, solid(tmp_path, {"a/0.png": 0, "b/0.png": 1}))


def test_raw_models_have_no_labels(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="task 'raw'"):
        evaluate(Oracle(), ModelSpec(path=Path("a.onnx"), task="raw"), tmp_path)


class Blind:
    """A YOLOX for 32 x 32 images that sees none of its two classes."""

    inputs = (TensorSpec("x", np.dtype(np.float32), (1, 3, 32, 32)),)
    outputs = (TensorSpec("y", np.dtype(np.float32), (1, 21, 7)),)

    def infer(self, batch: Array) -> dict[str, Array]:
        return {"y": np.zeros((len(batch), 21, 7), np.float32)}

    def close(self) -> None:
        pass


@pytest.mark.parametrize("label", ["", "1 0.5 0.5 0.2 0.2"])
def test_without_an_object_there_is_no_precision(tmp_path: Path, label: str) -> None:
    folder = solid(tmp_path, {"images/a.png": 0})
    (folder / "labels").mkdir()
    (folder / "labels" / "a.txt").write_text(label)
    spec = ModelSpec(path=Path("a.onnx"), task="detect", decoder="yolox", labels=("car", "person"))
    if label:
        assert evaluate(Blind(), spec, folder).scores == {"map": 0.0, "map50": 0.0}
        return
    with pytest.raises(DatasetError, match="no labelled object in 1 images"):
        evaluate(Blind(), spec, folder)


FASTESTDET = {
    "task": "detect",
    "decoder": "fastestdet",
    "input": InputSpec(resize="stretch", scale=1 / 255),
    "iou_threshold": 0.45,
}
FIGURE = 2e-3  # the JPEG decoders of OpenCV 4.9 and 5.0 alone move these figures by 1e-3
COCO = "img_coco_train2017_first128_labelled.zip"


@pytest.mark.trial
def test_fastestdet_on_coco(shared_data: Path) -> None:
    path = shared_data / "det_fastestdet_352_coco80_fp32.onnx"
    result = evaluate(Reference(path), ModelSpec(path=path, **FASTESTDET), shared_data / COCO)
    assert result.scores["map50"] == pytest.approx(0.3231, abs=FIGURE)
    assert result.scores["map"] == pytest.approx(0.2009, abs=FIGURE)


@pytest.mark.trial
def test_fastestdet_unclipped_has_the_published_baseline(shared_data: Path) -> None:
    """SOURCES.md's figures, mAP50 0.3191 and mAP 0.1874, let boxes hang over the edge of the frame."""
    path = shared_data / "det_fastestdet_352_coco80_fp32.onnx"
    spec = ModelSpec(path=path, score_threshold=0.01, **FASTESTDET)
    engine, precision = Reference(path), AveragePrecision()
    vision = VisionTask(spec, engine.inputs, engine.outputs)
    for image, truth in DetectionImages(shared_data / COCO):
        tensor, geometry = vision.preprocess(image)
        found = vision.decode(engine.infer(tensor))
        assert isinstance(found, Detections)
        boxes = found.boxes / np.array([geometry.scale_x, geometry.scale_y] * 2, np.float32)
        precision.add(Detections(boxes=boxes, classes=found.classes, scores=found.scores), truth)
    by_threshold = precision.by_threshold()
    assert by_threshold[0] == pytest.approx(0.3191, abs=FIGURE)
    assert by_threshold.mean() == pytest.approx(0.1874, abs=FIGURE)


@pytest.mark.trial
def test_yolox_on_coco(shared_data: Path) -> None:
    path = shared_data / "det_yolox_nano_416_coco80_fp32.onnx"
    spec = ModelSpec(path=path, task="detect", decoder="yolox", iou_threshold=0.5)
    result = evaluate(Reference(path), spec, shared_data / COCO)
    assert result.images == 128
    assert result.scores["map50"] == pytest.approx(0.5195, abs=5e-3)
    assert result.scores["map"] == pytest.approx(0.3339, abs=5e-3)


@pytest.mark.trial
def test_resnet20_on_cifar(shared_data: Path) -> None:
    path = shared_data / "cls_resnet20_cifar10_fp32.onnx"
    spec = ModelSpec(
        path=path,
        task="classify",
        input=InputSpec(
            color="rgb",
            resize="stretch",
            scale=1 / 255,
            mean=(0.485, 0.456, 0.406),
            std=(0.229, 0.224, 0.225),
        ),
        profiles=({"input": ProfileShapes(min=CIFAR_SHAPE, opt=CIFAR_SHAPE, max=CIFAR_SHAPE)},),
    )
    result = evaluate(Reference(path), spec, shared_data / "img_cifar10_test_A_3000.zip")
    assert (result.images, result.scores["top1"]) == (3000, pytest.approx(0.91, abs=1e-12))


def faces(archive: Path) -> Iterator[tuple[str, LabelledBoxes]]:
    with zipfile.ZipFile(archive) as files:
        for document in ("training.xml", "testing.xml"):
            for image in ElementTree.fromstring(files.read(document)).iter("image"):
                sides = [
                    [int(box.get(key, math.nan)) for key in ("left", "top", "width", "height")]
                    for box in image.iter("box")
                ]
                boxes = np.array(sides, np.float32)
                boxes[:, 2:] += boxes[:, :2]
                yield (
                    image.get("file", ""),
                    LabelledBoxes(boxes=boxes, classes=np.zeros(len(boxes), np.int64)),
                )


def test_ultraface_finds_every_face(shared_data: Path) -> None:
    archive = shared_data / "img_faces_dlib_9_labelled.zip"
    path = shared_data / "face_ultraface_rfb_320_fp32.onnx"
    spec = ModelSpec(
        path=path,
        task="detect",
        decoder="ssd",
        input=InputSpec(color="rgb", resize="stretch", mean=(127.0,), std=(128.0,)),
        score_threshold=0.6,
        iou_threshold=0.3,  # upstream's own, box_utils_numpy and run_video_face_detect_onnx
    )
    engine, images, total = Reference(path), ImageFiles(archive), MatchCounts()
    vision = VisionTask(spec, engine.inputs[:1], engine.outputs)
    for name, truth in faces(archive):
        tensor, geometry = vision.preprocess(images.read(name))
        found = vision.decode(engine.infer(tensor))
        assert isinstance(found, Detections)
        in_frame = Detections(boxes=geometry.to_frame(found.boxes), classes=found.classes, scores=found.scores)
        total += count_matches(in_frame, truth, iou_threshold=0.4)
    assert total == MatchCounts(true_positives=43)
