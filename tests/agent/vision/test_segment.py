"""Maps of classes: decoded from each form, compared class by class, moved to the frame, scored by masks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from agent.common.errors import ConfigError, DatasetError
from agent.vision.datasets.mask_images import MaskImages
from agent.vision.fidelity import PooledIou, fidelity
from agent.vision.policy import Policy
from agent.vision.preprocess import Geometry
from agent.vision.spec import ModelSpec
from agent.vision.tasks.maps import run_lengths
from agent.vision.tasks.opening import open_task
from agent.vision.tasks.segment import NOTHING, LabelMap
from engines.interface import TensorSpec

SIZE = (24, 32)
SKY, ROAD, POLE = 0, 1, 2


def spec(*labels: str, **changes: Any) -> ModelSpec:
    return ModelSpec.model_validate({"path": "m.onnx", "task": "segment", "labels": labels, **changes})


def decoded(output: np.ndarray, model: ModelSpec) -> np.ndarray:
    tensor = TensorSpec("map", output.dtype, (1, *output.shape))
    answer = open_task(model).open_decoder(SIZE, [tensor])({"map": output[np.newaxis]})
    assert isinstance(answer, LabelMap)
    assert not np.shares_memory(answer.classes, output)
    return answer.classes


def street() -> np.ndarray:
    """Sky above a road, and before both a pole that is two pixels wide."""
    classes = np.zeros(SIZE, np.int16)
    classes[12:] = ROAD
    classes[4:20, 10:12] = POLE
    return classes


def of(classes: np.ndarray) -> LabelMap:
    return LabelMap(classes.astype(np.int16), SIZE)


def one_hot(classes: np.ndarray, count: int) -> np.ndarray:
    return np.asarray(np.arange(count)[:, np.newaxis, np.newaxis] == classes, np.float32)


def test_each_form_of_output_gives_the_same_map() -> None:
    classes, model = street(), spec("sky", "road", "pole")
    scores = one_hot(classes, 3)
    for output in (scores, scores.transpose(1, 2, 0), classes.astype(np.int64), classes[np.newaxis].astype(np.uint8)):
        np.testing.assert_array_equal(decoded(np.ascontiguousarray(output), model), classes)


def test_a_single_score_is_a_mask_above_the_threshold() -> None:
    score = np.linspace(0.0, 1.0, 24 * 32, dtype=np.float32).reshape(SIZE)
    for output in (score[np.newaxis], score[..., np.newaxis]):
        found = decoded(output, spec("person", score_threshold=0.75))
        np.testing.assert_array_equal(found == 0, score > 0.75)
        assert (found[score <= 0.75] == NOTHING).all()


def test_classes_without_a_label_and_scores_that_are_no_numbers_are_nothing() -> None:
    scores = one_hot(street(), 3)
    assert set(np.unique(decoded(scores, spec("sky", "road")))) == {NOTHING, SKY, ROAD}
    scores[:, 0, 0] = np.nan, 0.5, np.nan
    scores[0, 0, 1] = np.nan
    scores[:, 0, 2] = np.nan
    assert decoded(scores, spec("sky", "road", "pole"))[0, :3].tolist() == [ROAD, ROAD, NOTHING]
    mask = np.full((1, *SIZE), np.nan, np.float32)
    assert (decoded(mask, spec("person")) == NOTHING).all()


@pytest.mark.parametrize("number", [-3, 40000, -(2**40), np.nan, np.inf])
def test_a_number_of_no_class_is_nothing_and_can_be_compared(number: float) -> None:
    output = street().astype(np.float32 if not np.isfinite(number) else np.int64)
    output[0, :8] = number
    expected = street()
    expected[0, :8] = NOTHING
    np.testing.assert_array_equal(decoded(output, spec()), expected)
    assert 0.9 < of(decoded(output, spec())).fidelity(of(street())) < 1.0


@pytest.mark.parametrize("shapes", [[(1, 3, 24, 99)], [(1, 10)], [(1, 3, 24, 32), (1, 3, 12, 16)]])
def test_outputs_without_one_map_are_refused(shapes: list[tuple[int, ...]]) -> None:
    outputs = [TensorSpec(f"out{at}", np.dtype(np.float32), shape) for at, shape in enumerate(shapes)]
    with pytest.raises(ConfigError, match=r"decoder\.shape: .*24x32"):
        open_task(spec()).open_decoder(SIZE, outputs)


def test_a_thin_class_that_has_gone_costs_its_share_of_the_classes() -> None:
    reference, gone = street(), street()
    gone[gone == POLE] = SKY
    agreeing = float((reference == gone).mean())
    fidelity = of(gone).fidelity(of(reference))
    assert agreeing > 0.95
    assert fidelity < 2 / 3
    assert of(reference).fidelity(of(reference)) == 1.0


def test_damage_costs_in_proportion() -> None:
    reference = street()
    found = []
    for rows in (0, 1, 2, 4):
        moved = np.roll(reference, rows, axis=0)
        moved[:rows] = SKY
        found.append(of(moved).fidelity(of(reference)))
    assert found == sorted(found, reverse=True)
    assert found[0] == 1.0
    assert found[-1] < 0.9


def test_two_empty_masks_agree_and_one_does_not() -> None:
    nothing, person = of(np.full(SIZE, NOTHING)), of(np.zeros(SIZE))
    assert (nothing.is_empty, person.is_empty) == (True, False)
    assert (nothing.fidelity(nothing), person.fidelity(nothing), nothing.fidelity(person)) == (1.0, 0.0, 0.0)


def test_a_frame_of_background_alone_proves_nothing_where_a_label_says_so() -> None:
    classes = np.zeros(SIZE, np.float32)
    person = classes.copy()
    person[:2] = 1.0

    def seen(values: np.ndarray, label: str) -> LabelMap:
        output = values[np.newaxis].astype(np.int32)
        tensor = TensorSpec("map", output.dtype, output.shape)
        found = open_task(spec(label, "person")).open_decoder(SIZE, [tensor])({"map": output})
        assert isinstance(found, LabelMap)
        return found

    for label, is_empty in (("background", True), ("__background__", True), ("road", False)):
        empty = seen(classes, label)
        assert fidelity(empty, empty).is_empty == is_empty
        assert empty.resized((2, 2)).is_empty == is_empty
        assert not fidelity(seen(person, label), empty).is_empty


def test_classes_of_many_frames_count_by_their_pixels() -> None:
    """A class that covers one pixel of a frame, and another frame's half, is lost in the first: hardly anything."""
    first, second = street(), street()
    first[first == POLE] = SKY
    second[12:] = POLE
    served = first.copy()
    first[0, 0] = POLE
    pooled = PooledIou()
    for reference, found in ((first, served), (second, second)):
        pooled.add(of(reference).overlaps_by_class(of(found)))
    whole, answered = np.vstack((first, second)), np.vstack((served, second))
    expected = {
        name: ((whole == number) & (answered == number)).sum() / ((whole == number) | (answered == number)).sum()
        for number, name in enumerate(("sky", "road", "pole"))
    }
    ious = pooled.by_class(spec("sky", "road", "pole").label)
    assert ious == pytest.approx(expected)
    assert of(served).fidelity(of(first)) < 0.67 < 0.99 < ious["pole"]
    assert of(second).overlaps_by_class(None) == [(each, 0, int((second == each).sum())) for each in (SKY, POLE)]


def test_a_class_is_served_as_itself_or_as_what_covers_it() -> None:
    reference, served = street(), street()
    served[served == POLE] = ROAD
    assert of(reference).pairs(of(served)) == [(SKY, SKY), (ROAD, ROAD), (POLE, ROAD)]
    assert of(reference).pairs(None) == [(SKY, None), (ROAD, None), (POLE, None)]


def test_in_the_frame_the_padding_is_left_out() -> None:
    """A frame of 64 x 32 in the middle of the input, at half its size: rows 4 to 20."""
    classes = np.full(SIZE, NOTHING)
    classes[4:20] = np.arange(32) // 16
    for stride in (1, 4):
        found = LabelMap(classes[::stride, ::stride].astype(np.int16), SIZE).in_frame(Geometry(64, 32, 0.5, 0.5, 0, 4))
        assert found.classes.shape == (16 // stride, 32 // stride)
        assert (found.classes == np.arange(32 // stride) // (16 // stride)).all()
    cut = LabelMap(np.zeros(SIZE, np.int16), SIZE).in_frame(Geometry(64, 24, 1.0, 1.0, 0, 0))
    assert (cut.classes[:, :32] == 0).all()
    assert (cut.classes[:, 32:] == NOTHING).all(), "what the input has cut off is not known"


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # in pycocotools
def test_masks_are_written_as_coco_reads_them() -> None:
    from pycocotools import mask as coco

    document = of(street()).as_dict(spec("sky", "road", "pole"))
    assert [each["label"] for each in document["segments"]] == ["sky", "road", "pole"]
    for segment in document["segments"]:
        np.testing.assert_array_equal(coco.decode(segment["mask"]), street() == segment["class"])
        assert segment["share"] == pytest.approx((street() == segment["class"]).mean(), abs=1e-4)
    assert run_lengths(np.ones((2, 2), np.bool_)) == [0, 4]


def test_a_map_is_drawn_over_the_whole_picture_and_a_policy_hides_classes() -> None:
    image, model = np.full((48, 64, 3), 128, np.uint8), spec("sky", "road", "pole")
    drawn = of(street()).drawn_into(image, None, model)
    assert (drawn != 128).any(axis=2).all()
    shown = of(street()).shown(Policy(classes=frozenset((POLE,))), "street", None)
    assert shown.classes_seen == {POLE}
    assert of(street()).left_out(shown) == 2
    partly = image.copy()
    shown.paint(partly)
    assert (shown.drawn_into(image, None, model) != partly).any(), "its name"
    np.testing.assert_array_equal((partly != 128).any(axis=2), cv2.resize(street(), (64, 48), interpolation=0) == POLE)


def write(folder: Path, name: str, picture: np.ndarray) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    cv2.imwrite(str(folder / name), picture)


def test_scores_are_of_all_images_together(tmp_path: Path) -> None:
    image = np.zeros((*SIZE, 3), np.uint8)
    truth = street().astype(np.uint8)
    truth[:2] = 255
    for number in range(2):
        write(tmp_path, f"images/{number}.png", image)
        write(tmp_path, f"masks/{number}.png", truth)
    task = open_task(spec("sky", "road", "pole"))
    images = task.labelled_images(tmp_path)
    assert len(images) == 2
    wrong = street()
    wrong[wrong == POLE] = SKY
    answers = [of(street()), of(wrong)]
    evaluation = task.evaluation((answer, label) for answer, (_, label) in zip(answers, images, strict=True))
    expected = []
    for number in (SKY, ROAD, POLE):
        pairs = [(each == number, truth == number) for each in (street(), wrong)]
        both = sum((found & shown).sum() for found, shown in pairs)
        either = sum(((found | shown) & (truth != 255)).sum() for found, shown in pairs)
        expected.append(both / either)
    assert expected[POLE] == 0.5
    assert [each.value for each in evaluation.by_class] == pytest.approx(expected)
    assert evaluation.scores["miou"] == pytest.approx(np.mean(expected))


def test_pixels_that_a_mask_invents_count(tmp_path: Path) -> None:
    """The left half shows the class, the upper rows are not labelled, and the model sees it in three quarters."""
    truth, found = np.ones(SIZE, np.uint8), np.full(SIZE, NOTHING)
    truth[:, :16], truth[:2], found[:, :24] = 0, 255, 0
    write(tmp_path, "images/a.png", np.zeros((*SIZE, 3), np.uint8))
    write(tmp_path, "masks/a.png", truth)
    task = open_task(spec("person"))
    ((_, label),) = task.labelled_images(tmp_path)
    scores = task.evaluation([(of(found), label)]).scores
    assert scores == pytest.approx({"miou": 2 / 3, "pixel_accuracy": 3 / 4})
    of_two = open_task(spec("person", "car"))
    ((_, label),) = of_two.labelled_images(tmp_path)
    assert of_two.evaluation([(of(found), label)]).scores["miou"] == pytest.approx(1 / 3), "1 is a car there"


def test_masks_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "a.png", np.zeros((*SIZE, 3), np.uint8))
    with pytest.raises(DatasetError, match=r"dataset\.label: no mask"):
        MaskImages(tmp_path)
    write(tmp_path, "masks/a.png", np.zeros((8, 8), np.uint8))
    with pytest.raises(DatasetError, match=r"of 8 x 8 pixels"):
        list(MaskImages(tmp_path))
    colours = np.zeros((*SIZE, 3), np.uint8)
    colours[0, 0] = 1, 2, 3
    write(tmp_path, "masks/a.png", colours)
    with pytest.raises(DatasetError, match="in colours"):
        list(MaskImages(tmp_path))
    with pytest.raises(DatasetError, match=r"dataset\.classes"):
        MaskImages(tmp_path, ("sky",), ("road",))
