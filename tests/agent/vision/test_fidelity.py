from __future__ import annotations

import math

import numpy as np
import pytest

from agent.vision.answer import MatchCounts
from agent.vision.boxes import LabelledBoxes, iou_matrix
from agent.vision.detections import Detections, count_matches, match
from agent.vision.fidelity import Fidelity, fidelity
from agent.vision.tasks.classify import Classification
from agent.vision.tasks.raw import RawOutputs, sqnr_db


def detections(*rows: tuple[float, float, float, float, int, float]) -> Detections:
    table = np.array(rows, np.float32).reshape(-1, 6)
    return Detections(boxes=table[:, :4], classes=table[:, 4].astype(np.int64), scores=table[:, 5])


NOTHING = detections()
A = (0.0, 0.0, 10.0, 10.0)
B = (100.0, 0.0, 120.0, 20.0)


def test_iou_by_hand() -> None:
    boxes = np.array([[0, 0, 10, 10], [5, 0, 15, 10], [20, 20, 30, 30], [3, 3, 3, 3]], np.float32)
    expected = np.array([[1, 1 / 3, 0, 0], [1 / 3, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]])
    assert np.allclose(iou_matrix(boxes, boxes), expected)


def test_classify_compares_top_1_only() -> None:
    reference = Classification(3, 0.9)
    assert fidelity(Classification(3, 0.2), reference) == Fidelity(1.0)
    assert fidelity(Classification(4, 0.9), reference) == Fidelity(0.0)


def test_detect_is_f1_of_matches() -> None:
    reference = detections((*A, 0, 0.9), (*B, 1, 0.8))
    assert fidelity(reference, reference) == Fidelity(1.0)
    assert fidelity(detections((*A, 0, 0.5)), reference) == Fidelity(2 / 3)
    assert fidelity(detections((*A, 1, 0.5), (*B, 1, 0.9)), reference) == Fidelity(0.5)  # one wrong class
    assert fidelity(NOTHING, reference) == Fidelity(0.0)
    assert fidelity(reference, NOTHING) == Fidelity(0.0)


def test_frames_without_detections_agree_and_say_so() -> None:
    assert fidelity(NOTHING, NOTHING) == Fidelity(1.0, is_empty=True)


def test_an_object_is_claimed_once_and_by_the_surest() -> None:
    truth = LabelledBoxes(boxes=np.array([A], np.float32), classes=np.array([0]))
    doubled = detections((0, 0, 10, 9, 0, 0.6), (0, 0, 10, 8, 0, 0.9))
    assert match(doubled, truth, 0.5).tolist() == [False, True]
    assert match(doubled, truth, 0.85).tolist() == [True, False]
    assert count_matches(doubled, truth) == MatchCounts(1, 1, 0)


def test_a_claimed_object_leaves_the_next_best() -> None:
    truth = LabelledBoxes(boxes=np.array([[0, 0, 10, 10], [0, 3, 10, 13]], np.float32), classes=np.array([0, 0]))
    found = detections((0, 0, 10, 10, 0, 0.9), (0, 1, 10, 11, 0, 0.8))
    assert match(found, truth, 0.5).all()


def test_counts_add_up_over_a_stretch() -> None:
    total = sum([MatchCounts(2, 1, 0), MatchCounts(1, 0, 2)], MatchCounts())
    assert total == MatchCounts(3, 1, 2)
    assert total.f1 == pytest.approx(6 / 9)
    assert MatchCounts().f1 == 1.0


def test_raw_asks_for_an_sqnr() -> None:
    reference = {"out": np.array([3.0, 4.0], np.float32)}
    close, far = {"out": np.array([3.0, 4.5], np.float32)}, {"out": np.array([3.0, 4.6], np.float32)}
    assert sqnr_db(close, reference) == pytest.approx(20.0)  # 25 against 0.25
    assert fidelity(RawOutputs(close, 19.99), RawOutputs(reference)) == Fidelity(1.0)
    assert fidelity(RawOutputs(far), RawOutputs(reference)) == Fidelity(0.0)


@pytest.mark.parametrize("shape", [(1, 4), (1, 0, 6)])
def test_raw_outputs_without_a_value_prove_nothing(shape: tuple[int, ...]) -> None:
    nothing, something = (RawOutputs({"out": np.full(shape, value)}) for value in (0.0, 1.0))
    assert fidelity(nothing, nothing).is_empty
    if something.outputs["out"].size:
        assert fidelity(something, nothing) == Fidelity(0.0)
        assert fidelity(nothing, something) == Fidelity(0.0)


def test_the_worst_output_decides() -> None:
    reference = {"large": np.full(9, 1000.0), "small": np.full(9, 0.01)}
    served = {"large": np.full(9, 1000.0), "small": np.full(9, 0.02)}
    assert sqnr_db(served, reference) == pytest.approx(0.0)


@pytest.mark.parametrize("shape", [(1, 6, 100), (1, 100, 6), (1, 6, 9, 12), (1, 9, 12, 6), (1, 3, 8, 8, 6)])
def test_wrong_scores_beside_large_coordinates_are_seen(shape: tuple[int, ...]) -> None:
    """Four channels of coordinates, one of scores, and one of scores for a class that is not there."""
    axis = shape.index(6)
    table = np.random.default_rng(0).uniform(0.0, 600.0, shape)
    rows = np.moveaxis(table, axis, -1)
    rows[..., 4] = np.where(rows[..., 4] > 500.0, 0.9, 0.01)
    rows[..., 5] = 1e-4
    reference = RawOutputs({"out": table})
    found = []
    for size in (0.001, 0.1, 0.5, 1.0):
        served = table.copy()
        np.moveaxis(served, axis, -1)[..., 4:] += np.random.default_rng(1).normal(0.0, size, (*rows.shape[:-1], 2))
        assert sqnr_db({"out": served}, {"out": table}) > 40.0
        found.append(RawOutputs({"out": served}).fidelity(reference))
    assert found == [1.0, 0.0, 0.0, 0.0]
    wrong = table.copy()
    np.moveaxis(wrong, axis, -1)[..., :4] += 10.0
    assert RawOutputs({"out": wrong}).fidelity(reference) == 1.0, "ten pixels of six hundred are 30 dB"


@pytest.mark.parametrize(
    ("served", "reference", "expected"),
    [
        ([0.0, 0.0], [0.0, 0.0], math.inf),
        ([0.0, 1.0], [0.0, 0.0], -math.inf),
        ([math.nan, 1.0], [1.0, 1.0], -math.inf),
        ([math.inf, 1.0], [1.0, 1.0], -math.inf),
    ],
)
def test_sqnr_at_its_limits(served: list[float], reference: list[float], expected: float) -> None:
    assert sqnr_db({"out": np.array(served)}, {"out": np.array(reference)}) == expected


def test_predictions_of_two_tasks_are_a_bug() -> None:
    with pytest.raises(TypeError, match="Classification and Detections"):
        fidelity(Classification(0, 1.0), NOTHING)
