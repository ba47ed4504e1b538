"""A map of probabilities becomes oriented boxes of text, as PaddleOCR makes them, whatever the engine puts out."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import plain_decoders as plain
import pytest

from agent.common.errors import ConfigError, DatasetError
from agent.vision.spec import ModelSpec
from agent.vision.tasks.dbnet import text_regions
from agent.vision.tasks.obb import OrientedBoxes, corner_ious
from agent.vision.tasks.opening import open_task
from engines.interface import Array, TensorSpec

SIZE = (96, 128)


def spec(**changes: Any) -> ModelSpec:
    keys = {"path": "m.onnx", "task": "obb", "decoder": "dbnet", "labels": ["text"], "score_threshold": 0.5}
    return ModelSpec.model_validate({**keys, **changes})


def decoded(map_: Array, size: tuple[int, int] = SIZE, **changes: Any) -> OrientedBoxes:
    output = np.asarray(map_, np.float32)[np.newaxis, np.newaxis]
    tensor = TensorSpec("map", output.dtype, (None, 1, None, None))
    answer = open_task(spec(**changes)).open_decoder(size, [tensor])({"map": output})
    assert isinstance(answer, OrientedBoxes)
    return answer


def written(*rectangles: tuple[tuple[float, float], tuple[float, float], float], least: float = 0.9) -> Array:
    """Return a map with solid words: centre, sides and the angle in degrees of each."""
    map_ = np.full(SIZE, 0.1, np.float32)
    for each in rectangles:
        cv2.fillConvexPoly(map_, cv2.boxPoints(each).astype(np.int32), least)
    return map_


@pytest.mark.parametrize("seed", range(4))
def test_regions_are_those_of_plain_loops(seed: int) -> None:
    random = np.random.default_rng(seed)
    sides = [(float(random.uniform(8, 24)), float(random.uniform(2, 9))) for _ in range(4)]
    centres = [(32.0 + 64 * (at % 2), 24.0 + 48 * (at // 2)) for at in range(4)]
    map_ = written(*zip(centres, sides, random.uniform(-90, 90, 4).tolist(), strict=True))
    map_ *= random.uniform(0.6, 1.0, SIZE).astype(np.float32)
    map_[map_ < 0.2] = 0.0
    expected = plain.dbnet(map_, (192, 256), 0.3)
    corners, scores = text_regions({"map": map_[np.newaxis]}, (192, 256), 0.3)
    assert len(corners) == len(expected) > 1
    ious = corner_ious(corners, np.array([each for each, _ in expected], np.float32))
    assert ious.max(axis=1).min() > 0.985
    np.testing.assert_allclose(scores, [expected[at][1] for at in ious.argmax(axis=1)], atol=0.06)


def test_a_word_grows_by_its_area_over_its_outline() -> None:
    """41 x 11 cells have sides of 40 and 10 between the middles of cells: each moves by 1.6 * 400 / 100 = 6.4."""
    map_ = np.zeros(SIZE, np.float32)
    map_[40:51, 30:71] = 0.8
    found = decoded(map_)
    np.testing.assert_allclose(found.boxes, [[30.5 - 6.4, 40.5 - 6.4, 70.5 + 6.4, 50.5 + 6.4]], atol=1e-3)
    assert (found.scores.tolist(), found.classes.tolist()) == ([pytest.approx(0.8)], [0])
    halved = decoded(map_, (SIZE[0] * 2, SIZE[1] * 2))
    np.testing.assert_allclose(halved.corners, found.corners * 2, atol=1e-3)
    assert len(decoded(map_, score_threshold=0.81)) == 0
    faint = decoded(map_ * np.float32(0.3))
    assert len(faint) == 0, "below the probability of a region"


def test_thin_regions_are_noise() -> None:
    map_ = np.zeros(SIZE, np.float32)
    map_[10:13, 10:60] = 1.0  # two cells between its middles
    map_[50:54, 10:60] = 1.0
    assert decoded(map_).boxes[:, 1].tolist() == [pytest.approx(50.5 - 1.6 * 147 / 104, abs=1e-3)]


@pytest.mark.parametrize(
    ("value", "count"), [(0.0, 0), (1.0, 1), (np.nan, 0), (np.inf, 0), (-np.inf, 0), (1e30, 0), (-1.0, 0)]
)
def test_a_map_of_one_value_gives_a_sound_answer(value: float, count: int) -> None:
    found = decoded(np.full(SIZE, value, np.float32))
    assert len(found) == count or value == 1e30
    assert np.isfinite(found.corners).all()
    assert 0.0 <= found.fidelity(decoded(written(((60, 40), (30, 10), 0)))) <= 1.0


def test_nan_in_a_word_takes_no_other_word_along() -> None:
    map_ = written(((40, 20), (30, 10), 0), ((40, 70), (30, 10), 0))
    map_[20, 40] = np.nan
    assert len(decoded(map_)) == 1
    assert text_regions({"map": map_}, SIZE, 0.5)[1].tolist() == [pytest.approx(0.9, abs=0.2)]


def test_the_thousand_largest_of_many_regions_count() -> None:
    map_ = np.zeros((640, 640), np.float32)
    for row in range(0, 630, 10):
        for column in range(0, 630, 10):
            map_[row : row + 5, column : column + 5] = 0.9
    map_[600:640, 0:90] = 0.9
    started = time.process_time()
    found = decoded(map_, (640, 640))
    assert len(found) == 1000
    assert (found.boxes[:, 2] - found.boxes[:, 0]).max() > 80
    noise = np.zeros((640, 640), np.float32)
    noise[::2, ::2] = 1.0
    assert len(decoded(noise, (640, 640))) == 0
    assert time.process_time() - started < 20.0, "bounded, however many there are"


def test_words_are_not_suppressed_unless_the_spec_says_so() -> None:
    """Grown, two lines may overlap."""
    map_ = np.zeros(SIZE, np.float32)
    map_[30:50, 10:90] = 0.9
    map_[53:56, 10:90] = 0.9
    map_[52:58, 10:90] = 0.9
    assert len(decoded(map_)) == 2
    assert len(decoded(map_, nms="per-class", iou_threshold=0.1)) == 1


def test_moved_and_lost_words_cost_their_share() -> None:
    words = [((30.0, 20.0), (30.0, 10.0), 10.0), ((90.0, 70.0), (30.0, 10.0), -30.0)]
    reference = decoded(written(*words))
    fidelities = [
        decoded(written(words[0], ((90.0 + by, 70.0), *words[1][1:]))).fidelity(reference) for by in (0, 2, 5)
    ]
    assert fidelities[0] == pytest.approx(1.0)
    assert fidelities == sorted(fidelities, reverse=True)
    assert fidelities[2] < 0.85
    assert decoded(written(words[0])).fidelity(reference) == pytest.approx(2 / 3)


@pytest.mark.parametrize("shape", [(2, 96, 128), (1, 96, 64), (1, 1)])
def test_outputs_that_are_no_map_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"decoder\.shape: .*map of probabilities"):
        text_regions({"out": np.zeros(shape, np.float32)}, SIZE, 0.5)


def mmocr(folder: Path, **changes: Any) -> Path:
    """Write one picture with a word, and an unreadable one, in MMOCR's format."""
    cv2.imwrite(str(folder / "a.png"), np.zeros((*SIZE, 3), np.uint8))
    instances = [
        {"polygon": [10, 10, 50, 10, 50, 30, 10, 30], "bbox": [10.0, 10, 50, 30], "bbox_label": 0, "ignore": False},
        {"polygon": [60, 50, 120, 50, 120, 90, 60, 90], "bbox": [60.0, 50, 120, 90], "bbox_label": 0, "ignore": True},
    ]
    image = {"img_path": "imgs/test/a.png", "height": SIZE[0], "width": SIZE[1], "instances": instances, **changes}
    about = {"dataset_type": "TextDetDataset", "category": [{"id": 0, "name": "text"}]}
    (folder / "textdet_test.json").write_text(json.dumps({"metainfo": about, "data_list": [image]}))
    return folder


def boxed(*boxes: tuple[float, float, float, float], scores: tuple[float, ...]) -> OrientedBoxes:
    corners = np.array([[(a, b), (c, b), (c, d), (a, d)] for a, b, c, d in boxes], np.float32).reshape(-1, 4, 2)
    return OrientedBoxes.around(corners, np.zeros(len(boxes), np.int64), np.array(scores, np.float32))


def test_unreadable_text_is_neither_hit_nor_mistake(tmp_path: Path) -> None:
    task = open_task(spec())
    ((_, truth),) = task.labelled_images(mmocr(tmp_path))
    read, unreadable, invented = (10, 10, 50, 30), (62, 52, 90, 88), (5, 60, 40, 80)
    right = task.evaluation([(boxed(read, unreadable, scores=(0.9, 0.8)), truth)])
    assert [right.scores[name] for name in ("map50", "f1")] == pytest.approx([1.0, 1.0])
    wrong = task.evaluation([(boxed(read, unreadable, invented, scores=(0.7, 0.8, 0.9)), truth)])
    assert wrong.scores["f1"] == pytest.approx(2 / 3)
    unsure = task.evaluation([(boxed(read, invented, scores=(0.9, 0.4)), truth)])
    assert unsure.scores["f1"] == 1.0, "below the spec's threshold it is no answer"


def test_damaged_labels_of_text_are_refused(tmp_path: Path) -> None:
    task = open_task(spec())
    with pytest.raises(DatasetError, match=r"dataset\.label"):
        task.labelled_images(mmocr(tmp_path, instances="none"))
    mmocr(tmp_path, instances=[{"polygon": [1, 2], "bbox": [1.0, 1, 2, 2], "bbox_label": 0}])
    with pytest.raises(DatasetError, match=r"dataset\.label"):
        task.evaluation((boxed(scores=()), truth) for _, truth in task.labelled_images(tmp_path))
