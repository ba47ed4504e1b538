from __future__ import annotations

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from network_inputs import of_size

from agent.common.errors import CameraError
from agent.vision.preprocess import NetworkInput, Preprocessor
from agent.vision.spec import Anchor, InputSpec, Resize

SIDES = st.integers(1, 200)


def noise(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(height * 1000 + width).integers(0, 256, (height, width, 3), dtype=np.uint8)


def test_stretch_normalises_channels_in_model_order() -> None:
    spec = InputSpec(
        color="rgb", resize="stretch", scale=1 / 255, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)
    )
    frame = noise(60, 80)
    tensor, _ = Preprocessor(spec, of_size(32, 48))(frame)
    rgb = cv2.resize(frame, (48, 32))[:, :, ::-1].astype(np.float64)
    expected = ((rgb / 255 - spec.mean) / spec.std).transpose(2, 0, 1)
    assert tensor.dtype == np.float32
    np.testing.assert_allclose(tensor[0], expected, atol=1e-6)


def test_bgr_without_normalisation_is_exact() -> None:
    frame = noise(32, 48)
    tensor, _ = Preprocessor(InputSpec(), of_size(32, 48))(frame)
    assert np.array_equal(tensor[0], frame.transpose(2, 0, 1))


def test_gray_has_one_channel() -> None:
    frame = noise(20, 20)
    spec = InputSpec(color="gray", mean=(127.0,), std=(128.0,))
    tensor, _ = Preprocessor(spec, of_size(20, 20, channels=1))(frame)
    expected = (cv2.cvtColor(frame, cv2.COLOR_BGR2GRAY).astype(np.float64) - 127) / 128
    assert tensor.shape == (1, 1, 20, 20)
    np.testing.assert_allclose(tensor[0, 0], expected, atol=1e-6)


@pytest.mark.parametrize(("anchor", "top"), [("top-left", 0), ("center", 8)])
def test_letterbox_keeps_the_aspect_and_pads(anchor: Anchor, top: int) -> None:
    preprocess = Preprocessor(InputSpec(anchor=anchor, pad=9), of_size(32, 32))
    tensor, geometry = preprocess(np.full((50, 100, 3), 200, np.uint8))
    expected = np.full((32, 32), 9, np.float32)
    expected[top : top + 16] = 200
    assert all(np.array_equal(plane, expected) for plane in tensor[0])
    assert (geometry.scale_x, geometry.scale_y, geometry.top_px, geometry.left_px) == (0.32, 0.32, top, 0)


def test_padding_is_repainted_when_the_frame_size_changes() -> None:
    preprocess = Preprocessor(InputSpec(pad=9), of_size(32, 32))
    preprocess(np.full((100, 50, 3), 200, np.uint8))
    changed, geometry = preprocess(np.full((50, 100, 3), 100, np.uint8))
    fresh, expected = Preprocessor(InputSpec(pad=9), of_size(32, 32))(np.full((50, 100, 3), 100, np.uint8))
    assert geometry == expected
    assert np.array_equal(changed, fresh)


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


@pytest.mark.parametrize(("anchor", "top", "left"), [("top-left", 0, 0), ("center", 1, -3)])
def test_pad_keeps_the_pixels_and_cuts_what_lies_beyond(anchor: Anchor, top: int, left: int) -> None:
    frame = noise(6, 13)
    tensor, geometry = Preprocessor(InputSpec(resize="pad", anchor=anchor, pad=9), of_size(8, 8))(frame)
    expected = np.full((8, 8, 3), 9, np.uint8)
    expected[top : top + 6] = frame[:, -left : 8 - left]
    assert np.array_equal(tensor[0], expected.transpose(2, 0, 1))
    assert (geometry.scale_x, geometry.scale_y, geometry.top_px, geometry.left_px) == (1.0, 1.0, top, left)
    assert geometry.to_frame(np.array([[0.0, 0.0, 8.0, 8.0]], np.float32)).tolist() == [[-left, 0.0, 8 - left, 6.0]]


@pytest.mark.parametrize(
    ("frame_size", "input_size"),
    [((20, 30), (24, 32)), ((24, 32), (24, 32)), ((1, 33), (16, 40)), ((999, 7), (48, 16))],
)
def test_native_takes_the_frame_s_size_within_bounds(frame_size: tuple[int, int], input_size: tuple[int, int]) -> None:
    preprocess = Preprocessor(
        InputSpec(resize="native", multiple=8, pad=9), NetworkInput(3, (16, 16), (16, 16), (48, 64))
    )
    preprocess(noise(40, 40))
    frame = noise(*frame_size)
    tensor, geometry = preprocess(frame)
    expected = np.full((*input_size, 3), 9, np.uint8)
    kept = frame[: input_size[0], : input_size[1]]
    expected[: kept.shape[0], : kept.shape[1]] = kept
    assert np.array_equal(tensor[0], expected.transpose(2, 0, 1))
    assert (geometry.scale_x, geometry.scale_y, geometry.top_px, geometry.left_px) == (1.0, 1.0, 0, 0)


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
