"""The view: what no recalibration cures is told, by the figures that say so, and the light alone is no trouble."""

from __future__ import annotations

from collections.abc import Callable

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray

from agent.view import Look, View

Image = NDArray[np.uint8]


def scene(seed: int = 0, height: int = 120, width: int = 160) -> NDArray[np.float64]:
    """Something to see: patches of other brightness with edges between them, (height, width)."""
    rng = np.random.default_rng(seed)
    patches = cv2.resize(rng.uniform(30.0, 220.0, (8, 12)), (width, height), interpolation=cv2.INTER_NEAREST)
    return patches + cv2.resize(rng.uniform(-20.0, 20.0, (height // 4, width // 4)), (width, height))


def camera(number: int, of: NDArray[np.float64], light: float = 1.0, blur: float = 0.0) -> Image:
    """A frame of a scene, with noise of its own."""
    seen = cv2.GaussianBlur(of, (0, 0), blur) if blur else of
    noise = np.random.default_rng(number).normal(0.0, 2.0, (*of.shape, 3))
    return (seen[..., np.newaxis] * light + noise).clip(0.0, 255.0).astype(np.uint8)


def watched(change: Callable[[int], Image], frames: int = 60) -> View:
    """A view that began well, and then changed."""
    view = View()
    for number in range(30):
        assert view.look(float(number), camera(number, scene()))
    for number in range(30, 30 + frames):
        view.look(float(number), change(number))
    return view


@pytest.mark.parametrize("light", [1.0, 0.3, 1.15])
def test_light_alone_is_no_trouble(light: float) -> None:
    view = watched(lambda number: camera(number, scene(), light), 600)
    assert view.state.trouble == ""
    assert view.state.evidence == {}


def test_a_dawn_that_turns_all_layout_over_is_no_trouble() -> None:
    day, night = scene(1), scene(2) * 0.5

    def dawn(number: int) -> Image:
        risen = min(max(number - 60, 0) / 120.0, 1.0)
        return camera(number, (1.0 - risen) * night + risen * day)

    view = View()
    for number in range(300):
        view.look(float(number), dawn(number))
        assert view.state.trouble == ""


def test_a_lamp_that_goes_on_moves_no_camera() -> None:
    lit = scene() * 0.6 + np.where(np.arange(160) > 80, 120.0, 0.0)
    view = watched(lambda number: camera(number, lit), 100)
    assert view.state.trouble == ""


@pytest.mark.parametrize(
    ("change", "trouble"),
    [
        (lambda number: camera(number, scene(), blur=4.0), "blurred"),
        (lambda number: camera(number, scene(), light=0.0), "blind"),
        (lambda number: camera(number, scene(5)), "moved"),
    ],
)
def test_trouble_is_told_with_its_figures(change: Callable[[int], Image], trouble: str) -> None:
    view = watched(change)
    assert view.state.trouble == trouble
    figures = view.state.evidence
    assert figures.keys() == {"luminance", "alike", "sharpness"}
    assert {
        "blurred": figures["sharpness"] < 0.5 < figures["alike"],
        "blind": figures["luminance"] < 8.0,
        "moved": figures["alike"] < 0.4,
    }[trouble]


def test_trouble_for_a_moment_is_none() -> None:
    view = watched(
        lambda number: camera(number, scene(), light=0.0) if number % 20 < 4 else camera(number, scene()), 400
    )
    assert view.state.trouble == ""


def test_trouble_that_is_over_is_over() -> None:
    view = watched(lambda number: camera(number, scene(), blur=4.0) if number < 80 else camera(number, scene()), 60)
    assert view.state.trouble == ""


def test_a_lens_that_was_covered_from_the_start_is_dark() -> None:
    view = View()
    for number in range(40):
        view.look(float(number), camera(number, scene(), light=0.0))
    assert view.state.trouble == "blind"


def test_a_camera_that_repeats_a_frame_is_frozen_until_the_next() -> None:
    view = View()
    frame = camera(0, scene())
    assert [view.look(float(second), frame) for second in range(20)] == [True] + [False] * 19
    assert (view.state.trouble, view.state.evidence) == ("frozen", {"seconds": 19.0})
    assert view.look(20.0, camera(1, scene()))
    assert view.state.trouble == ""


def test_few_equal_frames_are_not_frozen() -> None:
    view = View()
    for number in range(60):
        view.look(float(number), camera(number // 4, scene()))
    assert view.state.trouble == ""


@pytest.mark.parametrize("shape", [(1, 1), (4, 4), (9, 16), (31, 33), (1080, 1920)])
def test_frames_of_any_size_are_looked_at(shape: tuple[int, int]) -> None:
    look = Look.at(np.full((*shape, 3), 100, np.uint8))
    assert look.layout.shape == (9, 16)
    assert look.luminance == pytest.approx(100.0)
    assert look.sharpness == 0.0


def test_the_layout_has_the_means_of_its_parts() -> None:
    bright = np.zeros((36, 64, 3), np.uint8)
    bright[:, 32:] = 200
    assert np.array_equal(Look.at(bright).layout, np.repeat([[0.0] * 8 + [200.0] * 8], 9, axis=0))


def test_a_camera_that_turns_all_the_time_was_not_moved() -> None:
    view = View()
    for number in range(300):
        view.look(float(number), camera(number, scene(number % 7)))
        assert view.state.trouble == ""


def test_an_even_view_shows_nothing() -> None:
    view = View()
    for number in range(100):
        view.look(float(number), np.full((60, 80, 3), 100 + number % 2, np.uint8))
    assert view.state.trouble == "blind"
