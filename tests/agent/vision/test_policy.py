"""A policy leaves a part of an answer: by score, class and place."""

from __future__ import annotations

import numpy as np
import pytest
from results_bench import HALVED, detections

from agent.vision.answer import Answer
from agent.vision.detections import Detections
from agent.vision.policy import Policy
from agent.vision.tasks.classify import Classification
from agent.vision.tasks.raw import RawOutputs

# In the network's pixels; HALVED maps them to twice as much, less 50 in height, of a frame of 200 x 100.
FOUND = Detections(
    boxes=np.array([[10, 30, 20, 40], [60, 30, 80, 50], [40, 60, 60, 70]], np.float32),
    classes=np.array([0, 1, 1]),
    scores=np.array([0.9, 0.5, 0.4], np.float32),
)
RIGHT_HALF = [(0.5, 0.0), (1.0, 0.0), (1.0, 1.0), (0.5, 1.0)]


def kept(policy: Policy, found: Answer = FOUND) -> list[float]:
    shown = found.shown(policy, "street", HALVED)
    assert isinstance(shown, Detections)
    assert len(shown.boxes) == len(shown.classes) == len(shown.scores)
    return [round(score, 2) for score in shown.scores.tolist()]


def test_boxes_below_the_threshold_or_of_no_interest_are_left_out() -> None:
    assert kept(Policy()) == [0.9, 0.5, 0.4]
    assert kept(Policy(score_threshold=0.5)) == [0.9, 0.5]
    assert kept(Policy(classes=frozenset({1}))) == [0.5, 0.4]
    assert kept(Policy(score_threshold=0.45, classes=frozenset({1, 7}))) == [0.5]
    assert kept(Policy(classes=frozenset({7}))) == []
    assert kept(Policy(score_threshold=0.5, masks={"street": [RIGHT_HALF]}), detections()) == []


def test_a_box_whose_centre_lies_in_a_mask_of_its_camera_is_left_out() -> None:
    """The second box lies to the right; the third one's centre is on the border, which belongs to the mask."""
    assert kept(Policy(masks={"street": [RIGHT_HALF]})) == [0.9]
    assert kept(Policy(masks={"yard": [RIGHT_HALF]})) == [0.9, 0.5, 0.4]
    lower = [(0.0, 0.5), (1.0, 0.5), (1.0, 1.0), (0.0, 1.0)]
    assert kept(Policy(masks={"street": [RIGHT_HALF, lower]})) == [0.9]
    corner = [(0.0, 0.0), (0.4, 0.0), (0.0, 0.8)]
    assert kept(Policy(masks={"street": [corner]})) == [0.5, 0.4], "a triangle, of which the first box is inside"


def test_masks_are_of_the_whole_picture_where_a_frame_is_a_region_of_it() -> None:
    """The frame is the left half of the picture, so the picture's second quarter is the frame's right half."""
    quarter = [(0.25, 0.0), (0.5, 0.0), (0.5, 1.0), (0.25, 1.0)]
    policy = Policy(masks={"street": [quarter]})
    assert kept(policy.within({"street": (0.0, 0.0, 0.5, 1.0)})) == [0.9]
    assert kept(policy.within({"yard": (0.0, 0.0, 0.5, 1.0)})) == [0.9, 0.5, 0.4], "no centre is in that quarter"


@pytest.mark.parametrize(
    ("policy", "is_withheld"),
    [
        (Policy(score_threshold=0.75), False),
        (Policy(score_threshold=0.8), True),
        (Policy(classes=frozenset({1})), False),
        (Policy(classes=frozenset({0})), True),
    ],
)
def test_a_class_is_withheld_and_no_other_is_invented(policy: Policy, is_withheld: bool) -> None:
    assert Classification(1, 0.75).shown(policy, "street", HALVED) == Classification(1, 0.75, is_withheld)


def test_raw_outputs_stay() -> None:
    outputs = RawOutputs({"y": np.ones((1, 2), np.float32)})
    assert outputs.shown(Policy(score_threshold=1.0), "street", HALVED) is outputs
