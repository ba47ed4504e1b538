"""Find channels of a detector's output that hold no class scores, by their values for a frame.

Key points and an angle lie behind the classes of YOLOv8's table. The graph shows how many channels there are, and not
which of them are classes. Their values do: a score is from 0 to 1, and a coordinate in pixels is not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from agent.vision.spec import ModelSpec
from agent.vision.tasks.opening import open_task
from engines.interface import Array

_BOX = 4  # channels
_ROUNDED = 1e-3  # scores of a half-precision sigmoid may be so far beyond 0 and 1


def unlike_scores(spec: ModelSpec, outputs: Mapping[str, Array]) -> str:
    """Return which channels that the spec reads as class scores are none, and what they may be; empty if all may be.

    outputs: Of one frame, with a batch axis.
    """
    tables = {name: each for name, each in outputs.items() if each.ndim == 3 and _BOX < each.shape[1] < each.shape[2]}
    labels = open_task(spec).labels
    is_box_alone = labels is not None and labels.form == "boxes"
    if spec.decoder != "yolov8" or not is_box_alone or len(tables) != 1:
        return ""
    ((name, table),) = tables.items()
    least, most = table[0, _BOX:].min(axis=1), table[0, _BOX:].max(axis=1)
    is_beyond = (least < -_ROUNDED) | (most > 1.0 + _ROUNDED)  # NaN is another fault
    if not is_beyond.any():
        return ""
    first = int(is_beyond.argmax())
    low, high = float(least[is_beyond].min()), float(most[is_beyond].max())
    channels = " to ".join(map(str, dict.fromkeys((_BOX + first, table.shape[1] - 1))))
    return (
        f"output '{name}', channels {channels}: values of {low:.4g} to {high:.4g} are no class scores: "
        f"{_meaning(first, is_beyond[first:], low, high)}"
    )


def _meaning(classes: int, is_beyond: NDArray[np.bool_], low: float, high: float) -> str:
    """Return what the channels behind so many classes may be. is_beyond: of each, whether values leave 0 to 1."""
    count = len(is_beyond)
    if classes and count == 1 and max(-low, high) <= math.pi + _ROUNDED:
        return "an angle, for which the task is obb"
    for values in (3, 2):
        if classes and count % values == 0 and count > values:
            points = is_beyond.reshape(-1, values)
            if points[:, :2].all() and not points[:, 2:].any():
                return f"key points, for which the task is pose, with keypoints: {len(points)}"
    return "name the task and the decoder that read them"
