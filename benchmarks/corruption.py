"""The corruption ladder: six ways in which a camera's picture gets worse, in five severities; severity 0 leaves it.

Of these, light (dark, night, bright) and contrast move the values of a network, noise adds to them, and blur takes
details away. The kinds are among those of Hendrycks & Dietterich, "Benchmarking Neural Network Robustness to Common
Corruptions and Perturbations" (2019); the severities are ours, and go further where a fixed camera at night does.
"""

from __future__ import annotations

from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

SEVERITIES = range(1, 6)
DARK = (1.0, 0.7, 0.5, 0.3, 0.15, 0.07)  # times the light
NIGHT = ((1.0, 0.0), (0.5, 0.01), (0.3, 0.02), (0.2, 0.03), (0.12, 0.04), (0.06, 0.05))  # the same, and noise
BRIGHT = (1.0, 1.2, 1.5, 2.0, 3.0, 4.0)
CONTRAST = (1.0, 0.75, 0.5, 0.3, 0.15, 0.05)  # times the distance to the frame's mean
NOISE = (0.0, 0.04, 0.08, 0.12, 0.18, 0.26)  # standard deviation, of white
BLUR_PX = (0.0, 1.0, 2.0, 3.0, 5.0, 8.0)  # standard deviation of the kernel
CONDITIONS = ("dark", "night", "bright", "contrast", "noise", "blur")

Image = NDArray[np.uint8]


def corrupt(frame: Image, condition: str, severity: int, seed: int) -> Image:
    """A frame, BGR uint8 (H, W, 3), under a condition; the noise is the same for equal seeds."""
    light: NDArray[Any] = frame.astype(np.float32) / 255.0
    if condition == "blur":
        light = cv2.GaussianBlur(light, (0, 0), BLUR_PX[severity]) if severity else light
    elif condition == "contrast":
        light = (light - light.mean()) * CONTRAST[severity] + light.mean()
    else:
        gain, noise = _GAIN_AND_NOISE[condition][severity]
        light = light * gain + noise * np.random.default_rng(seed).standard_normal(light.shape, np.float32)
    shown: Image = np.rint(np.clip(light, 0.0, 1.0) * 255.0).astype(np.uint8)
    return shown


_GAIN_AND_NOISE = {
    "dark": [(gain, 0.0) for gain in DARK],
    "night": NIGHT,
    "bright": [(gain, 0.0) for gain in BRIGHT],
    "noise": [(1.0, noise) for noise in NOISE],
}
