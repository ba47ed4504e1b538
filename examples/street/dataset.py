"""Training and test images of the street with their truth, rendered once at the networks' input size and kept."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt

from examples.street import view
from examples.street.light import Image
from examples.street.scene import Street
from examples.street.truth import HIDDEN, NOT_COUNTED, hung_askew, truth_at
from examples.street.vehicles import KEY_POINTS

INPUT_WIDTH_PX, INPUT_HEIGHT_PX = 288, 160
MAX_OBJECTS = 24
_SCALE = np.tile((INPUT_WIDTH_PX / view.WIDTH_PX, INPUT_HEIGHT_PX / view.HEIGHT_PX), 2)
_FRAMES_PER_TRAFFIC, _TRAFFIC_S = 25, 120.0
# Hours of the day with the share of images taken from them: night, dawn, day up to bright noon.
HOURS = ((0.0, 5.2, 0.36), (5.2, 7.0, 0.28), (7.0, 13.0, 0.36))

# The camera of an oriented box's pictures hangs at up to this angle.
_MOST_TILT = math.radians(15.0)

Boxes = npt.NDArray[np.float32]
Arrays = Mapping[str, npt.NDArray[Any]]


def shrink(image: Image) -> Image:
    """A video frame stretched to the detector's input size, (160, 288, 3), bilinear."""
    size = (INPUT_WIDTH_PX, INPUT_HEIGHT_PX)
    return np.asarray(cv2.resize(image, size, interpolation=cv2.INTER_LINEAR), dtype=np.uint8)


def moments(
    images: int, first_seed: int, hours: Sequence[tuple[float, float, float]] = HOURS
) -> Iterator[tuple[Street, float, float]]:
    """The street, the time in it and the hour of each of `images` pictures, drawn at random.

    Traffic seeds count up from `first_seed`; keep sets apart by giving them distant seeds. hours: First and last hour
    of the day of each part of it, with the share of pictures.
    """
    rng = np.random.default_rng(first_seed)
    starts, ends, shares = zip(*hours, strict=True)
    for number in range(images):
        if number % _FRAMES_PER_TRAFFIC == 0:
            street = Street(first_seed + number // _FRAMES_PER_TRAFFIC, _TRAFFIC_S)
        part = int(rng.choice(len(hours), p=shares))
        yield street, float(rng.uniform(0.0, _TRAFFIC_S)), float(rng.uniform(starts[part], ends[part]))


def render_set(images: int, first_seed: int) -> Arrays:
    """`pictures` (n, 160, 288, 3) and `objects` (n, MAX_OBJECTS, 5): class, x1, y1, x2, y2 in input pixels.

    Unused rows have class -1. Seeds are those of `moments`.
    """
    pictures = np.empty((images, INPUT_HEIGHT_PX, INPUT_WIDTH_PX, 3), np.uint8)
    objects = np.full((images, MAX_OBJECTS, 5), -1.0, np.float32)
    for number, (street, ts, hour) in enumerate(moments(images, first_seed)):
        frame = street.frame(ts, hour)
        pictures[number] = shrink(frame.image)
        for row, label in enumerate(frame.labels[:MAX_OBJECTS]):
            objects[number, row] = (label.class_id, *(np.asarray(label.box) * _SCALE))
    return {"pictures": pictures, "objects": objects}


def render_maps(images: int, first_seed: int) -> Arrays:
    """`render_set`, and of the same pictures what the heads with maps and key points learn.

    `points` (n, MAX_OBJECTS, 6, 3): key points in input pixels, and 1.0 for those in the frame. `owners` uint8 (n, 40,
    72): 1 + the row of the object that a cell of stride 4 shows, or 0. `classes` uint8 (n, 80, 144), as in
    `truth.Truth`, and `depths` float16 (n, 40, 72) in metres.
    """
    points = np.zeros((images, MAX_OBJECTS, len(KEY_POINTS), 3), np.float32)
    owners = np.zeros((images, INPUT_HEIGHT_PX // 4, INPUT_WIDTH_PX // 4), np.uint8)
    classes = np.full((images, INPUT_HEIGHT_PX // 2, INPUT_WIDTH_PX // 2), NOT_COUNTED, np.uint8)
    depths = np.zeros(owners.shape, np.float16)
    for number, (street, ts, _) in enumerate(moments(images, first_seed)):
        truth = truth_at(street, ts)
        owner = np.zeros(truth.classes.shape, np.uint8)
        for row, each in enumerate(truth.objects[:MAX_OBJECTS]):
            owner[each.mask] = row + 1
            if len(each.key_points):
                points[number, row, :, :2] = each.key_points[:, :2] * _SCALE[:2]
                points[number, row, :, 2] = each.key_points[:, 2] >= HIDDEN
        owners[number], depths[number] = _sampled(owner, 4), _sampled(truth.depth, 4)
        classes[number] = _sampled(truth.classes, 2)
    return {**render_set(images, first_seed), "points": points, "owners": owners, "classes": classes, "depths": depths}


def render_askew(images: int, first_seed: int) -> Arrays:
    """`pictures` of a camera that hangs askew, `objects` as `render_set` with the boxes before they are turned.

    `angles` (n, MAX_OBJECTS): by which each box is turned about its middle, in radians.
    """
    pictures = np.empty((images, INPUT_HEIGHT_PX, INPUT_WIDTH_PX, 3), np.uint8)
    objects = np.full((images, MAX_OBJECTS, 5), -1.0, np.float32)
    angles = np.zeros((images, MAX_OBJECTS), np.float32)
    for number, (street, ts, hour) in enumerate(moments(images, first_seed)):
        image, boxes = hung_askew(street.frame(ts, hour).image, truth_at(street, ts).objects, tilt_of(ts))
        pictures[number] = shrink(image)
        for row, (class_id, (x, y, length, width, angle)) in enumerate(boxes[:MAX_OBJECTS]):
            # Stretched into the input, whose pixels are square within 2 %, a turned box stays one to half a degree.
            box = np.array((x - length / 2, y - width / 2, x + length / 2, y + width / 2))
            objects[number, row] = (class_id, *(box * _SCALE))
            angles[number, row] = angle
    return {"pictures": pictures, "objects": objects, "angles": angles}


def tilt_of(ts: float) -> float:
    """The angle in radians at which the camera of oriented boxes hangs: it sways within a minute and back."""
    return _MOST_TILT * math.sin(math.tau * ts / 60.0)


def cached_set(path: Path, images: int, first_seed: int, render: Callable[[int, int], Arrays] = render_set) -> Arrays:
    """What `render` returns, kept in the file `path`; a file of another number of images is rendered anew."""
    if path.exists():
        with np.load(path) as kept:
            if len(kept["pictures"]) == images:
                return dict(kept)
    print(f"rendering {images} images to {path}", file=sys.stderr)
    arrays = render(images, first_seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **arrays)  # type: ignore[arg-type]  # its own keyword is a bool
    return arrays


def _sampled(values: npt.NDArray[Any], stride: int) -> npt.NDArray[Any]:
    """A map of the video's pixels (272, 480) at the middle of each cell of the input's grid of this stride."""
    size = (INPUT_WIDTH_PX // stride, INPUT_HEIGHT_PX // stride)
    return np.asarray(cv2.resize(values, size, interpolation=cv2.INTER_NEAREST_EXACT))
