"""Training and test images of the street, rendered once at the detector's input size and kept on disk."""

from __future__ import annotations

import sys
from pathlib import Path

import cv2
import numpy as np
import numpy.typing as npt

from examples.street import view
from examples.street.light import Image
from examples.street.scene import Street

INPUT_WIDTH_PX, INPUT_HEIGHT_PX = 288, 160
MAX_OBJECTS = 24
_FRAMES_PER_TRAFFIC, _TRAFFIC_S = 25, 120.0
# Hours of the day with the share of images taken from them: night, dawn, day up to bright noon.
_HOURS = ((0.0, 5.2, 0.36), (5.2, 7.0, 0.28), (7.0, 13.0, 0.36))

Boxes = npt.NDArray[np.float32]


def shrink(image: Image) -> Image:
    """A video frame stretched to the detector's input size, (160, 288, 3), bilinear."""
    size = (INPUT_WIDTH_PX, INPUT_HEIGHT_PX)
    return np.asarray(cv2.resize(image, size, interpolation=cv2.INTER_LINEAR), dtype=np.uint8)


def render_set(images: int, first_seed: int) -> tuple[Image, Boxes]:
    """Pictures (n, 160, 288, 3) and their objects (n, MAX_OBJECTS, 5): class, x1, y1, x2, y2 in input pixels.

    Unused rows have class -1. Traffic seeds count up from `first_seed`; keep sets apart by giving them
    distant seeds.
    """
    rng = np.random.default_rng(first_seed)
    pictures = np.empty((images, INPUT_HEIGHT_PX, INPUT_WIDTH_PX, 3), np.uint8)
    objects = np.full((images, MAX_OBJECTS, 5), -1.0, np.float32)
    scale = np.tile((INPUT_WIDTH_PX / view.WIDTH_PX, INPUT_HEIGHT_PX / view.HEIGHT_PX), 2)
    starts, ends, shares = zip(*_HOURS, strict=True)
    for number in range(images):
        if number % _FRAMES_PER_TRAFFIC == 0:
            street = Street(first_seed + number // _FRAMES_PER_TRAFFIC, _TRAFFIC_S)
        part = int(rng.choice(len(_HOURS), p=shares))
        frame = street.frame(float(rng.uniform(0.0, _TRAFFIC_S)), float(rng.uniform(starts[part], ends[part])))
        pictures[number] = shrink(frame.image)
        for row, label in enumerate(frame.labels[:MAX_OBJECTS]):
            objects[number, row] = (label.class_id, *(np.asarray(label.box) * scale))
    return pictures, objects


def cached_set(path: Path, images: int, first_seed: int) -> tuple[Image, Boxes]:
    """`render_set`, kept in the file `path`; a file that holds another number of images is rendered anew."""
    if path.exists():
        with np.load(path) as kept:
            if len(kept["pictures"]) == images:
                return kept["pictures"], kept["objects"]
    print(f"rendering {images} images to {path}", file=sys.stderr)
    pictures, objects = render_set(images, first_seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, pictures=pictures, objects=objects)
    return pictures, objects
