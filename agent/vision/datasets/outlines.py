"""Check the outline of a COCO annotation, polygons or a mask in run-length encoding, and ask which places are in it.

pycocotools trusts an encoding: one that does not fit its picture would be written beyond it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
        is_size = outline.get("size") == [height, width] and min(height, width) > 0
        if not is_size or not _are_runs(lengths, height * width):
            raise ValueError(f"runs of {height} x {width} pixels in all")
        return {"size": [height, width], "counts": lengths}
    if not isinstance(outline, list) or not 0 < len(outline) <= _MOST_POLYGONS:
        raise ValueError("polygons, or a run-length encoding")
    if not all(_is_polygon(each, height, width) for each in outline):
        raise ValueError(f"polygons of 3 to {_MOST_POINTS} points in a picture of {height} x {width}")
    return outline


def bounds_of(outline: Any) -> tuple[float, float, float, float]:
    """Return x1 y1 x2 y2 around a checked outline, in pixels."""
    if not isinstance(outline, Mapping):
        points = np.concatenate([np.array(each, np.float64).reshape(-1, 2) for each in outline])
        (left, top), (right, bottom) = points.min(axis=0), points.max(axis=0)
        return float(left), float(top), float(right), float(bottom)
    height, ends = outline["size"][0], np.cumsum(outline["counts"])
    starts, stops = ends[:-1:2], ends[1::2]  # the runs inside
    is_run = starts < stops
    columns, rows = np.divmod(starts[is_run], height)
    last_columns, last_rows = np.divmod(stops[is_run] - 1, height)
    if (last_columns > columns).any():  # from one column into the next
        rows, last_rows = np.array([0]), np.array([height - 1])
    return float(columns[0]), float(rows.min()), float(last_columns[-1] + 1), float(last_rows.max() + 1)


def cells_inside(outline: Any, size: tuple[int, int], grid: tuple[int, int]) -> NDArray[np.bool_]:
    """Return which cells of a grid over a picture have the pixel in their middle inside a checked outline.

    Args:
        size: (height, width) of the picture. An encoding has its own, and is laid over the picture.
        grid: (rows, columns).
    """
    if isinstance(outline, Mapping):
        height, width = outline["size"]
        return _are_inside(outline["counts"], (height, width), _middles(height, grid[0]), _middles(width, grid[1]))
    from pycocotools.mask import frPyObjects, merge  # compiled code, which most boards never need

    # A window around the polygons, at whole pixels: what they cover does not depend on where it begins.
    left, top, right, bottom = bounds_of(outline)
    slack = np.array([_SLACK * size[1] + 1, _SLACK * size[0] + 1])
    low, high = -slack, np.array(size[::-1]) + slack
    x, y = np.floor(np.maximum((left, top), low)).astype(int).tolist()
    width, height = (np.ceil(np.minimum((right, bottom), high)).astype(int) - (x, y) + 1).clip(1).tolist()
    moved = [(np.clip(np.array(each).reshape(-1, 2), low, high) - (x, y)).ravel().tolist() for each in outline]
    lengths = run_lengths_of(merge(frPyObjects(moved, height, width))["counts"].decode())
    return _are_inside(lengths, (height, width), _middles(size[0], grid[0]) - y, _middles(size[1], grid[1]) - x)


def _are_inside(
    lengths: Sequence[int], size: tuple[int, int], rows: NDArray[np.intp], columns: NDArray[np.intp]
) -> NDArray[np.bool_]:
    """Return which places of these rows and columns are inside a mask of this (height, width), by its runs."""
    height, ends = size[0], np.cumsum(lengths)
    inside = np.zeros((len(rows), len(columns)), np.bool_)
    if len(ends) < 2:
        return inside
    first, last = ends[0] // height, -(-ends[1::2][-1] // height)  # columns: all others are outside
    counts = np.diff(np.clip(ends, first * height, last * height), prepend=first * height)
    shown = np.repeat(np.arange(len(ends)) % 2 == 1, counts).reshape(-1, height)
    in_rows, in_columns = (rows >= 0) & (rows < height), (columns >= first) & (columns < last)
    inside[np.ix_(in_rows, in_columns)] = shown[columns[in_columns] - first][:, rows[in_rows]].T
    return inside


def _middles(length: int, cells: int) -> NDArray[np.intp]:
    """Return the pixel in the middle of each cell, along a side that is `length` pixels long."""
    return ((np.arange(cells) + 0.5) * length / cells).astype(np.intp)


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
