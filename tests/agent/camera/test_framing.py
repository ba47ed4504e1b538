"""Masks and a region of a camera's picture are applied before anything else has the frame."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
from camera_pictures import picture
from hypothesis import given
from hypothesis import strategies as st

from agent.camera.config import CameraConfig
from agent.camera.reader import apply_mask_and_crop, read_images
from agent.camera.source import Framing
from agent.common.errors import ConfigError
from agent.common.schema import validate

GREY = (114, 114, 114)
LEFT_HALF = ((0.0, 0.0), (0.5, 0.0), (0.5, 1.0), (0.0, 1.0))


def noise(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(7).integers(0, 100, (height, width, 3)).astype(np.uint8)


def test_masked_pixels_are_painted_over_in_place() -> None:
    image = noise(48, 64)
    before = image.copy()
    frame = apply_mask_and_crop(image, Framing(masks=[LEFT_HALF]))
    assert (frame[:, :33] == GREY).all()
    assert (frame[:, 33:] == before[:, 33:]).all()
    assert frame is image, "no copy of the whole picture is left anywhere"


def test_where_masks_overlap_they_hide_too() -> None:
    frame = apply_mask_and_crop(noise(48, 64), Framing(masks=[LEFT_HALF, LEFT_HALF]))
    assert (frame[:, :32] == GREY).all()


def test_masks_are_of_the_whole_picture_and_the_region_is_cut_from_it() -> None:
    image = noise(48, 64)
    before = image.copy()
    frame = apply_mask_and_crop(image, Framing((0.25, 0.5, 1.0, 1.0), [LEFT_HALF]))
    assert frame.shape == (24, 48, 3)
    assert frame.flags.c_contiguous
    assert (frame[:, :16] == GREY).all()
    assert (frame[:, 17:] == before[24:, 33:]).all()


shares = st.floats(0.0, 1.0)


@given(
    size=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    region=st.tuples(shares, shares, shares, shares).filter(lambda r: r[0] < r[2] and r[1] < r[3]),
    mask=st.lists(st.tuples(shares, shares), min_size=3, max_size=6),
)
def test_a_frame_of_any_region_has_pixels(
    size: tuple[int, int], region: tuple[float, float, float, float], mask: list[tuple[float, float]]
) -> None:
    frame = apply_mask_and_crop(noise(*size), Framing(region, [mask]))
    assert frame.size > 0
    assert frame.shape[0] <= size[0]
    assert frame.shape[1] <= size[1]


def test_every_reader_of_a_source_gets_the_frame(tmp_path: Path) -> None:
    for number in range(2):
        cv2.imwrite(str(tmp_path / f"{number}.png"), picture(number))
    camera = CameraConfig(source=str(tmp_path), masks=(LEFT_HALF,), region=(0.0, 0.0, 1.0, 0.5))
    frames = [image for _, image in read_images(camera.to_source())]
    assert [image.shape for image in frames] == [(24, 64, 3)] * 2
    assert all((image[:, :32] == GREY).all() for image in frames)


@pytest.mark.parametrize(
    ("camera", "words"),
    [
        ({"region": [0.5, 0.0, 0.5, 1.0]}, r"region: .*left < right"),
        ({"region": [0.0, 0.0, 1.0, 2.0]}, r"region\.3: .*less than or equal to 1"),
        ({"masks": [[[0, 0], [1, 1]]]}, r"masks\.0: .*at least 3"),
    ],
)
def test_regions_and_masks_beyond_the_picture_are_refused(camera: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        validate(CameraConfig, {"source": "csi:0", **camera}, "test")


def test_a_configuration_is_read_without_opencv() -> None:
    source = "import sys, agent.config; assert 'cv2' not in sys.modules"
    subprocess.run([sys.executable, "-c", source], check=True, timeout=60)
