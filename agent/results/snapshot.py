"""Make a picture for people of a frame: draw the answer into it, and encode it as a JPEG."""

from __future__ import annotations

from dataclasses import replace

import cv2
import numpy as np
from numpy.typing import NDArray

from agent.common.errors import AgentError
from agent.vision.decode import Classification
from agent.vision.detections import Detections
from agent.vision.spec import ModelSpec
from agent.vision.task import ServedFrame

_QUALITY = 85
_FAR = 2.0**14  # pixels; OpenCV takes no coordinate of more than 31 bits, and is slow long before
_DARK, _LIGHT = (0, 0, 0), (255, 255, 255)
# For one class after another, BGR: Okabe and Ito's, which colour-blind people can tell apart
# (jfly.uni-koeln.de/color).
_COLORS = ((0, 159, 230), (233, 180, 86), (115, 158, 0), (66, 228, 240), (178, 114, 0), (0, 94, 213), (167, 121, 204))


def annotate(served: ServedFrame, spec: ModelSpec) -> NDArray[np.uint8]:
    """Return a copy of the frame, BGR uint8 (H, W, 3), with its boxes or its class; raw outputs are not drawn."""
    picture: NDArray[np.uint8] = served.frame.image.copy()
    height, width = picture.shape[:2]
    thickness = max(1, round(max(height, width) / 500))
    result = served.result
    if isinstance(result, Classification):
        _write(picture, f"{spec.label(result.class_id)} {result.score:.2f}", (0, 0), _COLORS[0], thickness)
    if not isinstance(result, Detections):
        return picture
    boxes = served.geometry.to_frame(result.boxes) if served.geometry is not None else result.boxes
    boxes = np.clip(np.where(np.isfinite(boxes), boxes, 0.0), -_FAR, _FAR)
    rows = zip(np.rint(boxes).astype(int).tolist(), result.classes.tolist(), result.scores.tolist(), strict=True)
    for (left, top, right, bottom), class_id, score in rows:
        color = _COLORS[class_id % len(_COLORS)]
        cv2.rectangle(picture, (left, top), (right, bottom), color, thickness)
        _write(picture, f"{spec.label(class_id)} {score:.2f}", (left, top), color, thickness)
    return picture


def shrink(served: ServedFrame, width: int) -> ServedFrame:
    """Return the answer with its frame, and the boxes in it, scaled down to at most `width` pixels."""
    image, result = served.frame.image, served.result
    scale = width / image.shape[1]
    if scale >= 1.0:
        return served
    size = (width, max(1, round(scale * image.shape[0])))
    interpolation = (
        cv2.INTER_AREA if scale <= 0.5 else cv2.INTER_LINEAR
    )  # which is faster, and leaves out no pixel here
    small = np.asarray(cv2.resize(image, size, interpolation=interpolation), np.uint8)
    if isinstance(result, Detections):
        boxes = served.geometry.to_frame(result.boxes) if served.geometry is not None else result.boxes
        scaled = np.asarray(boxes * scale, np.float32)
        result = Detections(boxes=scaled, classes=result.classes, scores=result.scores)
    return replace(served, frame=replace(served.frame, image=small), result=result, geometry=None)


def _write(
    picture: NDArray[np.uint8], text: str, corner: tuple[int, int], color: tuple[int, int, int], thickness: int
) -> None:
    """Write above the corner (x, y) where there is room, else below it; dark on light colours, and light on dark."""
    scale = 0.5 * thickness
    (width, height), below = cv2.getTextSize(text, cv2.FONT_HERSHEY_SIMPLEX, scale, thickness)
    left = min(max(corner[0], 0), max(0, picture.shape[1] - width))
    foot = corner[1] - below if corner[1] >= height + below else corner[1] + height
    cv2.rectangle(picture, (left, foot - height), (left + width, foot + below), color, cv2.FILLED)
    ink = _DARK if sum(color) > 382 else _LIGHT
    cv2.putText(picture, text, (left, foot), cv2.FONT_HERSHEY_SIMPLEX, scale, ink, thickness, cv2.LINE_AA)


def encode_jpeg(image: NDArray[np.uint8], most_bytes: int) -> tuple[bytes, tuple[int, int]]:
    """Return a JPEG of at most `most_bytes` of a BGR uint8 (H, W, 3) or grey (H, W) image, and its height and width.

    The picture is halved, and halved again, until its JPEG is small enough. Raises AgentError (`images.encode`) where
    even one pixel is not.
    """
    while True:
        _, encoded = cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, _QUALITY])
        height, width = image.shape[:2]
        if len(encoded) <= most_bytes:
            return encoded.tobytes(), (height, width)
        if min(height, width) < 2:
            found = f"{len(encoded)} bytes for one pixel"
            raise AgentError("images.encode", found, f"at most {most_bytes}", "report it")
        image = np.asarray(cv2.resize(image, (width // 2, height // 2), interpolation=cv2.INTER_AREA), np.uint8)
