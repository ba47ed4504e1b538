from __future__ import annotations

import numpy as np
import pytest
from network_inputs import noise, of_size

from agent.common.errors import CameraError
from agent.vision.preprocess import Preprocessor
from agent.vision.spec import InputSpec


def test_frames_may_be_views() -> None:
    frame = noise(32, 32)
    preprocess = Preprocessor(InputSpec(), of_size(32, 32))
    mirrored = preprocess(frame[:, ::-1])[0].copy()
    assert np.array_equal(mirrored, preprocess(np.ascontiguousarray(frame[:, ::-1]))[0])


def test_boxes_are_clipped_to_the_frame() -> None:
    _, geometry = Preprocessor(InputSpec(), of_size(32, 32))(noise(16, 32))
    boxes = np.array([[-5.0, -5.0, 40.0, 40.0]], np.float32)
    assert geometry.to_frame(boxes).tolist() == [[0.0, 0.0, 32.0, 16.0]]
    assert geometry.to_frame(np.empty((0, 4), np.float32)).shape == (0, 4)


@pytest.mark.parametrize(
    "frame",
    [
        np.zeros((8, 8, 3), np.float32),
        np.zeros((8, 8), np.uint8),
        np.zeros((8, 8, 4), np.uint8),
        np.zeros((0, 8, 3), np.uint8),
    ],
)
def test_refuses_other_frames(frame: np.ndarray) -> None:
    with pytest.raises(CameraError, match="expected uint8") as caught:
        Preprocessor(InputSpec(), of_size(8, 8))(frame)
    assert caught.value.code == "camera.frame"
