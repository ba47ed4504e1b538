"""Bring maps, with a value for each pixel or each cell of a stride, from the network input to the frame."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import cv2
import numpy as np
from numpy.typing import NDArray

from agent.common.errors import ConfigError
from agent.vision.boxes import Part, Size
from agent.vision.preprocess import Geometry
from engines.interface import TensorSpec

MapT = TypeVar("MapT", bound=np.generic)


def has_proportions(shape: Sequence[int | None], size: Size) -> bool:
    """Return whether a map has the input's proportions, or is open; a map of a stride is rounded up."""
    if None in shape:
        return True
    height, width = (side or 0 for side in shape)
    return abs(height * size[1] - width * size[0]) <= max(size) and min(height, width) > 1


def find_maps(
    shapes: Mapping[str, Sequence[int | None]], size: Size, channels: int | None = None
) -> list[tuple[str, int | None]]:
    """Return the outputs that may be a map of the input's proportions: the name, and the axis of the channels.

    An output with two such axes is named twice.

    Args:
        shapes: Of the outputs, without the batch: (h, w), whose axis is None, (channels, h, w) or (h, w, channels).
        size: (height, width) of the input.
        channels: How many there are; None: any number.
    """
    found: list[tuple[str, int | None]] = []
    for name, shape in shapes.items():
        if len(shape) == 2 and channels in (None, 1) and has_proportions(shape, size):
            found.append((name, None))
        if len(shape) == 3:
            sides = {axis: [*shape[:axis], *shape[axis + 1 :]] for axis in (0, 2) if channels in (None, shape[axis])}
            found += [(name, axis) for axis, rest in sides.items() if has_proportions(rest, size)]
    return found


def no_map(outputs: Sequence[TensorSpec], expected: str) -> ConfigError:
    """Return the error `decoder.shape`: none of these outputs is the map that is expected, or several are."""
    shapes = ", ".join(f"{output.name} {output.shape}" for output in outputs)
    remedy = "export the model with the map alone, or choose task 'raw'"
    return ConfigError("decoder.shape", f"outputs {shapes}", expected, remedy)


def part_of_frame(values: NDArray[MapT], covered: Size, geometry: Geometry, fill: float) -> NDArray[MapT]:
    """Return the part of a map that the frame covers, at the map's own resolution.

    Args:
        values: (..., h, w), of the whole network input.
        covered: (height, width) of the network input in pixels.
        geometry: Where the frame lay in it.
        fill: The value of what the frame has beyond the input.
    """
    height, width = values.shape[-2:]
    rows = _taken(height, covered[0], geometry.top_px, geometry.frame_height_px * geometry.scale_y)
    columns = _taken(width, covered[1], geometry.left_px, geometry.frame_width_px * geometry.scale_x)
    is_there = ((rows >= 0) & (rows < height))[:, np.newaxis] & (columns >= 0) & (columns < width)
    taken: NDArray[MapT] = values[..., rows.clip(0, height - 1), :][..., columns.clip(0, width - 1)]
    taken[..., ~is_there] = fill
    return taken


def without_padding(values: NDArray[MapT], part: Part, size: Size, fill: float) -> NDArray[MapT]:
    """Return a map (..., h, w) of the whole network input with a fill where it is padding.

    Args:
        part: Of the network input, which the frame covers. A cell is in it if its middle is.
        size: (height, width) of the network input in pixels.
        fill: The value of what the frame does not cover.
    """
    rows, columns = (
        slice(*np.searchsorted((np.arange(length) + 0.5) * side / length, span.indices(side)[:2]))
        for length, side, span in zip(values.shape[-2:], size, part, strict=True)
    )
    kept: NDArray[MapT] = np.full_like(values, fill)
    kept[..., rows, columns] = values[..., rows, columns]
    return kept


def encoded(mask: NDArray[np.bool_]) -> dict[str, Any]:
    """Return a mask for JSON, in COCO's compressed run-length encoding: a third of the length of plain numbers.

    >>> encoded(np.array([[False, True], [True, True]]))
    {'size': [2, 2], 'counts': '13'}
    """
    from pycocotools.mask import encode  # compiled code, which a task without masks never needs

    runs = encode(np.asfortranarray(mask).view(np.uint8))
    return {"size": [*mask.shape], "counts": runs["counts"].decode()}


def run_lengths(mask: NDArray[np.bool_]) -> list[int]:
    """Return COCO's uncompressed run-length encoding: lengths of runs by columns, those of False first.

    >>> run_lengths(np.array([[False, True], [True, True]]))
    [1, 3]
    """
    flat = mask.ravel(order="F")
    changes = np.flatnonzero(np.diff(flat)) + 1
    bounds = np.concatenate(([0], changes, [flat.size]))
    lengths: list[int] = np.diff(bounds).tolist()
    return [0, *lengths] if flat.size and flat[0] else lengths


def mask_of_runs(lengths: Sequence[int], size: Size) -> NDArray[np.bool_]:
    """Return the mask of this (rows, columns) whose `run_lengths` these are. Raises ValueError for others."""
    if min(lengths, default=0) < 0 or sum(lengths) != size[0] * size[1]:
        raise ValueError(f"runs of {size[0]} x {size[1]} cells in all")
    values: NDArray[np.bool_] = np.repeat(np.arange(len(lengths)) % 2 == 1, lengths)
    return values.reshape(size, order="F")


def enlarged(mask: NDArray[np.bool_], size: Size) -> NDArray[np.bool_]:
    """Return a mask with one value for each pixel of a picture of this (height, width).

    It is smooth where the picture has two pixels for each cell or more: with fewer, that would change the value in the
    middle of some cells.
    """
    is_smooth = size[0] >= 2 * mask.shape[0] and size[1] >= 2 * mask.shape[1]
    kind = cv2.INTER_LINEAR if is_smooth else cv2.INTER_NEAREST_EXACT
    return np.asarray(cv2.resize(mask.astype(np.float32), (size[1], size[0]), interpolation=kind) > 0.5)


def _taken(length: int, covered: int, offset: int, inner: float) -> NDArray[np.intp]:
    """Return the indices of a map's rows, or columns, under a frame that begins at `offset` and is `inner` long.

    length: of the map; covered, offset, inner: in pixels of the network input, `covered` in all.
    """
    step = length / covered
    count = max(1, round(inner * step))
    return np.floor(offset * step + (np.arange(count) + 0.5) * inner * step / count).astype(np.intp)
