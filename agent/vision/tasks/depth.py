"""The task depth: a distance or a disparity for each pixel, metric or relative (monocular depth estimation)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import cv2
import numpy as np
from numpy.typing import NDArray

from agent.common.errors import DatasetError
from agent.vision.answer import Answer, Decoder
from agent.vision.boxes import FloatArray, Part, Size
from agent.vision.drawing import Picture, draw_title
from agent.vision.preprocess import Geometry
from agent.vision.spec import ModelSpec
from agent.vision.tasks.maps import find_maps, no_map, part_of_frame, without_padding
from agent.vision.tasks.scores import Evaluation
from agent.vision.tasks.task import ModelTask
from engines.interface import Array, TensorSpec

if TYPE_CHECKING:
    from agent.vision.datasets.depth_images import DepthImages

DELTA_1 = 1.25  # a pixel is right if its ratio to the truth is below (Eigen et al., NIPS 2014)
RATIO = 1.05
_LEAST = 1e-6  # a distance or a disparity above it is one
_TINY = float(np.finfo(np.float64).tiny)
_SPREAD = 4.0  # mean deviations between the 5th and 95th percentile: 3.6 of even values, 4.1 of normal ones
_ROWS, _COLUMNS = 12, 16  # the medians in JSON


@dataclass(frozen=True, eq=False)
class DepthMap(Answer):
    """Hold the distance of each pixel, or its disparity.

    Args:
        values: float32 (h, w), in the model's unit; NaN where there is none.
        covered: (height, width) in pixels of the network input, or of the frame, that the map covers.
        is_relative: Known but for a scale and a shift.
        max_ratio: Up to which two values agree.
        is_disparity: They are large where it is near: known but for a scale and a shift of 1 / distance.
    """

    values: FloatArray
    covered: Size
    is_relative: bool = False
    max_ratio: float = RATIO
    is_disparity: bool = False

    def fidelity(self, reference: DepthMap) -> float | None:
        """Return the share of the pixels that agree, of those where either map has a value.

        Two values agree if they are apart by at most `max_ratio` - 1 of the smaller one. In relative maps, which are
        brought to one scale and shift, that is a share of the reference's spread. It is None where neither map has a
        value, or the reference is relative and flat: then it tells nothing.
        """
        expected, found = (each.values.astype(np.float64) for each in (reference, self))
        counted = np.isfinite(expected) | np.isfinite(found)
        if not counted.any():
            return None
        tolerance = self.max_ratio - 1.0
        with np.errstate(invalid="ignore", over="ignore"):
            if not self.is_relative:
                near = np.abs(found - expected) <= tolerance * np.minimum(np.abs(found), np.abs(expected))
            else:
                if _is_flat(expected):
                    return None
                if _is_flat(found):
                    return 0.0
                both = np.isfinite(expected) & np.isfinite(found)
                near = np.abs(_standard(found, both) - _standard(expected, both)) <= tolerance * _SPREAD
        return float(near[counted].mean())

    def without_padding(self, part: Part, size: Size) -> DepthMap:
        return replace(self, values=without_padding(self.values, part, size, np.nan))

    def in_frame(self, geometry: Geometry | None) -> DepthMap:
        """Return the part of the map that the frame covers, at the map's own resolution."""
        if geometry is None:
            return self
        size = geometry.frame_height_px, geometry.frame_width_px
        return replace(self, values=part_of_frame(self.values, self.covered, geometry, np.nan), covered=size)

    def resized(self, size: Size) -> DepthMap:
        """Return the map with one value for each pixel of a picture of this (height, width)."""
        values = cv2.resize(self.values, (size[1], size[0]), interpolation=cv2.INTER_NEAREST_EXACT)
        return replace(self, values=np.asarray(values, np.float32), covered=size)

    def as_dict(self, spec: ModelSpec) -> dict[str, Any]:
        """Return the median of each cell of a grid over the frame, row by row; null where there is no value."""
        del spec
        bands = np.array_split(self.values, min(_ROWS, len(self.values)))
        return {"depth": [[_median(each) for each in np.array_split(band, _COLUMNS, axis=1)] for band in bands]}

    def summary(self, spec: ModelSpec) -> str:
        """Return the range of most values."""
        del spec
        finite = self.values[np.isfinite(self.values)]
        if not finite.size:
            return "no depth"
        low, high = np.quantile(finite, (0.05, 0.95))
        return f"{low:.3g} to {high:.3g}"

    def draw(self, picture: Picture, spec: ModelSpec) -> None:
        """Draw the values in place of the picture, from dark to bright, and their range."""
        values = self.resized((picture.shape[0], picture.shape[1])).values
        there = np.isfinite(values)
        if there.any():
            low, high = np.quantile(values[there], (0.02, 0.98))
            shares = np.nan_to_num((values - low) / max(float(high - low), _LEAST), nan=0.0)
            levels = (np.clip(shares, 0.0, 1.0) * 255.0).astype(np.uint8)
            picture[there] = cv2.applyColorMap(levels, cv2.COLORMAP_VIRIDIS)[there]
            draw_title(picture, self.summary(spec))


class Depth(ModelTask):
    """A distance, or a disparity, for each pixel: one output (h, w), (1, h, w) or (h, w, 1).

    Answers keep the model's own unit. Larger is farther, but for `depth: disparity`.
    """

    keys: ClassVar[frozenset[str]] = frozenset(("depth", "max_ratio"))
    can_be_drawn: ClassVar[bool] = True
    answers_padding: ClassVar[bool] = True
    has_large_answers: ClassVar[bool] = True
    # Errors of a model with a delta 1 of 0.9 spread by 0.136 in the logarithm. Noise of 0.033 takes a point of it, and
    # puts 14 % of the pixels beyond a ratio of 1.05. The sample's head, whose delta 1 is higher, is a point down there.
    max_loss: ClassVar[float] = 0.1
    certified_loss: ClassVar[float] = 0.1

    def open_decoder(self, size: Size, outputs: Sequence[TensorSpec]) -> Decoder:
        maps = find_maps({output.name: output.shape[1:] for output in outputs}, size, channels=1)
        if len(maps) != 1:
            pixels = f"each pixel of the input, {size[0]}x{size[1]}, or of a stride"
            raise no_map(outputs, f"one output with a value for {pixels}")
        ((name, _),) = maps
        kind, max_ratio = self.spec.depth, self.spec.max_ratio or RATIO

        def decode(batch: Mapping[str, Array]) -> DepthMap:
            values = np.array(np.squeeze(batch[name][0]), np.float32)
            values[~np.isfinite(values)] = np.nan
            return DepthMap(values, size, kind in ("relative", "disparity"), max_ratio, kind == "disparity")

        return decode

    def labelled_images(self, path: Path, only: Sequence[str] = ()) -> DepthImages:
        from agent.vision.datasets.depth_images import DepthImages

        return DepthImages(path, only)

    def evaluation(self, answered: Iterable[tuple[DepthMap, FloatArray]]) -> Evaluation:
        """Return the share of pixels whose ratio is below 1.25, and the absolute relative error (Eigen et al. 2014)."""
        errors, right = list[float](), list[float]()
        for answer, truth in answered:
            counted, expected = np.isfinite(truth), truth.astype(np.float64)
            if not counted.any():
                continue
            found = answer.resized((truth.shape[0], truth.shape[1])).values.astype(np.float64)
            if answer.is_disparity:
                found = _distances(found, expected)
            elif answer.is_relative:
                found = aligned(found, expected)
            relative = np.abs(found[counted] - expected[counted]) / expected[counted]
            errors.append(float(np.nan_to_num(relative, nan=1.0).mean()))
            right.append(float((ratios(found[counted], expected[counted]) < DELTA_1).mean()))
        if not errors:
            raise DatasetError("dataset.empty", "no pixel with a distance", "at least one", "check the depth pictures")
        scores = {"delta1": float(np.mean(right)), "abs_rel": float(np.mean(errors))}
        return Evaluation(self.spec.task, len(errors), scores)


def aligned(found: NDArray[np.float64], expected: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return a relative map in the scale and shift of the expected one, by least squares (Ranftl et al. 2022).

    The scale is not below 0: a map whose near and far have changed places is not right.
    """
    both = np.isfinite(found) & np.isfinite(expected)
    if not both.any():
        return found
    centre, target = found[both].mean(), expected[both].mean()
    spread = found[both] - centre
    scale = max(0.0, float(spread @ (expected[both] - target)) / max(float(spread @ spread), _TINY))
    moved: NDArray[np.float64] = scale * (found - centre) + target
    return moved


def _distances(disparity: NDArray[np.float64], expected: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the distances of a disparity, which 1 / the expected ones align; NaN where it is not positive then."""
    with np.errstate(divide="ignore", invalid="ignore"):
        found = 1.0 / aligned(disparity, 1.0 / expected)
    found[~(found > 0.0)] = np.nan
    return found


def ratios(found: NDArray[np.float64], expected: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return max(found / expected, expected / found) of each pixel; infinite where one is no number or not positive."""
    sound = (found > _LEAST) & (expected > _LEAST)
    result = np.full(found.shape, np.inf)
    result[sound] = np.maximum(found[sound] / expected[sound], expected[sound] / found[sound])
    return result


def _standard(values: NDArray[np.float64], counted: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return values less their median, by their mean deviation from it (Ranftl et al. 2022), both over `counted`."""
    if not counted.any():
        return values
    deviations = values - np.median(values[counted])
    standard: NDArray[np.float64] = deviations / max(np.abs(deviations[counted]).mean(), _TINY)
    return standard


def _is_flat(values: NDArray[np.float64]) -> bool:
    """Return whether no two values differ, beyond the rounding of float32."""
    finite = values[np.isfinite(values)]
    return not finite.size or bool(np.ptp(finite) <= np.finfo(np.float32).eps * np.abs(finite).max())


def _median(cell: FloatArray) -> float | None:
    finite = cell[np.isfinite(cell)]
    return round(float(np.median(finite)), 3) if finite.size else None
