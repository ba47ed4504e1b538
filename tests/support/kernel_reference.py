"""The answers that the kernels must give: entropy search and preprocessing in NumPy; and data to break them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from calibrate.divergence import LEVELS
from engines.preprocessing import ImageTransform

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]

LN_2 = 0.6931471805599453


def fixed_log(x: Floats) -> Floats:
    """fixed_log of kernels.cu: the same operations in the same order, hence the same bits."""
    bits = x.view(np.int64)
    mantissa = ((bits & 0x000FFFFFFFFFFFFF) | 0x3FF0000000000000).view(np.float64)
    large = mantissa > 1.4142135623730951
    exponent = ((bits >> 52) - 1023 + large).astype(np.float64)
    mantissa = np.where(large, mantissa * 0.5, mantissa)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    square, series = s * s, np.full_like(s, 1.0 / 21)
    for k in range(19, 0, -2):
        series = series * square + 1.0 / k
    return exponent * LN_2 + (2.0 * s) * series


def log_or_zero(x: Floats) -> Floats:
    """ln x, and 0 where x is below 1: an empty group says nothing."""
    return np.where(x >= 1.0, fixed_log(np.maximum(x, 1.0)), 0.0)


def xlogx(counts: Counts) -> Floats:
    x = counts.astype(np.float64)
    return np.where(counts > 1, x * log_or_zero(x), 0.0)


def divergences(counts: Counts, window: tuple[int, int], threads: int) -> Floats:
    """entropy_search's curve of one histogram (bins,): (bins + 1,) by bins kept, to the last bit."""
    counts = np.concatenate((counts[1:2], counts[1:]))
    below = np.concatenate(([0], np.cumsum(counts)))
    filled = np.concatenate(([0], np.cumsum(counts > 0)))
    entropy = _entropy_prefix(xlogx(counts), threads)
    kept = np.arange(1, counts.size + 1)
    tail = below[-1] - below[kept]
    cross = np.zeros(kept.size)
    for group in range(LEVELS):
        start, end = -(-group * kept // LEVELS), -(-(group + 1) * kept // LEVELS)
        mass = (below[end] - below[start]).astype(np.float64)
        log_mean = log_or_zero(mass / np.maximum(filled[end] - filled[start], 1))
        cross = cross + mass * log_mean
    cross = cross + tail.astype(np.float64) * log_mean
    with np.errstate(divide="ignore", invalid="ignore"):
        total, inside = below[-1:].astype(np.float64), below[kept].astype(np.float64)
        curve = ((entropy + xlogx(counts + tail)) - cross) / total + (log_or_zero(inside) - log_or_zero(total))
    low, high = window
    competes = (np.maximum(low, LEVELS) <= kept) & (kept <= high)
    curve[~competes | (inside == 0) | ((counts == 0) & (tail > 0))] = np.inf
    return np.concatenate(([np.inf], curve))


def _entropy_prefix(terms: Floats, threads: int) -> Floats:
    """Sums of the terms before each bin: within a thread's share in order, on top of the shares before it in order."""
    shares = terms.reshape(threads, -1)
    within = np.concatenate((np.zeros((threads, 1)), np.cumsum(shares, axis=1)), axis=1)
    before = np.concatenate(([0.0], np.cumsum(within[:, -1])[:-1]))
    return (before[:, None] + within[:, :-1]).reshape(-1)


def preprocessed(transform: ImageTransform, frame: NDArray[np.uint8]) -> NDArray[np.generic]:
    """preprocess of kernels.cu, a whole frame at a time: (1, C, height, width) or (1, height, width, C)."""
    scaled = scaled_levels(frame, transform.inner_height, transform.inner_width)
    canvas = np.full((transform.height, transform.width, 3), transform.pad, np.int64)
    y, x = np.arange(transform.height) - transform.top, np.arange(transform.width) - transform.left
    inside_y, inside_x = (y >= 0) & (y < len(scaled)), (x >= 0) & (x < scaled.shape[1])
    canvas[np.ix_(inside_y, inside_x)] = scaled[np.ix_(y[inside_y], x[inside_x])]
    if transform.color == "gray":
        levels = grey_levels(canvas)[np.newaxis]
    else:
        levels = canvas.transpose(2, 0, 1)[:: -1 if transform.color == "rgb" else 1]
    gain, bias = (np.array(v, np.float32).reshape(-1, 1, 1) for v in (transform.gain, transform.bias))
    image = (levels.astype(np.float32) * gain + bias)[np.newaxis].astype(transform.dtype)
    return image if transform.layout == "NCHW" else np.ascontiguousarray(image.transpose(0, 2, 3, 1))


def grey_levels(levels: NDArray[np.signedinteger[Any]]) -> NDArray[np.signedinteger[Any]]:
    """OpenCV's grey of BGR levels (..., 3): weights of 15 bits, rounded to the nearest."""
    weighed: NDArray[np.signedinteger[Any]] = 3735 * levels[..., 0] + 19235 * levels[..., 1] + 9798 * levels[..., 2]
    return weighed + (1 << 14) >> 15


def scaled_levels(frame: NDArray[np.uint8], height: int, width: int) -> NDArray[np.int64]:
    """OpenCV's INTER_LINEAR of a frame (H, W, C): horizontally, then vertically, with weights of 11 bits."""
    x0, x1, left, right = _bilinear(frame.shape[1], width, shares_edges=False)
    y0, y1, upper, lower = _bilinear(frame.shape[0], height, shares_edges=True)
    levels = frame.astype(np.int64)
    rows = levels[:, x0] * left[:, np.newaxis] + levels[:, x1] * right[:, np.newaxis] >> 4
    above, below = (rows[y0].T * upper).T >> 16, (rows[y1].T * lower).T >> 16
    total: NDArray[np.int64] = above + below
    return total + 2 >> 2


def _bilinear(source: int, target: int, shares_edges: bool) -> tuple[Counts, Counts, Counts, Counts]:
    """Per pixel of an axis: the two it comes from, and their weights of 2048."""
    centre = ((np.arange(target) + 0.5) * (1.0 / (target / source)) - 0.5).astype(np.float32)
    first = np.floor(centre).astype(np.int64)
    fraction = centre - first.astype(np.float32)
    if not shares_edges:
        fraction = np.where((first < 0) | (first + 1 >= source), np.float32(0), fraction)
    weights = [np.rint(part * np.float32(2048)).astype(np.int64) for part in (np.float32(1) - fraction, fraction)]
    return first.clip(0, source - 1), (first + 1).clip(0, source - 1), *weights


def transforms(rng: np.random.Generator, count: int, most: int) -> Iterator[ImageTransform]:
    """Every colour and way of placing a frame, at sizes up to `most`; some frames are scaled, some are cut."""
    for number in range(count):
        frame_height, frame_width, height, width = (int(side) for side in rng.integers(1, most, 4))
        inner_height, inner_width = frame_height, frame_width
        if number % 4 < 3:  # stretched, letterboxed within the height, letterboxed within the width
            inner_height = height if number % 4 < 2 else int(rng.integers(1, height + 1))
            inner_width = width if number % 4 != 1 else int(rng.integers(1, width + 1))
        centred = number % 2 == 1
        top, left = ((height - inner_height) // 2, (width - inner_width) // 2) if centred else (0, 0)
        color: Literal["bgr", "rgb", "gray"] = ("bgr", "rgb", "gray")[number % 3]
        is_bytes = number // 3 % 3 == 2
        gain, bias = rng.normal(size=(2, 1 if color == "gray" else 3)).astype(np.float32).tolist()
        if is_bytes:
            gain, bias = [1.0] * len(gain), [0.0] * len(bias)
        pad = int(rng.integers(256))
        yield ImageTransform(
            frame_height, frame_width, inner_height, inner_width, top, left, height, width, pad, color,
            tuple(gain), tuple(bias), ("NCHW", "NHWC")[number // 2 % 2], "uint8" if is_bytes else "float32",
        )  # fmt: skip


def tensors(rng: np.random.Generator, size: int) -> dict[str, NDArray[np.float32]]:
    """One tensor of each kind that activations, or accidents, bring; float32 (size,)."""
    normal = rng.normal(0.0, 3.0, size)
    broken = rng.normal(0.0, 3.0, size)
    broken[::7] = np.resize([np.nan, np.inf, -np.inf, 0.0, -0.0], broken[::7].size)
    kinds = {
        "normal": normal,
        "relu": np.maximum(normal, 0.0),
        "wide": normal * 10.0 ** rng.uniform(-4, 4, size),
        "constant": np.full(size, -0.37),
        "broken": broken,
        "zeros": np.where(rng.random(size) < 0.5, 0.0, -0.0),
        "nothing finite": np.full(size, np.nan),
        "small": normal * 1e-4,
        "large": normal * 3e3,
    }
    return {kind: values.astype(np.float32) for kind, values in kinds.items()}


def extremes() -> NDArray[np.float32]:
    """The least and the greatest that a float32 can be: a range whose tail ends at infinity itself."""
    return np.array([1e-45, 3.4028235e38, -3.4028235e38, 0.0, -0.0, np.inf, np.nan], np.float32)


def histograms(rng: np.random.Generator, bins: int) -> dict[str, Counts]:
    """Histograms (bins,) of many shapes, some of them degenerate."""
    position = np.arange(bins)
    rows = {
        f"{name} {width}": rng.poisson(scale * np.exp(-((position / (width * bins)) ** power)))
        for name, power, scale in (("laplace", 1, 900), ("normal", 2, 5000), ("sparse", 1, 2))
        for width in (0.02, 0.1, 0.3, 1.0)
    }
    pile = rows["normal 0.1"].copy()
    pile[bins // 3] = 4_000_000
    rows |= {
        "pile": pile,
        "relu": np.concatenate(([2_000_000], rows["normal 0.3"][1:])),
        "far from zero": rng.poisson(400 * np.exp(-(((position - 0.8 * bins) / (0.03 * bins)) ** 2))),
        "outlier": np.where(position == bins - 1, 1, rows["laplace 0.02"]),
        "uniform": np.full(bins, 17),
        "beyond 2**53": rows["normal 0.1"] * 10**12,
        "one bin": np.where(position == bins // 2, 12345, 0),
        "last bin": np.where(position == bins - 1, 1, 0),
        "two bins": np.where(position < 2, 7, 0),
    }
    return {name: row.astype(np.int64) for name, row in rows.items()}
