"""Which class was served for which, object by object, and counted so that a crowd is no proof."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.validation.confusion import Disagreement
from agent.vision.detections import Detections, match
from agent.vision.tasks.classify import Classification
from agent.vision.tasks.raw import RawOutputs


def detections(*rows: tuple[float, float, float, float, int, float]) -> Detections:
    table = np.array(rows, np.float32).reshape(-1, 6)
    return Detections(boxes=table[:, :4], classes=table[:, 4].astype(np.int64), scores=table[:, 5])


A = (0.0, 0.0, 10.0, 10.0)
B = (100.0, 0.0, 120.0, 20.0)
CAR, TRUCK, BUS = 0, 1, 2


def test_a_classified_frame_is_one_object() -> None:
    assert Classification(6, 0.5).pairs(Classification(8, 0.9)) == [(6, 8)]
    assert Classification(6, 0.5).pairs(Classification(6, 0.9)) == [(6, 6)]
    assert Classification(6, 0.5).pairs(None) == [(6, None)]


def test_raw_outputs_have_no_objects() -> None:
    outputs = RawOutputs({"out": np.zeros(3, np.float32)})
    assert outputs.pairs(outputs) == outputs.pairs(None) == []


def test_an_object_is_what_lies_on_it() -> None:
    reference = detections((*A, CAR, 0.9), (*B, BUS, 0.8))
    assert reference.pairs(reference) == [(CAR, CAR), (BUS, BUS)]
    assert reference.pairs(detections((*A, TRUCK, 0.4))) == [(CAR, TRUCK), (BUS, None)]
    assert reference.pairs(detections()) == reference.pairs(None) == [(CAR, None), (BUS, None)]
    assert detections().pairs(reference) == []


@pytest.mark.parametrize(("height", "expected"), [(5.0, TRUCK), (4.9, None)])
def test_half_of_the_union_is_enough(height: float, expected: int | None) -> None:
    assert detections((*A, CAR, 0.9)).pairs(detections((0, 0, 10, height, TRUCK, 0.4))) == [(CAR, expected)]


def test_the_surest_box_claims_first_and_leaves_the_next_best() -> None:
    reference = detections((0, 0, 10, 10, CAR, 0.9), (0, 3, 10, 13, CAR, 0.8))
    served = detections((0, 1, 10, 11, TRUCK, 0.5), (0, 0, 10, 10, BUS, 0.7))
    assert reference.pairs(served) == [(CAR, BUS), (CAR, TRUCK)]
    assert reference.pairs(served[:1]) == [(CAR, TRUCK), (CAR, None)]


def test_two_classes_on_one_object_may_change_places() -> None:
    reference = detections((*A, CAR, 0.90), (*A, TRUCK, 0.85))
    assert reference.pairs(detections((*A, TRUCK, 0.87), (*A, CAR, 0.86))) == [(CAR, CAR), (TRUCK, TRUCK)]
    assert reference.pairs(detections((*A, CAR, 0.90))) == [(CAR, CAR), (TRUCK, None)]
    assert reference.pairs(detections((*A, BUS, 0.99), (*A, TRUCK, 0.87))) == [(CAR, BUS), (TRUCK, TRUCK)]


BOX = st.tuples(*[st.integers(0, 12)] * 2, *[st.integers(1, 12)] * 2, st.integers(0, 2), st.integers(0, 9))


@given(found=st.lists(BOX, max_size=8), truth=st.lists(BOX, max_size=8))
def test_equal_classes_are_those_that_fidelity_counts(
    found: list[tuple[int, ...]], truth: list[tuple[int, ...]]
) -> None:
    served, reference = (
        detections(*[(x, y, x + w, y + h, class_id, score / 9) for x, y, w, h, class_id, score in rows])
        for rows in (found, truth)
    )
    pairs = reference.pairs(served)
    assert [a for a, _ in pairs] == reference.classes.tolist()
    assert sum(a == b for a, b in pairs) == match(served, reference, 0.5).sum()
    assert sum(b is not None for _, b in pairs) <= len(served)
    assert all(a == b for a, b in reference.pairs(reference))


def test_counts_are_of_different_classes_and_totals_of_all() -> None:
    disagreement = Disagreement()
    for frame in ([(6, 8)], [(6, 6)], [(6, None)], [], [(1, 7), (6, 8)]):
        disagreement.add(frame)
    assert disagreement.counts == {(6, 8): 2, (1, 7): 1}
    assert disagreement.totals == {6: 4, 1: 1}


def test_a_crowd_counts_once() -> None:
    disagreement = Disagreement()
    disagreement.add([(CAR, TRUCK)] * 30 + [(BUS, BUS)] * 5)
    assert disagreement.counts == {(CAR, TRUCK): 1}
    assert disagreement.totals == {CAR: 1, BUS: 1}


def test_every_object_of_a_crowd_has_the_same_chance() -> None:
    first, second = Disagreement(), Disagreement()
    for _ in range(2000):
        for disagreement in (first, second):
            disagreement.add([(CAR, TRUCK), (CAR, BUS), (CAR, CAR), (CAR, None)])
    assert first.counts == second.counts  # a trial that is resumed counts as it would have
    assert first.totals == {CAR: 2000}
    for served in (TRUCK, BUS):
        assert first.counts[CAR, served] == pytest.approx(500, abs=78)  # four standard deviations


def test_a_share_above_a_limit_is_no_proof_yet() -> None:
    disagreement = Disagreement()
    disagreement.add([(6, 8)])
    assert not disagreement.appears_above(0.3)  # once is chance
    disagreement.add([(6, 8)])
    assert disagreement.appears_above(0.3)
    assert disagreement.confused(str, 0.3, 0.05) == ()
    for _ in range(4):
        disagreement.add([(6, 6)])
    assert disagreement.appears_above(0.3)
    disagreement.add([(6, None)])
    assert not disagreement.appears_above(0.3)  # 2 of 7
