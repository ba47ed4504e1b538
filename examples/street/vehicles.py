"""The shapes of cars, vans and lorries: flat faces in metres, built once for every kind."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cache

import numpy as np

from examples.street.view import Array

Points = tuple[tuple[float, float], ...]
Corner = tuple[float, float, float]


@dataclass(frozen=True)
class Face:
    """One flat face: its corners' rows among the vertices, its material, and which way it looks."""

    rows: slice
    material: str  # paint, glass, trim, tyre, hub, load, headlamp, tail lamp
    normal: tuple[float, float, float]


@dataclass(frozen=True)
class Shape:
    """A vehicle driving towards +X: vertices (n, 3) in metres from the road under its centre, and faces.

    `key_points` (6, 3) are KEY_POINTS on the side that the camera sees.
    """

    vertices: Array
    key_points: Array
    faces: tuple[Face, ...]
    length: float
    half_width: float
    height: float


# fmt: off
# Side profiles as (X, Y) corners in order from the rear over the roof to the front, with the material of the
# side and that of the upper ends. The edge from the last corner back to the first stays open: it touches the
# road or another part.
_BODIES: dict[str, tuple[tuple[Points, str, str], ...]] = {
    "hatchback": (
        (
            ((-1.95, 0.28), (-1.98, 0.80), (-1.85, 0.95), (1.10, 0.92), (1.90, 0.74), (1.98, 0.30)),
            "paint", "paint",
        ),
        (((-1.88, 0.92), (-1.52, 1.46), (0.25, 1.48), (1.08, 0.90)), "paint", "glass"),
    ),
    "saloon": (
        (
            ((-2.25, 0.30), (-2.30, 0.82), (-2.15, 0.96), (1.30, 0.92), (2.20, 0.72), (2.28, 0.30)),
            "paint", "paint",
        ),
        (((-1.72, 0.94), (-1.05, 1.42), (0.35, 1.43), (1.20, 0.90)), "paint", "glass"),
    ),
    "estate": (
        (
            ((-2.25, 0.34), (-2.30, 0.95), (-2.20, 1.05), (1.25, 1.02), (2.15, 0.88), (2.25, 0.34)),
            "paint", "paint",
        ),
        (((-2.18, 1.03), (-1.85, 1.66), (0.30, 1.68), (1.15, 1.00)), "paint", "glass"),
    ),
    "van": (
        (((-2.60, 0.32), (-2.62, 2.12), (1.20, 2.15), (1.42, 2.00), (1.55, 0.32)), "paint", "paint"),
        (
            ((1.30, 2.08), (1.62, 1.95), (2.15, 1.18), (2.62, 0.98), (2.68, 0.32), (1.20, 0.32)),
            "paint", "glass",
        ),
    ),
    "lorry": (
        (((-3.30, 0.85), (-3.30, 2.95), (1.25, 2.95), (1.25, 0.85)), "load", "load"),
        (((-3.10, 0.45), (-3.10, 0.85), (3.00, 0.85), (3.00, 0.45)), "trim", "trim"),
        (((1.45, 2.30), (2.70, 2.35), (3.15, 1.35), (3.20, 0.45), (1.45, 0.45)), "paint", "glass"),
    ),
}
_PANES: dict[str, tuple[Points, ...]] = {
    "hatchback": (
        ((-1.62, 0.97), (-1.40, 1.37), (-0.50, 1.39), (-0.50, 0.96)),
        ((-0.40, 0.96), (-0.40, 1.39), (0.20, 1.39), (0.85, 0.94)),
    ),
    "saloon": (
        ((-1.45, 0.98), (-0.95, 1.34), (-0.40, 1.35), (-0.40, 0.97)),
        ((-0.30, 0.97), (-0.30, 1.35), (0.30, 1.35), (0.95, 0.94)),
    ),
    "estate": (
        ((-2.00, 1.08), (-1.75, 1.57), (-0.60, 1.59), (-0.60, 1.06)),
        ((-0.50, 1.06), (-0.50, 1.59), (0.24, 1.59), (0.90, 1.04)),
    ),
    "van": (((1.40, 1.22), (1.42, 1.85), (1.60, 1.85), (2.02, 1.22)),),
    "lorry": (((1.70, 1.40), (1.70, 2.15), (2.55, 2.17), (2.88, 1.40)),),
}
_SIZES = {  # half width, wheel radius, wheel positions in X, lamp height
    "hatchback": (0.84, 0.31, (-1.22, 1.25), 0.68),
    "saloon": (0.88, 0.32, (-1.38, 1.42), 0.66),
    "estate": (0.92, 0.36, (-1.38, 1.38), 0.80),
    "van": (0.98, 0.35, (-1.70, 1.80), 0.85),
    "lorry": (1.15, 0.46, (-2.20, 2.25), 0.75),
}
# fmt: on
KINDS = tuple(_SIZES)
KEY_POINTS = ("rear wheel", "front wheel", "tail lamp", "headlamp", "rear end of the roof", "front end of the roof")
_SILL_M = 1.05  # glass begins above it
_GLINT_INSET_M = 0.12
_CIRCLE = [(math.cos(math.tau * i / 14), math.sin(math.tau * i / 14)) for i in range(14)]

_SQUARE = ((-1, -1), (1, -1), (1, 1), (-1, 1))


class _Builder:
    def __init__(self) -> None:
        self.vertices: list[Corner] = []
        self.faces: list[Face] = []

    def add(self, corners: list[Corner], material: str, normal: Corner) -> None:
        first = len(self.vertices)
        self.vertices += corners
        self.faces.append(Face(slice(first, len(self.vertices)), material, normal))

    def prism(self, profile: Points, half_width: float, side: str, ends: str) -> None:
        """The profile drawn out across the vehicle: the strips of its outline, then the side in view."""
        for (x0, y0), (x1, y1) in itertools.pairwise(profile):
            along, up = x1 - x0, y1 - y0
            size = math.hypot(along, up)
            normal = (-up / size, along / size, 0.0)
            sloping = abs(normal[0]) > 0.45 and (y0 + y1) / 2 > _SILL_M
            material = ends if sloping else side
            strip = [(x0, y0, -half_width), (x1, y1, -half_width), (x1, y1, half_width), (x0, y0, half_width)]
            self.add(strip, material, normal)
        self.flat(profile, -half_width, side)

    def flat(self, outline: Points, z: float, material: str) -> None:
        self.add([(x, y, z) for x, y in outline], material, (0.0, 0.0, -1.0))

    def disc(self, x: float, y: float, z: float, radius: float, material: str) -> None:
        self.flat(tuple((x + radius * c, y + radius * s) for c, s in _CIRCLE), z, material)

    def lamps(self, length: float, half_width: float, height: float) -> None:
        """Pairs of head and tail lamps on the end faces, and the glint of the near ones from the side."""
        for end, material in ((length / 2, "headlamp"), (-length / 2, "tail lamp")):
            outward = math.copysign(1.0, end)
            for z in (-0.72 * half_width, 0.72 * half_width):
                lamp = [(end, height + 0.08 * y, z + 0.14 * side) for y, side in _SQUARE]
                self.add(lamp, material, (outward, 0.0, 0.0))
            glint = tuple((end - outward * _GLINT_INSET_M + 0.10 * x, height + 0.07 * y) for x, y in _SQUARE)
            self.flat(glint, -half_width, material)


@cache
def shape(kind: str) -> Shape:
    """The shape of one of `KINDS`."""
    half_width, radius, axles, lamp_height = _SIZES[kind]
    build = _Builder()
    profiles = [profile for profile, _, _ in _BODIES[kind]]
    for profile, side, ends in _BODIES[kind]:
        build.prism(profile, half_width, side, ends)
    for pane in _PANES[kind]:
        build.flat(pane, -half_width, "glass")
    for axle in axles:
        build.disc(axle, radius, -half_width, radius, "tyre")
        build.disc(axle, radius, -half_width, 0.55 * radius, "hub")
    left, right = (end(x for profile in profiles for x, _ in profile) for end in (min, max))
    reach = min(-left, right)
    build.lamps(2 * reach, half_width, lamp_height)
    roof = sorted(sorted((corner for profile in profiles for corner in profile), key=lambda corner: corner[1])[-2:])
    glints = [(-reach + _GLINT_INSET_M, lamp_height), (reach - _GLINT_INSET_M, lamp_height)]
    marked = [*((axle, radius) for axle in axles), *glints, *roof]
    key_points = np.array([(x, y, -half_width) for x, y in marked])
    height = max(y for profile in profiles for _, y in profile)
    return Shape(np.array(build.vertices), key_points, tuple(build.faces), right - left, half_width, height)
