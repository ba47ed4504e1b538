"""Vehicles, pedestrians and lamp posts under some light as flat polygons in the image."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import cv2
import numpy as np
import numpy.typing as npt

from examples.street import view
from examples.street.backdrop import lamp_irradiance, sun_reaches
from examples.street.light import LAMP_COLOUR, Colour, Image, Light, encode
from examples.street.traffic import Pedestrian, Vehicle
from examples.street.vehicles import shape

VEHICLE, PEDESTRIAN = 0, 1
SUBPIXEL_BITS = 4
_MATERIALS: dict[str, Colour] = {
    "glass": (0.050, 0.045, 0.040),
    "trim": (0.03, 0.03, 0.03),
    "tyre": (0.02, 0.02, 0.02),
    "hub": (0.22, 0.22, 0.22),
    "load": (0.48, 0.50, 0.50),
    "headlamp": (0.55, 0.55, 0.55),
    "tail lamp": (0.03, 0.03, 0.30),
}
# What lamps add when they are on. The camera hangs outside their beams and sees dipped head lamps and shielded
# street lamps from the side: bright points, but no glare.
_GLOW: dict[str, Colour] = {"headlamp": (0.070, 0.095, 0.110), "tail lamp": (0.005, 0.007, 0.100)}
_LAMP_HEAD_GLOW = 0.11
_POST: Colour = (0.07, 0.08, 0.07)
_SHOES: Colour = (0.03, 0.03, 0.03)
_HAIR: Colour = (0.03, 0.035, 0.05)
_FAR_LIMB_PARTS = 6
_TORSO = [(-0.095, 0.47), (-0.115, 0.74), (-0.075, 0.83), (0.075, 0.83), (0.115, 0.74), (0.095, 0.47)]
_CIRCLE = [(math.cos(math.tau * i / 10), math.sin(math.tau * i / 10)) for i in range(10)]

Point = tuple[float, float]
Outline = list[Point]


@dataclass(frozen=True, eq=False)
class Sprite:
    """One object as the camera sees it: flat polygons in painting order, with their colours."""

    kind: int | None  # VEHICLE, PEDESTRIAN, or None for street furniture
    distance: float  # Z in metres: farther sprites are painted first
    places: view.Array  # corners of all polygons, (n, 3) in metres
    starts: list[int]  # the row of each polygon's first corner; a polygon ends where the next one starts
    colours: Image  # (polygons, 3) code values
    # Its shadows on the ground: where no sky light comes through under it, and where it keeps the sun off.
    contact: view.Array
    shade: view.Array | None
    key_points: view.Array = field(
        default_factory=lambda: np.empty((0, 3))
    )  # (6, 3) in metres; none of other things than vehicles

    @cached_property
    def corners(self) -> view.Array:
        """Corners of all polygons, (n, 2) in pixels."""
        return view.project(self.places)

    def paint(self, image: Image) -> None:
        """Paint the polygons into a BGR image, anti-aliased."""
        for polygon, colour in zip(self.polygons((0, 0)), self.colours.tolist(), strict=True):
            cv2.fillPoly(image, [polygon], colour, cv2.LINE_AA, SUBPIXEL_BITS)

    def silhouette(self) -> tuple[npt.NDArray[np.uint8], int, int]:
        """The pixels it covers, 1 or 0, also beyond the frame; the mask's first column and first row."""
        left, top = np.floor(self.corners.min(axis=0)).astype(int).tolist()
        right, bottom = np.ceil(self.corners.max(axis=0)).astype(int).tolist()
        mask = np.zeros((bottom - top + 1, right - left + 1), np.uint8)
        for polygon in self.polygons((left, top)):
            cv2.fillPoly(mask, [polygon], (1,), cv2.LINE_8, SUBPIXEL_BITS)
        return mask, left, top

    def polygons(self, origin: tuple[int, int]) -> Iterator[npt.NDArray[np.int32]]:
        """Corners (n, 2) of each polygon as OpenCV draws it, from `origin` (x, y) on."""
        points = fixed_point(self.corners - origin)
        for start, end in zip(self.starts, [*self.starts[1:], len(points)], strict=True):
            yield points[start:end]


def fixed_point(corners: view.Array) -> npt.NDArray[np.int32]:
    """Pixels to OpenCV's fixed-point coordinates with SUBPIXEL_BITS fractional bits."""
    return np.rint(corners * (1 << SUBPIXEL_BITS)).astype(np.int32)


def _shadows(
    x: float, z: float, half: tuple[float, float], height: float, light: Light
) -> tuple[view.Array, view.Array | None]:
    """Contact shadow and sun shadow, as image polygons, of a box with half sizes `half` along X and Z."""
    base = np.array([(x + a * half[0], 0.0, z + b * half[1]) for a, b in ((-1, -1), (1, -1), (1, 1), (-1, 1))])
    if light.sun[2] <= 0.0 or sun_reaches(0.5 * height, z, light) < 0.5:
        return view.project(base), None
    cast = base.copy()
    cast[:, ::2] -= 0.9 * height / max(light.to_sun[1], 0.05) * np.array(light.to_sun)[::2]
    cast[:, 2] = np.minimum(cast[:, 2], view.FACADE_Z)
    pixels = view.project(np.concatenate((base, cast)))
    return pixels[:4], np.asarray(cv2.convexHull(pixels.astype(np.float32))[:, 0], dtype=np.float64)


def _shine(albedo: view.Array, normals: view.Array, at: tuple[float, float, float], light: Light) -> view.Array:
    """Radiance (n, 3) of an object's surfaces with `albedo` (n, 3) and unit `normals` (n, 3)."""
    skyward = 0.6 + 0.4 * normals[:, 1:2]  # the rest of the sky's light comes back from the road
    reach = float(sun_reaches(at[1], at[2], light))
    sunward = np.maximum(normals @ np.asarray(light.to_sun), 0.0)[:, None] * reach
    irradiance = skyward * np.asarray(light.sky) + sunward * np.asarray(light.sun)
    if light.lamps > 0.0:
        lamps = light.lamps * lamp_irradiance(np.array([at]), None) * (1.0 + 0.6 * normals[:, 1:2])
        irradiance += lamps * np.asarray(LAMP_COLOUR)
    return np.asarray(albedo * irradiance, dtype=np.float64)


def vehicle_sprite(vehicle: Vehicle, light: Light) -> Sprite:
    """A vehicle as flat faces; those that look away from the camera are left out."""
    form = shape(vehicle.kind)
    mirror = np.array((vehicle.heading, 1.0, 1.0))
    vertices = form.vertices * mirror + (vehicle.x, 0.0, vehicle.z)
    normals = np.array([face.normal for face in form.faces]) * mirror
    firsts = vertices[[face.rows.start for face in form.faces]]
    seen = np.flatnonzero(np.sum((view.EYE - firsts) * normals, axis=1) > 0.0)
    faces = [form.faces[i] for i in seen]
    albedo = np.array([_MATERIALS.get(face.material, vehicle.paint) for face in faces])
    radiance = _shine(albedo, normals[seen], (vehicle.x, 0.6 * form.height, vehicle.z), light)
    if light.headlamps:
        radiance += np.array([_GLOW.get(face.material, (0.0, 0.0, 0.0)) for face in faces])
    contact, shade = _shadows(vehicle.x, vehicle.z, (form.length / 2, form.half_width), form.height, light)
    places = np.concatenate([vertices[face.rows] for face in faces])
    key_points = form.key_points * mirror + (vehicle.x, 0.0, vehicle.z)
    starts = _starts([face.rows.stop - face.rows.start for face in faces])
    colours = encode(radiance.astype(np.float32))
    return Sprite(VEHICLE, vehicle.z, places, starts, colours, contact, shade, key_points)


def _starts(counts: list[int]) -> list[int]:
    return [0, *itertools.accumulate(counts[:-1])]


def _limb(start: Point, angle: float, length: float, wide: tuple[float, float]) -> tuple[Outline, Point]:
    """A limb that hangs from `start` at `angle` from straight down and tapers: outline and far end."""
    (x, y), sine, cosine = start, math.sin(angle), math.cos(angle)
    end_x, end_y = x + length * sine, y - length * cosine
    (a, b), (c, d) = ((half * cosine / 2, half * sine / 2) for half in wide)
    return [(x - a, y - b), (x + a, y + b), (end_x + c, end_y + d), (end_x - c, end_y - d)], (end_x, end_y)


def _oval(x: float, y: float, wide: float, high: float) -> Outline:
    return [(x + wide * c, y + high * s) for c, s in _CIRCLE]


def _leg(phase: float, trousers: Colour) -> list[tuple[Outline, Colour]]:
    swing = 0.42 * math.sin(phase)
    thigh, knee = _limb((0.0, 0.50), swing, 0.25, (0.10, 0.075))
    shin, (x, y) = _limb(knee, swing - 0.55 * max(0.0, math.cos(phase)), 0.235, (0.075, 0.05))
    shoe = [(x - 0.03, y + 0.02), (x + 0.05, y + 0.015), (x + 0.10, y - 0.025), (x - 0.03, y - 0.025)]
    return [(thigh, trousers), (shin, trousers), (shoe, _SHOES)]


def _arm(angle: float, sleeve: Colour, skin: Colour) -> list[tuple[Outline, Colour]]:
    upper, elbow = _limb((0.0, 0.80), angle, 0.17, (0.075, 0.06))
    lower, (x, y) = _limb(elbow, angle + 0.35, 0.16, (0.06, 0.045))
    return [(upper, sleeve), (lower, sleeve), (_oval(x, y, 0.025, 0.025), skin)]


def _body(walker: Pedestrian) -> list[tuple[Outline, Colour]]:
    """Outlines, forward and up from the feet in body heights, with their albedo; far limbs come first."""
    swing = 0.5 * math.sin(walker.stride)
    parts = _arm(swing, walker.top, walker.skin)
    parts += _leg(walker.stride + math.pi, walker.trousers)
    parts += _leg(walker.stride, walker.trousers)
    if walker.carries == "rucksack":
        parts.append(([(-0.21, 0.58), (-0.22, 0.78), (-0.08, 0.81), (-0.08, 0.56)], (0.10, 0.06, 0.05)))
    parts.append((_TORSO, walker.top))
    parts.append((_oval(0.012, 0.915, 0.058, 0.072), walker.skin))
    parts.append((_oval(-0.006, 0.93, 0.060, 0.068)[1:6], _HAIR))
    parts += _arm(-swing, walker.top, walker.skin)
    if walker.carries == "bag":
        x = -0.33 * math.sin(swing)
        bag = [(x - 0.09, 0.30), (x - 0.08, 0.44), (x + 0.08, 0.44), (x + 0.09, 0.30)]
        parts.append((bag, (0.08, 0.20, 0.35)))
    return parts


def pedestrian_sprite(walker: Pedestrian, light: Light) -> Sprite:
    """A walking pedestrian as flat outlines turned towards the camera."""
    parts = _body(walker)
    outlines = np.array([corner for outline, _ in parts for corner in outline]) * walker.height
    points = walker.heading * outlines[:, :1] * view.IMAGE_RIGHT + (walker.x, 0.0, walker.z)
    points[:, 1] += outlines[:, 1]
    normals = np.tile((0.0, 0.28, -0.96), (len(parts), 1))
    radiance = _shine(np.array([albedo for _, albedo in parts]), normals, (walker.x, 1.0, walker.z), light)
    radiance[:_FAR_LIMB_PARTS] *= 0.75  # the far arm and leg are in the body's own shade
    contact, shade = _shadows(walker.x, walker.z, (0.28, 0.16), walker.height, light)
    starts = _starts([len(outline) for outline, _ in parts])
    colours = encode(radiance.astype(np.float32))
    return Sprite(PEDESTRIAN, walker.z, points, starts, colours, contact, shade)


def post_sprite(x: float, z: float, arm: float, light: Light) -> Sprite:
    """A lamp post at (x, z) whose arm reaches `arm` metres across the street, with its head."""
    head_z = z + arm
    corners = [(x - 0.07, 0.0, z), (x - 0.05, 6.3, z), (x + 0.05, 6.3, z), (x + 0.07, 0.0, z)]
    corners += [(x, 6.22, z), (x, 6.30, z), (x, 6.30, head_z), (x, 6.22, head_z)]
    corners += [(x + 0.14 * a, 6.2, head_z + 0.22 * b) for a, b in ((-1, -1), (-1, 1), (1, 1), (1, -1))]
    normals = np.tile((0.0, 0.0, -1.0), (3, 1))
    radiance = _shine(np.tile(_POST, (3, 1)), normals, (x, 2.0, z), light)
    radiance[2] += _LAMP_HEAD_GLOW * light.lamps * np.asarray(LAMP_COLOUR)
    contact, shade = _shadows(x, z, (0.07, 0.07), 6.3, light)
    colours = encode(radiance.astype(np.float32))
    return Sprite(None, z, np.array(corners), [0, 4, 8], colours, contact, shade)
