"""The light of the hour, and the sensor that turns it into 8-bit code values.

Radiance is linear and in units of the sensor's full well: 1.0 saturates. The exposure is fixed, as on a board
whose operator switched automatic exposure off, so the pixel values themselves follow the day. A real street
spans far more between night and noon than one exposure can hold. This one is compressed to what a camera set
for both would show: its lamp-lit road at night has about a thirtieth of the radiance of the road in the sun.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import cv2
import numpy as np
import numpy.typing as npt

Image = npt.NDArray[np.uint8]
Linear = npt.NDArray[np.float32]
Colour = tuple[float, float, float]  # blue, green, red, linear

LAMP_COLOUR: Colour = (0.45, 0.78, 1.0)
_NIGHT_SKY_GLOW = 0.006
_LAMPS_OUT_ABOVE_DEG = 1.0
_READ_NOISE = 0.0011
_FULL_WELL_ELECTRONS = 5000.0
_NOISE_TILE_PX = (640, 1024)


@dataclass(frozen=True)
class Light:
    """Everything that lights the street at one hour; colours are irradiance, blue green red."""

    sky: Colour
    sun: Colour
    to_sun: tuple[float, float, float]
    lamps: float
    headlamps: bool


def _smoothstep(value: float, low: float, high: float) -> float:
    x = min(max((value - low) / (high - low), 0.0), 1.0)
    return x * x * (3.0 - 2.0 * x)


def light_at(hour: float) -> Light:
    """The light at `hour` (0 to 24, local solar time) of a day whose noon sun stands 55 degrees high.

    The sun rises at six behind the camera's left shoulder and wanders to the right, so it shines on the far
    house fronts.
    """
    elevation_deg = 55.0 * math.sin(math.pi * (hour - 6.0) / 12.0)
    day = _smoothstep(elevation_deg, -9.0, 22.0)
    shine = _smoothstep(elevation_deg, 0.5, 20.0)
    warmth = 1.0 - _smoothstep(elevation_deg, 2.0, 28.0)
    glow, sun = _NIGHT_SKY_GLOW + 0.65 * day, 1.7 * shine
    elevation, azimuth = math.radians(max(elevation_deg, 0.5)), math.radians(-50.0 + 14.0 * (hour - 6.0))
    return Light(
        sky=(1.15 * glow, 1.0 * glow, 0.9 * glow),
        sun=(sun * (0.90 - 0.35 * warmth), sun * (0.98 - 0.16 * warmth), sun),
        to_sun=(
            math.cos(elevation) * math.sin(azimuth),
            math.sin(elevation),
            -math.cos(elevation) * math.cos(azimuth),
        ),
        lamps=1.0 - _smoothstep(elevation_deg, _LAMPS_OUT_ABOVE_DEG - 2.0, _LAMPS_OUT_ABOVE_DEG),
        headlamps=elevation_deg < _LAMPS_OUT_ABOVE_DEG + 2.0,
    )


def _srgb(linear: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The sRGB transfer curve (IEC 61966-2-1), [0, 1] to [0, 1]."""
    return np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * np.maximum(linear, 1e-9) ** (1 / 2.4) - 0.055)


_ENCODE: Image = np.rint(255.0 * _srgb(np.arange(65536) / 65535.0)).astype(np.uint8)
_CODES = np.arange(256) / 255.0
_DECODE = np.where(_CODES <= 0.04045, _CODES / 12.92, ((_CODES + 0.055) / 1.055) ** 2.4).astype(np.float32)


def encode(radiance: Linear) -> Image:
    """Linear radiance of any shape, clipped to [0, 1], to 8-bit code values of the sRGB curve."""
    steps = (np.clip(radiance, 0.0, 1.0) * np.float32(65535.0)).astype(np.uint16)
    return np.asarray(_ENCODE[steps], dtype=np.uint8)


def decode(codes: Image) -> Linear:
    """8-bit code values back to linear radiance."""
    return np.asarray(_DECODE[codes], dtype=np.float32)


def _noise_per_code() -> npt.NDArray[np.float32]:
    """Standard deviation of shot and read noise behind the curve, in code values, for every code value."""
    linear = _DECODE.astype(np.float64)
    slope = np.gradient(_CODES, linear)
    deviation = np.sqrt(linear / _FULL_WELL_ELECTRONS + _READ_NOISE**2)
    return (255.0 * slope * deviation).astype(np.float32)


class Sensor:
    """Adds shot and read noise. One large tile of normal numbers is shifted at random for every frame."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng((seed, 0))
        self._seed = seed
        self._tile = rng.standard_normal((*_NOISE_TILE_PX, 3), dtype=np.float32)
        self._deviation = _noise_per_code()

    def expose(self, codes: Image, frame: int) -> Image:
        """A noisy copy of an image (rows, columns, 3); `frame` picks the noise, so it can be repeated."""
        rows, columns = codes.shape[:2]
        rng = np.random.default_rng((self._seed, 1, frame))
        top = int(rng.integers(0, self._tile.shape[0] - rows))
        left = int(rng.integers(0, self._tile.shape[1] - columns))
        noise = self._tile[top : top + rows, left : left + columns] * cv2.LUT(codes, self._deviation)
        return np.asarray(cv2.add(codes, noise, dtype=cv2.CV_8U), dtype=np.uint8)
