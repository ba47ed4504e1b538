"""The street camera's picture at any moment and any hour, with its ground truth.

Everything is a pure function of the traffic's seed, the time and the hour of the day, so training can ask for
the same street at midnight and at noon, and a test can ask for the same frame twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import cv2
import numpy as np

from examples.street import view
from examples.street.backdrop import backdrop
from examples.street.light import Image, Light, Sensor, decode, encode, light_at
from examples.street.sprites import (
    SUBPIXEL_BITS,
    Sprite,
    fixed_point,
    pedestrian_sprite,
    post_sprite,
    vehicle_sprite,
)
from examples.street.traffic import Traffic, Vehicle
from examples.street.vehicles import shape

CLASSES = ("vehicle", "pedestrian")
MIN_VISIBLE = 0.3
MIN_WIDTH_PX, MIN_HEIGHT_PX = 6, 12

_HOUR_STEP = 1 / 240  # the light is taken in steps of a quarter of a minute, so that it need not be computed per frame
_CONTACT_LIGHT = 0.55  # what is left, in code values, of the ground's brightness right under an object
_SRGB_EXPONENT = 1 / 2.2  # a factor on radiance becomes this power of it on code values
_BEAM_IRRADIANCE = 0.10
_WIDEST_STRIDE_PX = 40


@dataclass(frozen=True)
class Label:
    """One object of the ground truth: `class_id` indexes CLASSES, `box` is x1, y1, x2, y2 in video pixels.

    The box encloses the whole silhouette, hidden parts included, cut at the frame's edges; pixel columns x1
    to x2 - 1 belong to it. `visible` is the share of the whole silhouette that is inside the frame and not
    behind something.
    """

    class_id: int
    box: tuple[float, float, float, float]
    visible: float


@dataclass(frozen=True)
class Frame:
    """An 8-bit blue-green-red image (272, 480, 3) and the objects to be found in it."""

    image: Image
    labels: list[Label]


class Street:
    """The street with the traffic of one seed, for `duration_s` seconds."""

    def __init__(self, seed: int, duration_s: float) -> None:
        self._backdrop = backdrop()
        self._traffic = Traffic(seed, duration_s)
        self._sensor = Sensor(seed)
        self._lit: tuple[int, Light, Image] | None = None

    def frame(self, ts: float, hour: float) -> Frame:
        """The picture `ts` seconds after the start under the light of `hour` (0 to 24), with its labels.

        Labels leave out what no one could be asked to find: objects less than MIN_VISIBLE visible, or whose
        box in the frame is under MIN_WIDTH_PX by MIN_HEIGHT_PX.
        """
        light, codes = self._empty_street(hour)
        image = codes.copy()
        vehicles = self._traffic.vehicles(ts)
        if light.headlamps:
            self._beams(image, vehicles)
        sprites = self._sprites(ts, vehicles, light)
        _cast_shadows(image, sprites, light)
        for sprite in sprites:
            sprite.paint(image)
        labels = [label for _, label in labelled(sprites)]
        return Frame(self._sensor.expose(image, round(ts * 1000)), labels)

    def sprites(self, ts: float) -> list[Sprite]:
        """Everything in front of the backdrop and within the frame, farthest first, in the light of midday."""
        return self._sprites(ts, self._traffic.vehicles(ts), light_at(12.0))

    def _empty_street(self, hour: float) -> tuple[Light, Image]:
        step = round(hour / _HOUR_STEP)
        if self._lit is None or self._lit[0] != step:
            light = light_at(step * _HOUR_STEP)
            self._lit = (step, light, encode(self._backdrop.radiance(light)))
        return self._lit[1:]

    def _sprites(self, ts: float, vehicles: Sequence[Vehicle], light: Light) -> list[Sprite]:
        """Everything that stands or moves in front of the backdrop and within the frame, farthest first."""
        sprites = [vehicle_sprite(vehicle, light) for vehicle in vehicles]
        walkers = self._traffic.pedestrians(ts)
        feet = view.project(np.array([(w.x, 0.0, w.z) for w in walkers]).reshape(-1, 3))
        sprites += [
            pedestrian_sprite(walker, light)
            for walker, column in zip(walkers, feet[:, 0], strict=True)
            if -_WIDEST_STRIDE_PX < column < view.WIDTH_PX + _WIDEST_STRIDE_PX
        ]
        sprites += [post_sprite(x, view.FAR_KERB_Z + 0.3, -0.7, light) for x in view.FAR_POSTS_X]
        sprites.append(post_sprite(view.NEAR_POST_X, view.NEAR_KERB_Z - 0.3, 0.7, light))
        return sorted(filter(_in_frame, sprites), key=lambda sprite: -sprite.distance)

    def _beams(self, image: Image, vehicles: Sequence[Vehicle]) -> None:
        """Brighten the road in front of the head lamps."""
        ground_x, ground_z = self._backdrop.ground_x, self._backdrop.ground_z
        for vehicle in vehicles:
            nose = vehicle.x + vehicle.heading * shape(vehicle.kind).length / 2
            reach = np.array(
                [(nose + vehicle.heading * a, 0.0, vehicle.z + b) for a in (0.0, 7.0) for b in (-1.6, 1.6)]
            )
            region = _region(view.project(reach))
            if region is None:
                continue
            ahead = (ground_x[region] - nose) * vehicle.heading
            aside = ground_z[region] - vehicle.z
            beam = np.exp(-(((ahead - 3.2) / 2.0) ** 2) - (aside / 0.85) ** 2) * (ahead > 0.0)
            beam = (_BEAM_IRRADIANCE * beam).astype(np.float32)[..., None]
            image[region] = encode(decode(image[region]) + self._backdrop.albedo[region] * beam)


def _region(corners: view.Array) -> tuple[slice, slice] | None:
    """Rows and columns of the frame that enclose `corners` (n, 2), or None if they lie outside it."""
    left, top = np.maximum(np.floor(corners.min(axis=0)).astype(int), 0)
    right, bottom = np.minimum(np.ceil(corners.max(axis=0)).astype(int) + 1, (view.WIDTH_PX, view.HEIGHT_PX))
    return (slice(top, bottom), slice(left, right)) if left < right and top < bottom else None


def _in_frame(sprite: Sprite) -> bool:
    return _region(sprite.corners) is not None


def _cast_shadows(image: Image, sprites: Sequence[Sprite], light: Light) -> None:
    """Darken the ground under the sprites and where they keep the sun off it."""
    direct = light.sun[1] * light.to_sun[1]
    shaded = (light.sky[1] / (light.sky[1] + direct)) ** _SRGB_EXPONENT
    kept = np.full(image.shape[:2], 255, np.uint8)
    for sprite in sprites:
        if sprite.shade is not None:
            cv2.fillConvexPoly(kept, fixed_point(sprite.shade), (255 * shaded,), cv2.LINE_AA, SUBPIXEL_BITS)
    for sprite in sprites:
        level = (255 * _CONTACT_LIGHT * shaded,)
        cv2.fillConvexPoly(kept, fixed_point(sprite.contact), level, cv2.LINE_AA, SUBPIXEL_BITS)
    cv2.multiply(image, cv2.merge([kept, kept, kept]), image, scale=1 / 255)


def labelled(sprites: Sequence[Sprite]) -> list[tuple[Sprite, Label]]:
    """Ground truth, by the rule of `Street.frame`, of sprites given farthest first; nearest label first."""
    taken = np.zeros((view.HEIGHT_PX, view.WIDTH_PX), np.uint8)
    labels = []
    for sprite in reversed(sprites):
        mask, left, top = sprite.silhouette()
        x1, y1 = max(left, 0), max(top, 0)
        x2, y2 = min(left + mask.shape[1], view.WIDTH_PX), min(top + mask.shape[0], view.HEIGHT_PX)
        if x1 >= x2 or y1 >= y2:
            continue
        inside, hidden = mask[y1 - top : y2 - top, x1 - left : x2 - left], taken[y1:y2, x1:x2]
        visible = cv2.countNonZero(inside & (1 - hidden)) / max(cv2.countNonZero(mask), 1)
        hidden |= inside
        x, y, width, height = cv2.boundingRect(inside)
        large_enough = width >= MIN_WIDTH_PX and height >= MIN_HEIGHT_PX
        if sprite.kind is not None and large_enough and visible >= MIN_VISIBLE:
            box = (float(x1 + x), float(y1 + y), float(x1 + x + width), float(y1 + y + height))
            labels.append((sprite, Label(sprite.kind, box, visible)))
    return labels
