"""Find repairs that keep a layer in INT8, judged by the noise that reaches the layer's output through its weights.

The error of one input channel, D_c, reaches the output multiplied by the weights that read the channel: the layer's
output noise is sum_oc |w_oc|^2 D_c, while errors of different channels are taken as independent. So a channel that
large weights read needs small steps, however small its share of the tensor: yolox_nano's first depthwise convolution
looks healthy at 21 dB of tensor SQNR, and is at -11 dB behind its weights. Sources: Nagel et al., arXiv:1906.04721
(equalisation, bias correction); Banner et al., arXiv:1810.05723 (clipping weights).

Weights are (groups, outputs per group, inputs per group, taps), as engines/graph/weights.py makes them. Channel c of
the input is channel c % inputs of group c // inputs.

The range of an input that is divided channel by channel does not follow from a histogram, which is of a whole tensor's
|x|. It follows, for any divisors, from the extremes of its channels: exact, and mergeable in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from calibrate.scale import MIN_SCALE, QMAX, UNSIGNED_QMAX

Floats = NDArray[np.float64]
Extremes = NDArray[np.float32]  # (2, channels): the least and the largest value of each channel of a layer's input
Samples = NDArray[np.float32]  # half the memory traffic of float64, with the same decisions below

_EXPONENTS = (0.5, 0.75, 1.0)  # share of the difference in range that moves from the activations into the weights
_OCTAVES = (0.0, 0.5, 1.0, 1.5, 2.0, 2.5)  # distances below the largest value at which an amax is tried
_REFINED = (0.25, 0.125, 0.0625)  # then octaves to either side of the best so far
# Range of the narrowest channel over the widest one's. Smaller: a nearly silent channel is amplified without bound.
_NARROWEST = 2.0**-10
# Factors by which a channel may exceed its observed extremes; the widest is tried first. Other scenes drive single
# channels further than that of the calibration: by up to 8 times between a clip and photos (benchmarks/RESULTS.md).
HEADROOMS = (4.0, 2.0)
_CLIPS = np.array([1.0, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6])  # fractions of the largest weight that are tried


def merge_extremes(into: dict[str, Extremes], others: Mapping[str, Extremes]) -> None:
    """Merge extremes by name into those that are known; names that `into` lacks are added.

    >>> known = {"conv1": np.float32([[-1.0], [2.0]])}
    >>> merge_extremes(known, {"conv1": np.float32([[-0.5], [3.0]])})
    >>> known["conv1"].tolist()                               # the least and the largest value of the one channel
    [[-1.0], [3.0]]
    """
    for name, seen in others.items():
        known = into.get(name, seen)
        into[name] = np.stack((np.minimum(known[0], seen[0]), np.maximum(known[1], seen[1])))


def divided_ends(extremes: Extremes, divisors: ArrayLike, offsets: ArrayLike) -> tuple[float, float]:
    """Return the least and the largest value of (x - offset) / divisor over all channels.

    Args:
        extremes: (2, channels), the least and the largest x of each channel.
        divisors: (channels,), or one for all; positive.
        offsets: (channels,), or one for all, in the units of x.

    >>> divided_ends(np.float32([[0.0, -8.0], [1.0, 8.0]]), divisors=[1.0, 8.0], offsets=0.0)
    (-1.0, 1.0)
    """
    low, high = (extremes.astype(np.float64) - np.asarray(offsets)) / np.asarray(divisors)
    return float(low.min()), float(high.max())


def kept_amax(ends: tuple[float, float], reach: float, centred: bool) -> float:
    """Return the range of a tensor from its least and largest value.

    Args:
        ends: The least and the largest value.
        reach: Multiple of the largest |x| to cover; of a centred tensor, multiple of its span from the low end up.
        centred: True for a tensor with offsets. Its low end is never clipped: ReLU and SiLU have most values there.

    >>> kept_amax((-1.0, 4.0), reach=0.5, centred=False), kept_amax((-4.0, 4.0), reach=0.75, centred=True)
    (2.0, 4.0)
    """
    low, high = ends
    return max(-low, low + reach * (high - low)) if centred else reach * max(-low, high)


def undivided(extremes: Extremes, divisors: ArrayLike, offsets: ArrayLike) -> Extremes:
    """Return the extremes of x, (2, channels), from those of (x - offset) / divisor.

    Args:
        extremes: (2, channels), of the divided input.
        divisors: (channels,), or one for all; positive.
        offsets: (channels,), or one for all, in the units of x.

    >>> undivided(np.float32([[0.0], [1.0]]), divisors=8.0, offsets=-2.0).tolist()
    [[-2.0], [6.0]]
    """
    original: Extremes = (extremes.astype(np.float64) * np.asarray(divisors) + np.asarray(offsets)).astype(np.float32)
    return original


@dataclass(frozen=True)
class LayerInput:
    """Hold samples of a layer's input, and the extremes of each channel.

    Args:
        samples: float32 (channels, n).
        low: (channels,), the least value of each channel.
        high: (channels,), the largest value of each channel.
        is_unsigned: True if the input is never negative, and uint8 in place of int8.

    >>> read = LayerInput(np.float32([[0.0, 1.0], [-8.0, 8.0]]), np.array([0.0, -8.0]), np.array([1.0, 8.0]))
    >>> read.amax, read.variance
    (array([1., 8.]), array([ 0.25, 64.  ]))
    """

    samples: Samples
    low: Floats
    high: Floats
    is_unsigned: bool = False

    @property
    def largest_step(self) -> int:
        """The largest integer that it is quantised to."""
        return UNSIGNED_QMAX if self.is_unsigned else QMAX

    @property
    def amax(self) -> Floats:
        """The largest |x| per channel, (channels,)."""
        return np.maximum(np.abs(self.low), np.abs(self.high))

    @cached_property
    def variance(self) -> Floats:
        """The variance per channel, (channels,)."""
        variance: Floats = self.samples.var(axis=1, dtype=np.float64)
        return variance

    def scaled(self, divisors: Floats, offsets: Floats) -> LayerInput:
        """Return (x - offset) / divisor, channel by channel; with offsets it has a sign.

        Args:
            divisors: (channels,), positive.
            offsets: (channels,), in the units of x.
        """
        samples = ((self.samples - offsets[:, np.newaxis]) / divisors[:, np.newaxis]).astype(np.float32)
        is_unsigned = self.is_unsigned and not offsets.any()
        return LayerInput(samples, (self.low - offsets) / divisors, (self.high - offsets) / divisors, is_unsigned)


@dataclass(frozen=True)
class Equalisation:
    """Describe a layer that reads (x - offsets) / divisors in place of x.

    Args:
        divisors: (channels,), powers of two, so that without offsets float results do not change by a bit.
        offsets: (channels,), multiples of a channel's INT8 step, so that exact zeros stay exact.
        amax: The range of the divided input.
        reach: The part that `amax` covers, as a multiple of the input's largest |x| in the whole calibration, or with
            offsets of its span; see `kept_amax`. Below 1 rare values are clipped; above 1 there is headroom.
        noise: Of the layer's output, in its units squared, from activations and weights together.

    >>> found = Equalisation(np.array([1.0, 0.25]), np.zeros(2), amax=1.0, reach=1.0, noise=1e-4)
    >>> found.divisors.tolist()                               # the second channel gets four times as many steps
    [1.0, 0.25]
    """

    divisors: Floats
    offsets: Floats
    amax: float
    reach: float
    noise: float


def activation_noise(matrix: Floats, read: LayerInput, scale: float) -> float:
    """Return the mean squared error of all outputs of a layer together, if it reads its input with one scale.

    Args:
        matrix: Weights (groups, outputs, inputs, taps).
        read: The layer's input; its channels are groups * inputs.
        scale: Of the input, in its units for each step.

    >>> read = LayerInput(np.float32([[0.0, 0.25, 0.5]]), np.zeros(1), np.ones(1))
    >>> weights = np.full((1, 2, 1, 1), 2.0)                  # two outputs, each twice the only input
    >>> round(activation_noise(weights, read, scale=0.5), 4)
    0.1667
    """
    return float(_by_input(matrix) @ _channel_noise(read.samples, scale, read.largest_step))


def weight_noise(matrix: Floats, variance: Floats, clips: Floats | None = None) -> float:
    """Return the mean squared error of all outputs together, if the weights are int8 with a scale per output channel.

    The weights' errors times the channels' means are a constant, which the bias takes.

    Args:
        matrix: Weights (groups, outputs, inputs, taps).
        variance: (channels,), of the input.
        clips: (outputs,), fractions of the largest weight, as `best_clips` returns them; None: 1 for every output.

    >>> weights = np.array([1.0, 0.001]).reshape(1, 1, 2, 1)
    >>> f"{weight_noise(weights, np.ones(2)):.1e}"            # the small weight is rounded to 0
    '1.0e-06'
    """
    return float(_weight_errors(matrix, variance, np.ones(1) if clips is None else clips).sum())


def equalisation(
    matrix: Floats, read: LayerInput, extremes: Extremes, centred: bool, headrooms: Sequence[float] = HEADROOMS
) -> tuple[Equalisation, ...]:
    """Return the divisors of least noise for each headroom; with `centred`, offsets too.

    A few frames show which fraction of the largest value a range should keep. The largest value, and the channels'
    ranges, are those of the whole calibration, with headroom: but no channel goes further than the whole tensor went,
    for one scale for all channels allows no more.

    Divisors trade the noise of the activations against that of the weights. Offsets give a one-sided input, as ReLU and
    SiLU make it, all of INT8's range instead of half: a quarter of its noise. So has an unsigned one without them.

    Args:
        matrix: Weights (groups, outputs, inputs, taps).
        read: The layer's input on a few frames.
        extremes: (2, channels), the least and the largest value of each channel in the whole calibration.
        centred: True to search offsets, too.
        headrooms: Factors by which a channel may exceed its extremes, in the order of the result.

    Source: Nagel et al., arXiv:1906.04721.

    >>> rng = np.random.default_rng(0)
    >>> samples = (rng.normal(size=(2, 1000)) * [[1.0], [16.0]]).astype(np.float32)     # one quiet, one loud channel
    >>> extremes = np.stack((samples.min(axis=1), samples.max(axis=1)))
    >>> read = LayerInput(samples, *extremes.astype(np.float64))
    >>> (found,) = equalisation(np.ones((1, 1, 2, 1)), read, extremes, centred=False, headrooms=(1.0,))
    >>> found.divisors
    array([0.125, 1.   ])
    """
    exponents = (0.0, *_EXPONENTS) if centred else _EXPONENTS
    candidates = [_equalised(matrix, read, extremes, exponent, centred, headrooms) for exponent in exponents]
    return tuple(min(alike, key=lambda candidate: candidate.noise) for alike in zip(*candidates, strict=True))


def _equalised(
    matrix: Floats, read: LayerInput, extremes: Extremes, exponent: float, centred: bool, headrooms: Sequence[float]
) -> list[Equalisation]:
    """Return the layer under divisors of one exponent, for each headroom."""
    largest_step = QMAX if centred else read.largest_step
    whole = LayerInput(read.samples, *extremes.astype(np.float64))
    divisors = _divisors(_width(whole, centred), exponent)
    scaled = matrix * divisors.reshape(matrix.shape[0], 1, matrix.shape[2], 1)
    samples = read.samples / divisors.astype(np.float32)[:, np.newaxis]
    gains = _by_input(scaled)

    def largest(seen: LayerInput) -> float:
        return float((_width(seen, centred) / divisors).max())

    def offset_steps(seen: LayerInput, amax: float) -> Floats:
        """Return offsets in INT8 steps, from the low end up: the high end is clipped, where values are rare."""
        return np.rint((seen.low / divisors + amax) / _scale(amax, QMAX)) if centred else np.zeros_like(divisors)

    def noise(seen: LayerInput, amax: float) -> float:
        scale = _scale(amax, largest_step)
        return float(gains @ _channel_noise(samples, scale, largest_step, offset_steps(seen, amax)))

    in_sample = largest(read)
    best = _best_amax(lambda amax: noise(read, amax), in_sample)
    kept = min(best / in_sample, 1.0) if in_sample > 0.0 else 1.0
    weights = weight_noise(scaled, read.variance / np.square(divisors))
    found = []
    for headroom in headrooms:
        seen = _widened(whole, headroom)
        amax = kept * largest(seen)
        offsets = offset_steps(seen, amax) * _scale(amax, QMAX) * divisors
        low, high = divided_ends(extremes, divisors, offsets)
        size, covered = (high - low, amax - low) if centred else (max(-low, high), amax)
        reach = covered / size if covered > 0.0 and size > 0.0 else 1.0
        found.append(Equalisation(divisors, offsets, amax, reach, noise(seen, amax) + weights))
    return found


def _widened(whole: LayerInput, headroom: float) -> LayerInput:
    """Return the input with room beyond the ends of its channels, within the largest |x| of all of them."""
    largest = float(whole.amax.max())
    low, high = (np.clip(headroom * end, -largest, largest) for end in (whole.low, whole.high))
    return LayerInput(whole.samples, np.minimum(low, whole.low), np.maximum(high, whole.high))


def _width(seen: LayerInput, centred: bool) -> Floats:
    """Return the range of each channel, (channels,): half of it between its ends, or up to its largest |x|."""
    return (seen.high - seen.low) / 2.0 if centred else seen.amax


def _divisors(width: Floats, exponent: float) -> Floats:
    """Return powers of two (channels,). A channel that was silent gets the median of the others."""
    active = width > 0.0
    if not active.any():
        return np.ones_like(width)
    ranges = np.where(active, width, np.median(width[active])) / width.max()
    divisors: Floats = np.exp2(np.rint(exponent * np.log2(np.maximum(ranges, _NARROWEST))))
    return divisors


def _best_amax(noise: Callable[[float], float], largest: float) -> float:
    """Return the amax of least noise, to within 1/16 octave."""
    tried: dict[float, float] = {amax: noise(amax) for amax in (largest * 2.0**-octaves for octaves in _OCTAVES)}
    for octaves in _REFINED:
        best = min(tried, key=tried.__getitem__)
        tried |= {amax: noise(amax) for amax in (best * 2.0**octaves, best * 2.0**-octaves)}
    return min(tried, key=tried.__getitem__)


def best_clips(matrix: Floats, variance: Floats) -> Floats:
    """Return for each output channel, (outputs,), the fraction of its largest weight that the scale should reach.

    Args:
        matrix: Weights (groups, outputs, inputs, taps).
        variance: (channels,), of the input.

    Source: Banner et al., arXiv:1810.05723.

    >>> weights = np.linspace(-1.0, 1.0, 65536).reshape(1, 1, 65536, 1)
    >>> weights[0, 0, 0, 0] = 1.5                             # one weight far beyond the others
    >>> best_clips(weights, np.ones(65536))
    array([0.7])
    """
    noise = np.stack([_weight_errors(matrix, variance, np.full(1, clip)) for clip in _CLIPS])
    best: Floats = _CLIPS[noise.argmin(axis=0)]
    return best


def output_shift(matrix: Floats, read: LayerInput, scale: float, clips: Floats | None = None) -> Floats:
    """Return the shift that quantisation makes in the mean of each output, (outputs,), in its units.

    Borders are left out, where taps read padding.

    Args:
        matrix: Weights (groups, outputs, inputs, taps).
        read: The layer's input.
        scale: Of the input, in its units for each step.
        clips: (outputs,), fractions of the largest weight, as `best_clips` returns them; None: 1 for every output.

    Source: Nagel et al., arXiv:1906.04721, bias correction.

    >>> read = LayerInput(np.full((1, 4), 0.3, np.float32), np.zeros(1), np.full(1, 0.3))
    >>> output_shift(np.full((1, 1, 1, 1), 1.0), read, scale=0.25).round(3)     # 0.3 is read as 0.25
    array([-0.05])
    """
    steps = np.rint(read.samples * np.float32(1.0 / scale)).clip(-read.largest_step, read.largest_step)
    groups, _, inputs, _ = matrix.shape
    quantised = _quantised(matrix, np.ones(1) if clips is None else clips)
    seen = steps.mean(axis=1, dtype=np.float64).reshape(groups, inputs) * scale
    true = read.samples.mean(axis=1, dtype=np.float64).reshape(groups, inputs)
    moved: Floats = np.einsum("goit,gi->go", quantised, seen) - np.einsum("goit,gi->go", matrix, true)
    return moved.ravel()


def _scale(amax: float, largest_step: int) -> float:
    """Return what `calibrate.scale.activation_scale` does, for an amax that is finite and not 0, in less time."""
    return float(np.float32(max(amax / largest_step, MIN_SCALE)))


def _channel_noise(samples: Samples, scale: float, largest_step: int, offset_steps: Floats | None = None) -> Floats:
    """Return the mean squared error of each input channel at one scale, (channels,).

    offset_steps: whole steps (channels,) that are subtracted before rounding. They only move the clipping limits.
    """
    middle = np.zeros((1, 1), np.float32) if offset_steps is None else offset_steps.astype(np.float32)[:, np.newaxis]
    steps = samples * np.float32(1.0 / scale)
    error = np.rint(steps)
    np.clip(error, middle - largest_step, middle + largest_step, out=error)
    error -= steps
    noise: Floats = np.einsum("cn,cn->c", error, error) * np.float64(scale**2 / samples.shape[1])
    return noise


def _by_input(matrix: Floats) -> Floats:
    """Return the sum of w**2 over the weights that read each input channel, (channels,)."""
    gains: Floats = np.square(matrix).sum(axis=(1, 3)).ravel()
    return gains


def _weight_errors(matrix: Floats, variance: Floats, clips: Floats) -> Floats:
    """Return the output noise per output channel, (outputs,)."""
    groups, _, inputs, _ = matrix.shape
    squared = np.square(_quantised(matrix, clips) - matrix).sum(axis=3)
    noise: Floats = np.einsum("goi,gi->go", squared, variance.reshape(groups, inputs))
    return noise.ravel()


def _quantised(matrix: Floats, clips: Floats) -> Floats:
    groups, outputs, _, _ = matrix.shape
    reach = np.broadcast_to(clips, groups * outputs).reshape(groups, outputs, 1, 1)
    scales = np.maximum(np.abs(matrix).max(axis=(2, 3), keepdims=True) * reach / QMAX, MIN_SCALE)
    quantised: Floats = np.clip(np.rint(matrix / scales), -QMAX, QMAX) * scales
    return quantised
