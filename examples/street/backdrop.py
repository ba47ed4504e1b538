"""The street without its traffic: what every surface reflects, and how the light of an hour falls on it.

All maps are computed once, by following one ray per sample to the road plane, the house fronts or the sky.
After that the empty street at any hour is a few multiplications.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import cv2
import numpy as np
import numpy.typing as npt

from examples.street import view
from examples.street.light import LAMP_COLOUR, Light, Linear

_SAMPLES_PER_PX = 2
_LAMP_POWER = 3.4  # irradiance of a lamp at one metre; 0.09 on the road under a head at 6.2 m
# The row of houses behind the camera, which keeps the low sun off the road: its eaves as (Y, Z).
_HOUSES_BEHIND = (5.0, -2.0)
_ASPHALT, _PAVING, _KERB, _PAINT = 0.115, 0.27, 0.42, 0.60
_ROOF = (0.075, 0.068, 0.07)
_GLASS = 0.05
_WALLS = (
    (0.20, 0.26, 0.42),  # brick
    (0.36, 0.46, 0.50),  # cream plaster
    (0.30, 0.31, 0.32),  # grey render
    (0.20, 0.34, 0.44),  # ochre
    (0.17, 0.20, 0.33),  # dark brick
    (0.42, 0.39, 0.34),  # pale blue
)
_STOREY_M = 2.9
_HOUSES_SEED = 7  # one street for every video and every training image


@dataclass(frozen=True)
class _House:
    left: float
    right: float
    eaves: float
    wall: tuple[float, float, float]
    bays: int
    lit: int  # which of its windows has its lamp on, -1 for none


def lamp_irradiance(points: view.Array, normal: tuple[float, float, float] | None) -> view.Array:
    """Irradiance from all street lamps at points (n, 3) in metres; without a normal, on an upright body."""
    towards = view.LAMP_HEADS - points[:, None]
    square = np.einsum("phc,phc->ph", towards, towards)
    distance = np.sqrt(square)
    down = np.maximum(towards[..., 1] / distance, 0.0)  # the housing shades the light above it
    facing = 0.5 if normal is None else np.maximum(towards @ np.asarray(normal) / distance, 0.0)
    return np.asarray(np.sum(_LAMP_POWER * facing * down / square, axis=1), dtype=np.float64)


def sun_reaches(height: npt.ArrayLike, z: npt.ArrayLike, light: Light) -> view.Array:
    """1.0 where the sun clears the houses behind the camera, 0.0 in their shade, half a metre between."""
    eaves, behind = _HOUSES_BEHIND
    rise = light.to_sun[1] / max(-light.to_sun[2], 1e-3)
    ray_at_houses = np.asarray(height) + (np.asarray(z) - behind) * rise
    return np.asarray(np.clip((ray_at_houses - eaves) / 0.5 + 0.5, 0.0, 1.0), dtype=np.float64)


def _houses(rng: np.random.Generator) -> list[_House]:
    houses: list[_House] = []
    left = -16.0
    while left < 90.0:
        bays = int(rng.integers(2, 5))
        right = left + 2.3 * bays + float(rng.uniform(0.6, 1.4))
        eaves = float(rng.choice([2, 2, 3])) * _STOREY_M + float(rng.uniform(0.3, 0.9))
        wall = _WALLS[len(houses) % len(_WALLS)]
        houses.append(_House(left, right, eaves, wall, bays, int(rng.integers(-1, 2 * bays))))
        left = right
    return houses


def _paint_house(
    house: _House,
    x: view.Array,
    y: view.Array,
    albedo: view.Array,
    glow: view.Array,
    rng: np.random.Generator,
) -> None:
    """Paint one house front with windows, door and roof into the maps of the samples at facade (x, y)."""
    inside = (x >= house.left) & (x < house.right)
    wall = inside & (y < house.eaves)
    courses = 1.0 - 0.10 * ((y % 0.45) < 0.07)
    albedo[wall] = np.asarray(house.wall) * courses[wall, None]
    albedo[inside & (y >= house.eaves)] = _ROOF
    albedo[inside & (y >= house.eaves - 0.18) & (y < house.eaves)] = 0.55
    albedo[wall & (y < 0.5)] *= 0.6
    bay_m = (house.right - house.left) / house.bays
    bay = np.clip((x - house.left) // bay_m, 0, house.bays - 1)
    in_bay = (x - house.left) - bay * bay_m - bay_m / 2
    storey, above_floor = y // _STOREY_M, y % _STOREY_M
    frame = wall & (np.abs(in_bay) < 0.72) & (above_floor > 0.8) & (above_floor < 2.35)
    pane = frame & (np.abs(in_bay) < 0.60) & (np.abs(in_bay) > 0.04) & (above_floor > 0.9) & (above_floor < 2.25)
    door_bay = int(rng.integers(0, house.bays))
    doorway = wall & (storey == 0) & (bay == door_bay)
    door = doorway & (np.abs(in_bay) < 0.5) & (y < 2.1)
    albedo[frame & ~doorway] = 0.58
    albedo[pane & ~doorway] = _GLASS
    albedo[door] = rng.uniform(0.04, 0.3, 3)
    lit = pane & ~doorway & (storey * house.bays + bay == house.lit)
    glow[lit] = np.asarray((0.020, 0.055, 0.090)) * float(rng.uniform(0.5, 1.0))


def _paint_ground(x: view.Array, z: view.Array, rng: np.random.Generator) -> view.Array:
    """Albedo (rows, columns, 3) of road, kerbs and pavements at ground (x, z) in metres."""
    with np.errstate(invalid="ignore"):
        road = (z > view.NEAR_KERB_Z) & (z < view.FAR_KERB_Z)
        kerb = (np.abs(z - view.NEAR_KERB_Z) < 0.13) | (np.abs(z - view.FAR_KERB_Z) < 0.13)
        joint = ((x % 0.9) < 0.05) | ((z % 0.6) < 0.04)
        dash = (np.abs(z - view.CENTRE_LINE_Z) < 0.08) & ((x % 5.0) < 2.2)
        edge = (np.abs(z - view.NEAR_KERB_Z - 0.4) < 0.05) | (np.abs(z - view.FAR_KERB_Z + 0.4) < 0.05)
        tracks = sum(np.exp(-(((z - track) / 0.28) ** 2)) for track in (9.9, 11.4, 13.0, 14.6))
    ground = np.where(road, _ASPHALT * (1.0 - 0.16 * np.nan_to_num(tracks)), _PAVING * np.where(joint, 0.78, 1.0))
    ground = np.where(kerb, _KERB, np.where(road & (dash | edge), _PAINT, ground))
    stains = rng.standard_normal((24, 40)).astype(np.float32)
    stains = np.asarray(cv2.resize(stains, (x.shape[1], x.shape[0]), interpolation=cv2.INTER_CUBIC))
    ground = ground * (1.0 + 0.05 * stains + 0.05 * rng.standard_normal(x.shape))
    return np.asarray(np.clip(ground, 0.02, 0.9)[..., None] * (0.97, 1.0, 1.02), dtype=np.float64)


def _shrink(samples: view.Array | npt.NDArray[np.bool_]) -> Linear:
    size = (view.WIDTH_PX, view.HEIGHT_PX)
    return np.asarray(cv2.resize(samples.astype(np.float32), size, interpolation=cv2.INTER_AREA))


class Backdrop:
    """The empty street. The attributes are maps over the video's pixels, (272, 480) or (272, 480, 3)."""

    def __init__(self) -> None:
        rng = np.random.default_rng(_HOUSES_SEED)
        ground_x, ground_z, facade_x, facade_y = view.ground_and_facade(_SAMPLES_PER_PX)
        on_ground = np.isfinite(ground_x) & (ground_z > 0) & (ground_z < view.FACADE_Z)
        albedo = _paint_ground(ground_x, np.where(np.isfinite(ground_z), ground_z, 1e3), rng)
        glow = np.zeros_like(albedo)
        front = np.zeros_like(albedo)
        built = np.zeros_like(on_ground)
        for house in _houses(rng):
            roof_m = 1.5 if house.bays > 2 else 0.3
            built |= (facade_x >= house.left) & (facade_x < house.right) & (facade_y < house.eaves + roof_m)
            _paint_house(house, facade_x, facade_y, front, glow, rng)
        built &= ~on_ground
        open_sky = ~(built | on_ground)
        albedo = np.where(built[..., None], front, np.where(open_sky[..., None], 0.0, albedo))
        glow[~built] = 0.0
        self.albedo = _shrink(albedo)
        self._glow = _shrink(glow)
        self._sky = self._sky_map(open_sky)
        self.ground, self.built = _shrink(on_ground), _shrink(built)
        self._height = _shrink(np.where(built, facade_y, 0.0))
        self.ground_x = _shrink(np.where(on_ground, ground_x, 1e4))
        self.ground_z = _shrink(np.where(on_ground, ground_z, 1e4))
        self._depth = np.where(self.built > 0.5, view.FACADE_Z, np.minimum(self.ground_z, view.FACADE_Z))
        self._lamps = self._lamp_map(on_ground, built, (ground_x, ground_z, facade_x, facade_y))

    @staticmethod
    def _sky_map(open_sky: npt.NDArray[np.bool_]) -> Linear:
        """Radiance of the sky per unit of its irradiance: paler towards the roofs, blue above."""
        rows = np.linspace(0.0, 1.0, open_sky.shape[0])[:, None, None] ** 0.6
        sky = (1 - rows) * np.asarray((0.95, 0.72, 0.52)) + rows * np.asarray((1.25, 1.18, 1.12))
        return _shrink(np.where(open_sky[..., None], sky, 0.0))

    @staticmethod
    def _lamp_map(on_ground: npt.NDArray[np.bool_], built: npt.NDArray[np.bool_], at: tuple[view.Array, ...]) -> Linear:
        ground_x, ground_z, facade_x, facade_y = at
        lamps = np.zeros(on_ground.shape)
        road = np.stack((ground_x[on_ground], np.zeros(int(on_ground.sum())), ground_z[on_ground]), axis=1)
        lamps[on_ground] = lamp_irradiance(road, (0.0, 1.0, 0.0))
        front = np.stack((facade_x[built], facade_y[built], np.full(int(built.sum()), view.FACADE_Z)), axis=1)
        lamps[built] = lamp_irradiance(front, (0.0, 0.0, -1.0))
        return _shrink(lamps)

    def radiance(self, light: Light) -> Linear:
        """The empty street under `light`: linear radiance (272, 480, 3), blue green red."""
        facing = self.ground * light.to_sun[1] + self.built * max(-light.to_sun[2], 0.0)
        sun = (facing * sun_reaches(self._height, self._depth, light)).astype(np.float32)
        lamps = self._lamps * np.float32(light.lamps)
        sky_colour = np.asarray(light.sky, np.float32)
        irradiance = sky_colour + sun[..., None] * np.asarray(light.sun, np.float32)
        irradiance += lamps[..., None] * np.asarray(LAMP_COLOUR, np.float32)
        radiance = self.albedo * irradiance + self._sky * sky_colour + self._glow * np.float32(light.lamps)
        return np.asarray(radiance, dtype=np.float32)


@cache
def backdrop() -> Backdrop:
    """The one street of the sample; making it takes about a second."""
    return Backdrop()
