"""Cameras whose view a test disturbs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import cv2
import numpy as np
from numpy.typing import NDArray

from agent.monitoring.view import ViewMonitor

Image = NDArray[np.uint8]
Scene = NDArray[np.float32]
HEIGHT, WIDTH = 72, 128
NOISE = np.random.default_rng(0).normal(0.0, 2.0, (16, HEIGHT, WIDTH, 3)).astype(np.float32)


@cache
def scene(seed: int = 0, rows: int = 8, columns: int = 12) -> Scene:
    """Something to see: patches of other brightness with edges between them, (HEIGHT, WIDTH)."""
    rng = np.random.default_rng(seed)
    patches = cv2.resize(rng.uniform(30.0, 220.0, (rows, columns)), (WIDTH, HEIGHT), interpolation=cv2.INTER_NEAREST)
    return np.asarray(patches + cv2.resize(rng.uniform(-20.0, 20.0, (9, 16)), (WIDTH, HEIGHT)), np.float32)


def camera(number: int, of: Scene, light: float = 1.0, blur: float = 0.0) -> Image:
    """A frame of a scene, with noise that its neighbours do not have."""
    seen = cv2.GaussianBlur(of, (0, 0), blur) if blur else of
    lit = seen[..., np.newaxis] * np.float32(light) + NOISE[number % len(NOISE)]
    return np.asarray(lit.clip(0, 255), np.uint8)


def watched(change: Callable[[int], Image], frames: int = 60) -> ViewMonitor:
    """A view that began well, and then changed."""
    view = ViewMonitor()
    for number in range(30):
        assert view.update(float(number), camera(number, scene()))
    for number in range(30, 30 + frames):
        view.update(float(number), change(number))
    return view


@dataclass(frozen=True)
class Conditions:
    """How a camera sees: light * picture ** gamma through a lens with a blur in pixels, on a sensor with noise.

    noise: Standard deviation of full scale. shot: True if it grows with the light.
    """

    light: float = 1.0
    gamma: float = 1.0
    noise: float = 0.0
    shot: bool = False
    blur: float = 0.0


DAY, NIGHT = Conditions(), Conditions(light=0.25, gamma=2.2, noise=0.02)


_GRAIN = np.random.default_rng(1).standard_normal((640, 960, 1), np.float32)


def taken(picture: Image, conditions: Conditions, number: int) -> Image:
    """A frame of a picture (H, W, 3) under these conditions, with noise that its neighbours do not have."""
    return _sensed(_lit(picture, conditions), conditions, number)


def _lit(picture: Image, conditions: Conditions) -> NDArray[np.float32]:
    """Light on the sensor, 1 is full scale."""
    seen = picture.astype(np.float32) / np.float32(255.0)
    if conditions.blur:
        seen = cv2.GaussianBlur(seen, (0, 0), conditions.blur)
    return np.asarray(conditions.light * seen**conditions.gamma, np.float32)


def _sensed(seen: NDArray[np.float32], conditions: Conditions, number: int) -> Image:
    if conditions.noise:
        height, width = seen.shape[:2]
        top, left = number * 37 % (640 - height), number * 53 % (960 - width)
        noise = _GRAIN[top : top + height, left : left + width] * np.float32(conditions.noise)
        seen = seen + noise * (np.sqrt(2.0 * seen) if conditions.shot else np.float32(1.0))
    return np.asarray(np.rint(np.clip(seen, 0.0, 1.0) * np.float32(255.0)), np.uint8)


def troubles(pictures: Sequence[Image], *periods: Conditions) -> list[str]:
    """The trouble of a view at the end of each period of conditions, 40 frames of the pictures in turn."""
    view, number, found = ViewMonitor(), 0, []
    for conditions in periods:
        lit = [_lit(picture, conditions) for picture in pictures]
        for _ in range(40):
            view.update(float(number), _sensed(lit[number % len(lit)], conditions, number))
            number += 1
        found.append(view.state.trouble)
    return found
