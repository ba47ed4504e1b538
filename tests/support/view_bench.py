"""Cameras whose view a test disturbs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import cv2
import numpy as np
from numpy.typing import NDArray

from agent.monitoring.view import ViewMonitor

Image = NDArray[np.uint8]
Scene = NDArray[np.float32]
NOISE = np.random.default_rng(0).normal(0.0, 2.0, (64, 36, 64, 3)).astype(np.float32)


@cache
def scene(seed: int = 0) -> Scene:
    """Something to see: patches of other brightness with edges between them, (36, 64)."""
    rng = np.random.default_rng(seed)
    patches = cv2.resize(rng.uniform(30.0, 220.0, (8, 12)), (64, 36), interpolation=cv2.INTER_NEAREST)
    return (patches + cv2.resize(rng.uniform(-20.0, 20.0, (9, 16)), (64, 36))).astype(np.float32)


def camera(number: int, of: Scene, light: float = 1.0, blur: float = 0.0) -> Image:
    """A frame of a scene, with noise that its neighbours do not have."""
    seen = cv2.GaussianBlur(of, (0, 0), blur) if blur else of
    return (seen[..., np.newaxis] * np.float32(light) + NOISE[number % len(NOISE)]).clip(0, 255).astype(np.uint8)


def watched(change: Callable[[int], Image], frames: int = 60) -> ViewMonitor:
    """A view that began well, and then changed."""
    view = ViewMonitor()
    for number in range(30):
        assert view.update(float(number), camera(number, scene()))
    for number in range(30, 30 + frames):
        view.update(float(number), change(number))
    return view
