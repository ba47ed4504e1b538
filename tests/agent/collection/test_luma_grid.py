"""A frame differs from another by anything that a detector could find, and not by noise."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from agent.camera.reader import read_images
from agent.camera.source import parse_source
from agent.collection.selection import COLUMNS, NEAR, ROWS, LumaGrid

Image = NDArray[np.uint8]


def backdrop(height: int = 480, width: int = 640) -> Image:
    """Something like a wall with a window, lit from one side."""
    slope = np.linspace(60.0, 160.0, width)[None, :, None] + np.zeros((height, 1, 3))
    slope[height // 4 : height // 2, width // 2 : width // 2 + width // 5] += 60.0
    return slope.astype(np.uint8)


def noisy(image: Image, deviation: float, rng: np.random.Generator) -> Image:
    noise = deviation * rng.standard_normal(image.shape, np.float32)
    return np.clip(image + noise, 0.0, 255.0).astype(np.uint8)


def distance(one: Image, other: Image) -> int:
    return int(LumaGrid.from_image(one).distances(LumaGrid.from_image(other).luma[None])[0])


@pytest.mark.parametrize("deviation", [2.0, 5.0, 10.0])
def test_camera_noise_is_nothing_new(deviation: float) -> None:
    rng = np.random.default_rng(0)
    image = backdrop()
    pairs = [(noisy(image, deviation, rng), noisy(image, deviation, rng)) for _ in range(8)]
    assert max(distance(one, other) for one, other in pairs) < NEAR


@pytest.mark.parametrize("size", [(480, 640), (1080, 1920), (352, 640)])
def test_an_object_of_a_cell_is_something_new_wherever_it_stands(size: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    height, width = size
    image = backdrop(height, width)
    for _ in range(50):
        top, left = rng.integers(0, height - height // ROWS), rng.integers(0, width - width // COLUMNS)
        seen = image.astype(np.int16)
        seen[top : top + height // ROWS, left : left + width // COLUMNS] -= 60
        assert distance(image, np.clip(seen, 0, 255).astype(np.uint8)) >= NEAR


def test_a_scene_in_another_light_is_something_new() -> None:
    image = backdrop()
    assert distance(image, (image * 0.8).astype(np.uint8)) >= NEAR
    assert LumaGrid.from_image((image * 0.8).astype(np.uint8)).brightness == pytest.approx(
        0.8 * LumaGrid.from_image(image).brightness, abs=1
    )


@pytest.mark.parametrize("size", [(1, 1), (8, 8), (16, 400), (30, 31)])
def test_frames_of_few_pixels_have_a_grid(size: tuple[int, int]) -> None:
    image = np.full((*size, 3), 200, np.uint8)
    assert LumaGrid.from_image(image).luma.shape == (ROWS, COLUMNS)
    assert LumaGrid.from_image(image).brightness == 200.0


def clip(data: Path, name: str, frames: int) -> list[Image]:
    path = data / name
    return [image for _, image in islice(read_images(parse_source(str(path))), frames)]


def test_on_a_real_clip_who_comes_in_is_new_and_who_stands_still_is_not(shared_data: Path) -> None:
    """A room of which people enter one at a time; 10 frames a second."""
    images = clip(shared_data, "vid_one_by_one_person_768x432.mp4", 420)
    still = [distance(images[n], images[n + 1]) for n in range(300, 400)]
    assert np.quantile(still, 0.9) < NEAR
    empty, occupied = images[100], images[300]
    assert distance(empty, occupied) > 4 * NEAR
