"""What is to be seen in a frame, exactly: the class and distance of each pixel, the shapes of each object.

Light changes none of it. Everything is read from one map of which polygon each pixel shows, drawn in painting order as
the picture is.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import cv2
import numpy as np
import numpy.typing as npt

from examples.street import view
from examples.street.backdrop import backdrop
from examples.street.light import Image
from examples.street.scene import CLASSES, MIN_VISIBLE, Label, Street, labelled
from examples.street.sprites import SUBPIXEL_BITS, Sprite
from examples.street.vehicles import KEY_POINTS

SURFACES = ("road", "pavement", "building", "sky", *CLASSES)
NOT_COUNTED = 255  # the class of a pixel that shows a lamp post
HIDDEN, IN_VIEW = 1, 2  # COCO's visibility of a key point; 0: outside the frame
_ROAD, _PAVEMENT, _BUILDING, _SKY, _FIRST_OBJECT = range(5)

Mask = npt.NDArray[np.bool_]
Corners = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Object:
    """One labelled object.

    mask: bool (272, 480), the pixels that show it.
    silhouette: bool (272, 480), those that it would cover if nothing stood before it.
    key_points: float (6, 3), x and y in pixels and COCO's visibility, of KEY_POINTS; none (0, 3) of a pedestrian.
    tilt: Radians from the image's x axis towards y, of a vehicle's wheels, or of a pedestrian's level.
    """

    label: Label
    mask: Mask
    silhouette: Mask
    key_points: Corners
    tilt: float


@dataclass(frozen=True, eq=False)
class Truth:
    """A frame's objects, nearest first, and its maps (272, 480).

    classes: uint8, indices of SURFACES; NOT_COUNTED on lamp posts.
    depth: float32, metres along the viewing direction; infinite in the sky.
    """

    objects: Sequence[Object]
    classes: Image
    depth: npt.NDArray[np.float32]


def truth_at(street: Street, ts: float) -> Truth:
    """What is to be seen `ts` seconds after the start; the objects are those that `Street.frame` labels."""
    sprites = street.sprites(ts)
    polygons = [
        (index, begin, end)
        for index, sprite in enumerate(sprites)
        for begin, end in itertools.pairwise([*sprite.starts, len(sprite.places)])
    ]
    shown = np.full((view.HEIGHT_PX, view.WIDTH_PX), -1, np.int32)
    for number, outline in enumerate(outline for sprite in sprites for outline in sprite.polygons((0, 0))):
        cv2.fillPoly(shown, [outline], (number,), cv2.LINE_8, SUBPIXEL_BITS)
    owner = np.array([*(index for index, _, _ in polygons), -1])[shown]
    classes, depth = (each.copy() for each in _empty_street())
    kinds = [NOT_COUNTED if sprite.kind is None else _FIRST_OBJECT + sprite.kind for sprite in sprites]
    classes[owner >= 0] = np.array(kinds, np.uint8)[owner[owner >= 0]]
    pixels = np.argsort(shown, axis=None, kind="stable")
    ends = np.searchsorted(shown.ravel()[pixels], np.arange(-1, len(polygons)), side="right")
    for (index, begin, end), first, last in zip(polygons, ends, ends[1:], strict=False):
        rows, columns = np.divmod(pixels[first:last], view.WIDTH_PX)
        places, corners = sprites[index].places[begin:end], sprites[index].corners[begin:end]
        depth[rows, columns] = _depth_of(places, corners, rows, columns)
    objects = [_object(sprite, label, owner == sprites.index(sprite)) for sprite, label in labelled(sprites)]
    return Truth(objects, classes, depth)


@cache
def _empty_street() -> tuple[Image, npt.NDArray[np.float32]]:
    """Classes and distances of the backdrop."""
    street = backdrop()
    ground_x, ground_z, facade_x, facade_y = view.ground_and_facade(1)
    is_sky = street.built + street.ground < 0.5
    is_built = ~is_sky & (street.built > street.ground)
    is_ground = ~is_sky & ~is_built
    is_road = is_ground & (ground_z > view.NEAR_KERB_Z) & (ground_z < view.FAR_KERB_Z)
    classes = np.where(is_road, _ROAD, np.where(is_ground, _PAVEMENT, np.where(is_built, _BUILDING, _SKY)))
    x, y = np.where(is_ground, ground_x, facade_x), np.where(is_ground, 0.0, facade_y)
    z = np.where(is_ground, ground_z, view.FACADE_Z)
    depth = view.depth(np.stack((x, y, z), axis=-1).reshape(-1, 3)).reshape(z.shape)
    return classes.astype(np.uint8), np.where(classes == _SKY, np.inf, depth).astype(np.float32)


def _depth_of(
    places: view.Array, corners: view.Array, rows: npt.NDArray[np.intp], columns: npt.NDArray[np.intp]
) -> view.Array:
    """Distance of pixels that show a flat polygon: over a plane its inverse is affine in the image's x and y."""
    depths = view.depth(places)
    middle = corners.mean(axis=0)
    inverse = np.linalg.lstsq(np.column_stack((corners - middle, np.ones(len(corners)))), 1.0 / depths, rcond=1e-6)[0]
    found = np.column_stack((columns - middle[0], rows - middle[1], np.ones(len(rows)))) @ inverse
    return np.asarray(1.0 / found.clip(1.0 / depths.max(), 1.0 / depths.min()))


def _object(sprite: Sprite, label: Label, mask: Mask) -> Object:
    whole, left, top = sprite.silhouette()
    silhouette = np.zeros(mask.shape, np.bool_)
    x1, y1 = max(left, 0), max(top, 0)
    x2, y2 = min(left + whole.shape[1], view.WIDTH_PX), min(top + whole.shape[0], view.HEIGHT_PX)
    silhouette[y1:y2, x1:x2] = whole[y1 - top : y2 - top, x1 - left : x2 - left]
    points = view.project(sprite.key_points)
    columns, rows = np.rint(points).astype(int).T if len(points) else np.empty((2, 0), int)
    is_inside = (columns >= 0) & (columns < view.WIDTH_PX) & (rows >= 0) & (rows < view.HEIGHT_PX)
    is_shown = mask[rows.clip(0, view.HEIGHT_PX - 1), columns.clip(0, view.WIDTH_PX - 1)]
    seen = np.where(is_inside, np.where(is_shown, IN_VIEW, HIDDEN), 0)
    key_points = np.column_stack((points, seen)) * is_inside[:, np.newaxis]
    along = points[KEY_POINTS.index("front wheel")] - points[KEY_POINTS.index("rear wheel")] if len(points) else (1, 0)
    # At the frame's edge OpenCV draws a pixel more or less of a polygon that is cut.
    return Object(label, mask & silhouette, silhouette, key_points, math.atan(along[1] / along[0]))


def oriented_box(mask: Mask, tilt: float) -> tuple[float, float, float, float]:
    """Centre x, y, length along `tilt` and width across it, in pixels, of the least box with that tilt around a mask.

    Pixels have their whole area: a mask of one pixel in row and column 0 gives 0.5, 0.5, 1, 1 without a tilt.
    """
    outline = np.concatenate(cv2.findContours(mask.view(np.uint8), cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_SIMPLE)[0])
    points = outline[:, 0].astype(np.float64) + 0.5
    along, across = np.array((math.cos(tilt), math.sin(tilt))), np.array((-math.sin(tilt), math.cos(tilt)))
    reach = 0.5 * (abs(along[0]) + abs(along[1]))  # from a pixel's middle to its end, along either axis
    placed = points @ np.column_stack((along, across))
    (left, top), (right, bottom) = placed.min(axis=0).tolist(), placed.max(axis=0).tolist()
    x, y = (left + right) / 2 * along + (top + bottom) / 2 * across
    return float(x), float(y), right - left + 2 * reach, bottom - top + 2 * reach


def hung_askew(image: Image, objects: Sequence[Object], tilt: float) -> tuple[Image, list[tuple[int, Corners]]]:
    """The picture of a camera that hangs at an angle, with a lens so much longer that nothing beyond the frame is seen.

    Returns it, and of each object that is still MIN_VISIBLE seen the class and the oriented box: centre x, y, length,
    width in pixels, and angle in radians. tilt: Radians by which the street turns, from the image's x axis towards y.
    """
    height, width = image.shape[:2]
    zoom = math.cos(tilt) + abs(math.sin(tilt)) * width / height
    turn = cv2.getRotationMatrix2D((width / 2, height / 2), -math.degrees(tilt), zoom)
    boxes = []
    for each in objects:
        whole, seen = (
            cv2.warpAffine(mask.view(np.uint8), turn, (width, height), flags=cv2.INTER_NEAREST).view(np.bool_)
            for mask in (each.silhouette, each.mask)
        )
        if seen.sum() >= MIN_VISIBLE * zoom**2 * each.mask.sum() / each.label.visible:
            angle = each.tilt + tilt
            boxes.append((each.label.class_id, np.array((*oriented_box(whole, angle), angle))))
    return np.asarray(cv2.warpAffine(image, turn, (width, height), flags=cv2.INTER_LINEAR), np.uint8), boxes
