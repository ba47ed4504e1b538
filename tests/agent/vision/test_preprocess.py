from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from network_inputs import of_size

from agent.common.errors import CameraError
from agent.vision.preprocess import Preprocessor
from agent.vision.spec import Anchor, InputSpec, Resize

SIDES = st.integers(1, 200)


def noise(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(height * 1000 + width).integers(0, 256, (height, width, 3), dtype=np.uint8)


def test_the_next_call_overwrites_the_tensor() -> None:
    preprocess = Preprocessor(InputSpec(), of_size(8, 8))
    first, _ = preprocess(noise(8, 8))
    second, _ = preprocess(np.zeros((8, 8, 3), np.uint8))
    assert first is second
    assert not second.any()


def test_frames_may_be_views() -> None:
    frame = noise(32, 32)
    preprocess = Preprocessor(InputSpec(), of_size(32, 32))
    mirrored = preprocess(frame[:, ::-1])[0].copy()
    assert np.array_equal(mirrored, preprocess(np.ascontiguousarray(frame[:, ::-1]))[0])


@pytest.mark.parametrize("resize", ["letterbox", "stretch"])
@pytest.mark.parametrize("anchor", ["top-left", "center"])
@given(width=SIDES, height=SIDES, left=st.floats(0, 1), top=st.floats(0, 1))
def test_boxes_return_to_where_they_came_from(
    resize: Resize, anchor: Anchor, width: int, height: int, left: float, top: float
) -> None:
    _, geometry = Preprocessor(InputSpec(resize=resize, anchor=anchor), of_size(64, 96))(noise(height, width))
    box = np.array([[left * width, top * height, width, height]], np.float32)
    scale = np.array([geometry.scale_x, geometry.scale_y] * 2)
    in_network = box * scale + np.array([geometry.left_px, geometry.top_px] * 2)
    assert (in_network <= np.array([96, 64, 96, 64]) + 1e-6).all()
    np.testing.assert_allclose(geometry.to_frame(in_network.astype(np.float32)), box, atol=0.02)


def test_boxes_are_clipped_to_the_frame() -> None:
    _, geometry = Preprocessor(InputSpec(), of_size(32, 32))(noise(16, 32))
    boxes = np.array([[-5.0, -5.0, 40.0, 40.0]], np.float32)
    assert geometry.to_frame(boxes).tolist() == [[0.0, 0.0, 32.0, 16.0]]
    assert geometry.to_frame(np.empty((0, 4), np.float32)).shape == (0, 4)


def test_frames_of_one_size_share_a_transform() -> None:
    preprocess = Preprocessor(InputSpec(), of_size(32, 32))
    first, _ = preprocess.transform(noise(20, 30))
    assert preprocess.transform(np.zeros((20, 30, 3), np.uint8))[0] is first
    assert preprocess.transform(noise(30, 20))[0] != first


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
