"""Suppression of overlaps, by OpenCV, against greedy loops: ties, empty boxes, classes, everything beyond the input."""

from __future__ import annotations

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st
from plain_decoders import Row, iou, suppressed

from agent.vision.detections import Detections, keep_best, suppress_overlaps

CORNER, SIDE = st.integers(-40, 120), st.integers(-2, 60)  # some without area, or inside out
THRESHOLDS = st.sampled_from([0.0, 0.3003, 0.45003, 0.70003, 1.0])  # no ratio of small integers but the ends
INTEGERS = st.lists(st.tuples(CORNER, CORNER, SIDE, SIDE, st.integers(0, 3), st.integers(0, 8)), max_size=25)
REAL = st.floats(-2000, 2000, width=32)
# In steps of 1/64 pixel: of boxes of next to no area OpenCV takes each two for the same.
LENGTH = st.floats(-1, 800, width=32).map(lambda length: round(64 * length) / 64)
REALS = st.lists(st.tuples(REAL, REAL, LENGTH, LENGTH, st.integers(0, 90), st.integers(0, 5)), max_size=20)


def detections(rows: list[tuple[float, float, float, float, int, int]]) -> Detections:
    table = np.array(rows, np.float32).reshape(-1, 6)
    boxes = np.hstack((table[:, :2], table[:, :2] + table[:, 2:4]))
    return Detections(boxes=boxes, classes=table[:, 4].astype(np.int64), scores=table[:, 5] / np.float32(8))


def as_rows(found: Detections) -> list[Row]:
    return [
        (tuple(box), label, score)
        for box, label, score in zip(found.boxes.tolist(), found.classes.tolist(), found.scores.tolist(), strict=True)
    ]


def check(found: Detections, threshold: float, nms: str, most: int = 1000) -> None:
    considered = as_rows(keep_best(found, most))
    expected = [considered[index] for index in suppressed(considered, threshold, nms)]
    assert as_rows(suppress_overlaps(found, threshold, most, nms == "agnostic")) == expected


@given(INTEGERS, THRESHOLDS, st.sampled_from(["per-class", "agnostic"]), st.sampled_from([3, 1000]))
def test_suppression_agrees_with_greedy_loops(
    rows: list[tuple[float, float, float, float, int, int]], threshold: float, nms: str, most: int
) -> None:
    check(detections(rows), threshold, nms, most)


@given(REALS, st.floats(0.05, 0.95), st.sampled_from(["per-class", "agnostic"]))
def test_suppression_agrees_on_boxes_of_any_size_and_place(
    rows: list[tuple[float, float, float, float, int, int]], threshold: float, nms: str
) -> None:
    found = detections(rows)
    boxes = [row[0] for row in as_rows(found)]
    overlaps = [iou(a, b) for index, a in enumerate(boxes) for b in boxes[:index]]
    assume(all(abs(overlap - threshold) > 1e-6 for overlap in overlaps))  # there rounding may decide
    check(found, threshold, nms)


@given(INTEGERS, st.integers(0, 30))
def test_the_best_come_first_and_equals_in_their_order(
    rows: list[tuple[float, float, float, float, int, int]], most: int
) -> None:
    found = detections(rows)
    order = sorted(range(len(found)), key=lambda index: -found.scores[index])[:most]
    assert as_rows(keep_best(found, most)) == [as_rows(found)[index] for index in order]


def test_classes_stay_apart_left_of_the_input() -> None:
    # OpenCV moves class 1 by the largest coordinate + 1 in x and y: from -11 onto the box of class 0.
    found = detections([(90, 90, 10, 10, 0, 8), (-11, -11, 10, 10, 1, 7)])
    assert len(suppress_overlaps(found, 0.5, 1000)) == 2
