"""A frame as a picture: what was found is drawn where it is, into a copy."""

from __future__ import annotations

import cv2
import numpy as np
import pytest
from results_bench import HALVED, SPEC, detections

from agent.camera.capture import Frame
from agent.results.snapshot import annotate, encode_jpeg
from agent.vision.answer import Answer
from agent.vision.preprocess import Geometry
from agent.vision.task import ServedFrame
from agent.vision.tasks.classify import Classification
from agent.vision.tasks.raw import RawOutputs

GREY = 128


def drawn(result: Answer, geometry: Geometry | None = None) -> np.ndarray:
    """Where the picture differs from the frame (height, width)."""
    image = np.full((120, 160, 3), GREY, np.uint8)
    served = ServedFrame(Frame(0, 0.0, 0, image), "a", result, 0, 0.0, geometry)
    picture = annotate(served, SPEC)
    assert (image == GREY).all()
    return np.asarray((picture != GREY).any(axis=2))


def test_a_box_is_drawn_where_it_is_in_the_frame() -> None:
    """In the network from (10, 30) to (20, 45); the frame is twice as large, and begins 20 pixels further down."""
    in_frame = drawn(detections(0.5), HALVED)
    as_is = drawn(detections(0.5))
    for found, (left, top, right, bottom) in ((in_frame, (20, 10, 40, 40)), (as_is, (10, 30, 20, 45))):
        assert found[(top + bottom) // 2, left]
        assert found[bottom, (left + right) // 2]
        assert not found[bottom - 3, (left + right) // 2]
        assert not found[bottom + 3 :, :].any()


def test_a_class_is_written_into_the_corner() -> None:
    found = drawn(Classification(1, 0.75))
    assert found[:20, :60].any()
    assert not found[30:, :].any()


def test_raw_outputs_are_not_drawn() -> None:
    assert not drawn(RawOutputs({"a": np.zeros(3, np.float32)})).any()


@pytest.mark.parametrize(
    "box",
    [
        *([-50.0, -50.0, 500.0, 500.0], [150.0, 0.0, 159.0, 5.0], [0.0, 119.0, 0.0, 119.0]),
        *([10.0, 30.0, far, far] for far in (1e30, -1e30, np.inf, np.nan)),
    ],
)
def test_a_box_at_the_edge_or_beyond_is_no_trouble(box: list[float]) -> None:
    result = detections(0.5)
    result.boxes[0] = box
    drawn(result)


def test_a_jpeg_that_would_be_too_large_is_halved() -> None:
    noise = np.random.default_rng(0).integers(0, 255, (200, 300, 3), dtype=np.uint8)
    whole, size = encode_jpeg(noise, 1 << 20)
    assert size == (200, 300)
    smaller, (height, width) = encode_jpeg(noise, len(whole) // 2)
    assert (height, width) == (100, 150)
    decoded = cv2.imdecode(np.frombuffer(smaller, np.uint8), cv2.IMREAD_COLOR)
    assert decoded is not None
    assert decoded.shape == (100, 150, 3)
