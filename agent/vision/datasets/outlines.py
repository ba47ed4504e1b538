"""Check the outline of a COCO annotation: polygons, or a mask in run-length encoding.

pycocotools trusts an encoding: one that does not fit its picture would be written beyond it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_MOST_POLYGONS, _MOST_POINTS = 100, 5000  # in one object; COCO's own have tens
_MOST_BITS = 35  # in a length, five to a character
_SLACK = 0.5  # beyond the picture, by its side: an oriented box around what the edge cuts reaches beyond it


def checked_outline(outline: Any, height: int, width: int) -> Any:
    """Return an outline as pycocotools takes it: polygons, or an encoding by uncompressed lengths of runs.

    Raises ValueError, which says what was expected, for any other.
    """
    if isinstance(outline, Mapping):
        counts = outline.get("counts")
        lengths = run_lengths_of(counts) if isinstance(counts, str) else counts
        if outline.get("size") != [height, width] or not _are_runs(lengths, height * width):
            raise ValueError(f"runs of {height} x {width} pixels in all")
        return {"size": [height, width], "counts": lengths}
    if not isinstance(outline, list) or not 0 < len(outline) <= _MOST_POLYGONS:
        raise ValueError("polygons, or a run-length encoding")
    if not all(_is_polygon(each, height, width) for each in outline):
        raise ValueError(f"polygons of 3 to {_MOST_POINTS} points in a picture of {height} x {width}")
    return outline


def _are_runs(lengths: Any, pixels: int) -> bool:
    if not isinstance(lengths, list) or not all(type(each) is int and each >= 0 for each in lengths):
        return False
    return sum(lengths) == pixels


def _is_polygon(polygon: Any, height: int, width: int) -> bool:
    """Return whether all points are in the picture, or next to it: pycocotools allocates by the length of the sides."""
    if not isinstance(polygon, list) or not 6 <= len(polygon) <= 2 * _MOST_POINTS or len(polygon) % 2:
        return False
    sides = (width, height) * (len(polygon) // 2)
    return all(
        isinstance(each, int | float) and -_SLACK * side - 1 <= each <= (1 + _SLACK) * side + 1
        for each, side in zip(polygon, sides, strict=True)
    )


def run_lengths_of(text: str) -> list[int]:
    """Return the lengths of runs that COCO's compressed encoding holds.

    Characters hold six bits from "0" on: five of the number, the lowest first, and whether more follow. From the third
    number on it is the difference to the one before the last. Raises ValueError for any other text.

    >>> run_lengths_of("13e02")
    [1, 3, 21, 5]
    """
    lengths: list[int] = []
    value = shift = 0
    for character in text:
        bits = ord(character) - 48
        if not 0 <= bits < 64 or shift > _MOST_BITS:
            raise ValueError("COCO's compressed run-length encoding")
        value |= (bits & 0x1F) << shift
        shift += 5
        if not bits & 0x20:
            if bits & 0x10:
                value -= 1 << shift
            lengths.append(value + (lengths[-2] if len(lengths) > 2 else 0))
            value = shift = 0
    if shift:
        raise ValueError("COCO's compressed run-length encoding, whole")
    return lengths
