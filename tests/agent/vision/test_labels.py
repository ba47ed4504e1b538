"""A label belongs to its frame and its model, or is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.vision.boxes import LabelledBoxes
from agent.vision.labels import LabelError, LabelKind, parse_class
from agent.vision.tasks.classify import Classify
from agent.vision.tasks.detect import FrameBoxes

LABELS = ("cat", "dog")
BOXES_OF_FRAME = FrameBoxes()
WIDTH, HEIGHT = 64, 48
NUMBERS = st.one_of(st.integers(-9, 99), st.floats(), st.sampled_from([10**400, -(2**63), True, None, "1"]))
BOXES = st.fixed_dictionaries(
    {},
    optional={
        "class": st.integers(0, 2) | NUMBERS | st.lists(NUMBERS, max_size=2),
        "box": st.lists(st.floats(-9, 99), min_size=4, max_size=4) | st.lists(NUMBERS, max_size=5) | NUMBERS,
    },
)
DOCUMENTS = st.lists(BOXES | NUMBERS, max_size=3) | NUMBERS | st.dictionaries(st.text(max_size=3), NUMBERS, max_size=2)


@settings(max_examples=1000, deadline=None)
@given(st.sampled_from([Classify.labels, BOXES_OF_FRAME]), DOCUMENTS)
def test_a_label_is_of_the_frame_and_the_model_or_is_refused(kind: LabelKind[Any, Any], document: Any) -> None:
    try:
        truth = kind.read(document, LABELS, (HEIGHT, WIDTH))
    except LabelError:
        return
    assert json.dumps(kind.document(truth), allow_nan=False)
    assert kind.is_same(truth, truth)
    if isinstance(truth, LabelledBoxes):
        assert kind is BOXES_OF_FRAME
        assert set(truth.classes.tolist()) <= {0, 1}
        for x1, y1, x2, y2 in truth.boxes.tolist():
            assert 0.0 <= x1 < x2 <= WIDTH
            assert 0.0 <= y1 < y2 <= HEIGHT
    else:
        assert truth in (0, 1)


@pytest.mark.parametrize(
    ("box", "kept"),
    [
        ([10, 20, 30, 40], [10, 20, 30, 40]),
        ([30, 40, 10, 20], [10, 20, 30, 40]),
        ([-5, 20, 999, 40.125], [0, 20, WIDTH, 40.12]),
    ],
)
def test_corners_come_in_any_order_and_boxes_are_cut_at_the_edges(box: list[float], kept: list[float]) -> None:
    truth = BOXES_OF_FRAME.read([{"class": 0, "box": box}], LABELS, (HEIGHT, WIDTH))
    assert BOXES_OF_FRAME.document(truth) == [{"class": 0, "box": pytest.approx(kept)}]


def test_a_box_that_the_store_would_round_to_nothing_is_refused() -> None:
    with pytest.raises(LabelError, match="box 10 20"):
        BOXES_OF_FRAME.read([{"class": 0, "box": [10, 20, 10.001, 40]}], LABELS, (HEIGHT, WIDTH))


def test_the_first_of_equal_names_is_meant_and_blanks_do_not_count() -> None:
    assert parse_class("crane", ("crane", "dog", "crane")) == 0
    assert parse_class(" Dog", ("crane", " dog", "Crane")) == 1
    with pytest.raises(LabelError, match=r"labels\.class: class 'CRANE'"):
        parse_class("CRANE", ("crane", "Crane"))


def test_a_label_of_a_frame_whose_size_is_not_known_is_as_it_was_given() -> None:
    truth = BOXES_OF_FRAME.read(
        [{"class": "dog", "box": [-5, 2, 999.5, 4]}, {"class": 1.0, "box": [1, 2, 3, 4]}], LABELS
    )
    assert truth.classes.tolist() == [1, 1]
    assert truth.boxes.tolist()[0] == [-5.0, 2.0, 999.5, 4.0]
    with pytest.raises(LabelError, match=r"labels\.box"):
        BOXES_OF_FRAME.read([{"class": 0, "box": [0, 0, "1", 1]}], LABELS)


def test_a_class_is_its_name_before_it_is_a_number() -> None:
    assert parse_class("3", ("5", "3", "1")) == 1
    assert parse_class("2", ("5", "3", "1")) == 2
    assert parse_class("7", ()) == 7
