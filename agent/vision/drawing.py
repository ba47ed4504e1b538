"""Draw into pictures, for people: a box with its text, or a title.

Answers draw themselves with these (`Answer.drawn_into`); `input_picture` shows what a network gets.
"""

from __future__ import annotations

from collections.abc import Sequence

import cv2
import numpy as np
from numpy.typing import NDArray

from agent.vision.boxes import FloatArray
from agent.vision.spec import InputSpec
from engines.interface import Array
from engines.preprocessing import image_layout

Picture = NDArray[np.uint8]  # BGR (height, width, 3)
Color = tuple[int, int, int]

# For one class after another, BGR: Okabe and Ito's, which colour-blind people can distinguish
# (jfly.uni-koeln.de/color).
COLORS: tuple[Color, ...] = (
    (0, 159, 230),
    (233, 180, 86),
    (115, 158, 0),
    (66, 228, 240),
    (178, 114, 0),
    (0, 94, 213),
    (167, 121, 204),
)
_DARK, _LIGHT = (0, 0, 0), (255, 255, 255)
_LEAST_RADIUS_PX, _RADII_ACROSS = 3, 200  # radius of a key point, and how many of them the longer side has
_FAR = 2.0**14  # pixels; OpenCV takes no coordinate of more than 31 bits, and is slow long before


def draw_box(picture: Picture, box: FloatArray, text: str, number: int) -> None:
    """Draw a box x1 y1 x2 y2, in pixels of the picture, with a text above it, in the colour of this number."""
    left, top, right, bottom = _pixels(box).tolist()
    color, thickness = COLORS[number % len(COLORS)], _thickness(picture)
    cv2.rectangle(picture, (left, top), (right, bottom), color, thickness + 1)
    _write_text(picture, text, (left, top), color, thickness)


def draw_outline(picture: Picture, corners: FloatArray, text: str, number: int) -> None:
    """Draw a closed outline (k, 2) in pixels, with a text at its highest corner, in the colour of this number."""
    points, color, thickness = _pixels(corners), COLORS[number % len(COLORS)], _thickness(picture)
    cv2.polylines(picture, [points], isClosed=True, color=color, thickness=thickness + 1)
    highest = points[points[:, 1].argmin()].tolist()
    _write_text(picture, text, (highest[0], highest[1]), color, thickness)


def draw_points(
    picture: Picture, points: FloatArray, seen: NDArray[np.bool_], pairs: Sequence[tuple[int, int]], number: int
) -> None:
    """Draw those key points (k, 2) that are seen, and lines between the pairs of them, in the colour of this number."""
    pixels, color, thickness = _pixels(points).tolist(), COLORS[number % len(COLORS)], _thickness(picture)
    radius = max(_LEAST_RADIUS_PX, round(max(picture.shape) / _RADII_ACROSS))
    for first, second in pairs:
        if seen[first] and seen[second]:
            cv2.line(picture, pixels[first], pixels[second], color, thickness)
    for point, is_seen in zip(pixels, seen, strict=True):
        if is_seen:
            cv2.circle(picture, point, radius, color, -1)


def draw_name(picture: Picture, text: str, place: tuple[int, int], number: int) -> None:
    """Write a text above a place (x, y) in pixels, in the colour of this number."""
    _write_text(picture, text, place, COLORS[number % len(COLORS)], _thickness(picture))


def draw_title(picture: Picture, text: str) -> None:
    """Write a text into the upper left corner."""
    _write_text(picture, text, (0, 0), COLORS[0], _thickness(picture))


def jpeg(picture: Picture, quality: int) -> bytes:
    """Encode a BGR (height, width, 3) or grey (height, width) picture; quality: up to 100, as JPEG has it."""
    _, encoded = cv2.imencode(".jpg", picture, [cv2.IMWRITE_JPEG_QUALITY, quality])
    return encoded.tobytes()


def scaled(picture: Picture, scale: float) -> Picture:
    """Return a picture with its sides multiplied, at least a pixel each; a larger one shows the pixels as squares."""
    size = max(1, round(picture.shape[1] * scale)), max(1, round(picture.shape[0] * scale))
    # Above a half linear misses no pixel, and is faster.
    kind = cv2.INTER_NEAREST if scale >= 1.0 else cv2.INTER_LINEAR if scale > 0.5 else cv2.INTER_AREA
    return np.asarray(cv2.resize(picture, size, interpolation=kind), np.uint8)


def input_picture(tensor: Array, image: InputSpec) -> Picture:
    """Return a network input (1, C, H, W) or (1, H, W, C) as a picture.

    Its values are levels again, and its channels as the spec states them.
    """
    planes = np.asarray(tensor[0], np.float32)
    planes = planes if image_layout(tensor.shape) == "NCHW" else planes.transpose(2, 0, 1)
    std, mean = (np.resize(np.array(values), len(planes))[:, None, None] for values in (image.std, image.mean))
    planes = (planes * std + mean) / image.scale  # a graph that takes bytes has 1 and 0 here
    levels = np.clip(np.rint(planes), 0, 255).astype(np.uint8)
    if image.color == "rgb":
        levels = levels[::-1]
    elif image.color == "gray":
        levels = np.repeat(levels, 3, axis=0)
    return np.ascontiguousarray(levels.transpose(1, 2, 0))


def _pixels(places: FloatArray) -> NDArray[np.int32]:
    finite = np.where(np.isfinite(places), places, 0.0)
    pixels: NDArray[np.int32] = np.rint(np.clip(finite, -_FAR, _FAR)).astype(np.int32)
    return pixels


def _thickness(picture: Picture) -> int:
    """Return the thickness of lines in px."""
    return int(max(1, round(max(picture.shape) / 500)))


def _write_text(picture: Picture, text: str, corner: tuple[int, int], color: Color, thickness: int) -> None:
    """Write above the corner (x, y) where there is room, else below it; dark on light colours, and light on dark."""
    scale = 0.5 * thickness
    (width, height), below = cv2.getTextSize(text, cv2.FONT_HERSHEY_SIMPLEX, scale, thickness)
    left = min(max(corner[0], 0), max(0, picture.shape[1] - width))
    foot = corner[1] - below if corner[1] >= height + below else corner[1] + height
    cv2.rectangle(picture, (left, foot - height), (left + width, foot + below), color, cv2.FILLED)
    ink = _DARK if sum(color) > 382 else _LIGHT
    cv2.putText(picture, text, (left, foot), cv2.FONT_HERSHEY_SIMPLEX, scale, ink, thickness, cv2.LINE_AA)
