from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from agent.common.errors import ConfigError
from agent.vision.answer import Decoder
from agent.vision.detections import Detections
from agent.vision.spec import ModelSpec
from agent.vision.tasks.classify import Classification
from agent.vision.tasks.opening import open_task
from agent.vision.tasks.raw import RawOutputs
from engines.interface import TensorSpec

SIZE = (64, 96)  # network input of 64 rows and 96 columns: 96 + 24 + 6 YOLOX cells


def detector(name: str, score_threshold: float = 0.5, iou_threshold: float = 0.5) -> ModelSpec:
    return ModelSpec(
        path=Path("a.onnx"),
        task="detect",
        decoder=name,
        score_threshold=score_threshold,
        iou_threshold=iou_threshold,
    )


def specs(outputs: dict[str, np.ndarray]) -> list[TensorSpec]:
    return [TensorSpec(name, output.dtype, output.shape) for name, output in outputs.items()]


def decode(spec: ModelSpec, **outputs: np.ndarray) -> Detections:
    found = open_task(spec).open_decoder(SIZE, specs(outputs))(outputs)
    assert isinstance(found, Detections)
    return found


def rows(found: Detections) -> list[tuple[list[float], int, float]]:
    return [
        (np.round(box, 3).tolist(), int(class_id), round(float(score), 4))
        for box, class_id, score in zip(found.boxes, found.classes, found.scores, strict=True)
    ]


@pytest.mark.parametrize("count", [96, 96 + 24, 96 + 24 + 6, 96 + 24 + 6 + 2])
def test_yolox_strides_follow_from_the_number_of_cells(count: int) -> None:
    output = np.zeros((1, count, 6), np.float32)
    output[0, -1] = [0, 0, 0, 0, 1, 1]
    stride = {96: 8, 120: 16, 126: 32, 128: 64}[count]
    (box, _, _) = rows(decode(detector("yolox"), output=output))[0]
    assert box[2] - box[0] == stride


def test_yolox_refuses_a_number_of_cells_that_no_strides_give() -> None:
    with pytest.raises(ConfigError, match="127 YOLOX cells for an input of 64x96"):
        decode(detector("yolox"), output=np.zeros((1, 127, 6), np.float32))


def test_ssd_with_three_classes_finds_the_boxes_by_name() -> None:
    boxes = np.full((1, 2, 4), 0.5, np.float32)
    scores = np.array([[[0.1, 0.0, 0.0, 0.9], [1, 0, 0, 0]]], np.float32)
    assert [row[1:] for row in rows(decode(detector("ssd"), scores=scores, boxes=boxes))] == [(2, 0.9)]
    with pytest.raises(ConfigError, match="SSD outputs"):
        decode(detector("ssd"), first=scores, second=boxes)


def test_a_gigantic_box_does_not_hide_the_others() -> None:
    output = np.zeros((1, 7, 20), np.float32)
    output[0, :, 0] = [0, 0, 1e30, 1e30, 0, 0, 0.9]
    output[0, :, 1] = [10, 10, 8, 8, 0, 0, 0.8]
    output[0, :, 2] = [50, 50, 8, 8, 0, 0, 0.7]
    assert len(decode(detector("yolov8"), out=output)) == 3


TWICE = {  # one object under two classes, and under one of them once more
    "out": np.array([[[0, 0, 30, 40, 0.8, 1], [1, 0, 30, 40, 0.9, 0], [0, 0, 30, 40, 0.7, 0]]], np.float32)
}


@pytest.mark.parametrize(("nms", "scores"), [("per-class", [0.9, 0.8]), ("agnostic", [0.9]), ("none", [0.9, 0.8, 0.7])])
def test_the_spec_says_which_overlaps_are_suppressed(nms: str, scores: list[float]) -> None:
    spec = detector("end2end").model_copy(update={"nms": nms})
    assert [row[2] for row in rows(decode(spec, **TWICE))] == scores


@pytest.mark.parametrize("nms", ["per-class", "agnostic", "none"])
def test_an_engine_that_sees_objects_everywhere_keeps_the_best_only(nms: str) -> None:
    generator = np.random.default_rng(0)
    output = generator.random((1, 84, 8400), np.float32) * 300
    output[0, 4:] = 0.0
    output[0, 4] = np.linspace(0.6, 0.9, 8400)
    spec = detector("yolov8", iou_threshold=1.0).model_copy(update={"nms": nms})
    decoder = open_task(spec).open_decoder(SIZE, specs({"out": output}))
    found = decoder({"out": output})
    assert isinstance(found, Detections)
    assert len(found) == 1000
    assert found.scores.min() > 0.6 + 0.3 * 7390 / 8400


def classifier(task: Literal["classify", "raw"] = "classify", labels: tuple[str, ...] = ()) -> ModelSpec:
    return ModelSpec(path=Path("a.onnx"), task=task, labels=labels)


def classify(scores: list[float]) -> Classification:
    output = np.array([scores], np.float32)
    found = open_task(classifier()).open_decoder(SIZE, specs({"out": output}))({"out": output})
    assert isinstance(found, Classification)
    return found


def test_classification_of_logits_and_of_probabilities() -> None:
    assert classify([0.0, np.log(3.0), 0.0]).class_id == 1
    assert classify([0.0, np.log(3.0), 0.0]).score == pytest.approx(0.6)
    assert classify([0.7, 0.1, 0.2]) == Classification(0, pytest.approx(0.7))  # type: ignore[arg-type]  # equals a float
    assert classify([1000.0, -1000.0, 0.0]) == Classification(0, 1.0)
    assert classify([np.nan, 1.0, np.inf]).score == 0.0


def test_labels_must_name_every_class() -> None:
    output = [TensorSpec("out", np.dtype(np.float32), (1, 3))]
    open_task(classifier(labels=("a", "b", "c"))).open_decoder(SIZE, output)
    with pytest.raises(ConfigError, match="2 labels"):
        open_task(classifier(labels=("a", "b"))).open_decoder(SIZE, output)
    with pytest.raises(ConfigError, match="one output"):
        open_task(classifier()).open_decoder(SIZE, output * 2)


def test_raw_outputs_pass_through_also_without_a_batch_axis() -> None:
    outputs = {"a": np.ones((1, 3), np.float32), "b": np.array(2.0, np.float32)}
    answer = open_task(classifier("raw")).open_decoder(SIZE, specs(outputs))(outputs)
    assert isinstance(answer, RawOutputs)
    assert answer.outputs["a"].shape == (1, 3)
    assert answer.outputs["b"] == 2.0


@pytest.fixture
def own_decoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    source = (
        "import numpy as np\n"
        "from agent.vision.detections import Detections\n"
        "BOXES = np.array([[0, 0, 8, 8], [1, 0, 8, 8], [0, 0, 4, 4]], np.float32)\n"
        "def decode(outputs, size, score_threshold):\n"
        "    assert size == (64, 96) and outputs['out'].shape == (3,) and score_threshold == 0.5\n"
        "    return Detections(boxes=BOXES, classes=np.zeros(3, np.int64), scores=outputs['out'])\n"
        "def lazy(outputs, size, score_threshold):\n    return [1, 2]\n"
        "def ragged(outputs, size, score_threshold):\n"
        "    return Detections(boxes=BOXES, classes=np.zeros(2, np.int64), scores=outputs['out'])\n"
        "def proud(outputs, size, score_threshold):\n    return outputs['nothing']\n"
        "def once(outputs, size, score_threshold):\n"
        "    assert not outputs['out'].any(), 'only zeros'\n"
        "    return Detections(boxes=BOXES, classes=np.zeros(3, np.int64), scores=outputs['out'])\n"
    )
    (tmp_path / "own_decoder.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_decoder", raising=False)
    return "own_decoder"


def open_own(name: str) -> Decoder:
    return open_task(detector(name)).open_decoder(SIZE, [TensorSpec("out", np.dtype(np.float32), (1, 3))])


def test_own_decoder_gets_threshold_and_suppression(own_decoder: str) -> None:
    outputs = {"out": np.array([[0.6, 0.9, 0.4]], np.float32)}
    found = open_own(f"{own_decoder}:decode")(outputs)
    assert isinstance(found, Detections)
    assert rows(found) == [([1.0, 0.0, 8.0, 8.0], 0, 0.9)]


@pytest.mark.parametrize(("function", "message"), [("lazy", "a list"), ("ragged", r"classes \(2,\)")])
def test_own_decoder_that_returns_something_else(own_decoder: str, function: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_own(f"{own_decoder}:{function}")({"out": np.ones((1, 3), np.float32)})


def test_own_decoder_that_raises_is_found_before_the_first_frame(own_decoder: str) -> None:
    with pytest.raises(ConfigError, match=r"KeyError: 'nothing' \(own_decoder.py, line 12\)") as caught:
        open_own(f"{own_decoder}:proud")
    assert caught.value.code == "decoder.failed"


def test_own_decoder_that_raises_later(own_decoder: str) -> None:
    decode = open_own(f"{own_decoder}:once")
    with pytest.raises(ConfigError, match="AssertionError: only zeros") as caught:
        decode({"out": np.ones((1, 3), np.float32)})
    assert caught.value.code == "decoder.failed"
