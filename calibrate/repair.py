"""Repairs that keep a layer in INT8, judged by the noise that reaches the layer's output through its weights.

The error of one input channel, D_c, reaches the output multiplied by the weights that read the channel: the layer's
output noise is sum_oc |w_oc|^2 D_c, while errors of different channels are taken as independent. So a channel that
large weights read needs small steps, however small its share of the tensor: yolox_nano's first depthwise convolution
looks healthy at 21 dB of tensor SQNR, and is at -11 dB behind its weights. Sources: Nagel et al., arXiv:1906.04721
(equalisation, bias correction); Banner et al., arXiv:1810.05723 (clipping weights).

Weights are (groups, outputs per group, inputs per group, taps), as engines/layer_weights.py makes them. Channel c of
the input is channel c % inputs of group c // inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from calibrate.scale import MIN_SCALE, QMAX

Floats = NDArray[np.float64]

_MARGIN = 1.25  # of a channel's range: what other frames reach beyond the few that were seen
_EXPONENTS = (0.5, 0.75, 1.0)  # how much of the difference in range is taken out; the weights take it over
_OCTAVES = 3.0  # how far below the largest value an amax is looked for
_PER_OCTAVE = 4
_NARROWEST = 2.0**-10  # of the widest channel: one that is all but silent need not be blown up further
_CLIPS = np.array([1.0, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6])  # of the largest weight


@dataclass(frozen=True)
class LayerInput:
    """What a layer reads: samples (channels, n), and the least and the largest value of each channel, (channels,)."""

    samples: Floats
    low: Floats
    high: Floats

    @property
    def amax(self) -> Floats:
        """The largest |x| of each channel, (channels,)."""
        return np.maximum(np.abs(self.low), np.abs(self.high))

    @property
    def variance(self) -> Floats:
        """Per channel, (channels,)."""
        variance: Floats = self.samples.var(axis=1)
        return variance

    def scaled(self, divisors: Floats, offsets: Floats) -> LayerInput:
        """(x - offset) / divisor, channel by channel."""
        samples = (self.samples - offsets[:, np.newaxis]) / divisors[:, np.newaxis]
        return LayerInput(samples, (self.low - offsets) / divisors, (self.high - offsets) / divisors)


@dataclass(frozen=True)
class Equalisation:
    """The layer reads (x - offsets) / divisors, both (channels,). amax: of that.

    Divisors are powers of two, so that without offsets float results do not change by a bit. Offsets are multiples of a
    channel's INT8 step, so that what is exactly zero stays so. noise: of the layer's output, in its units squared, from
    activations and weights together.
    """

    divisors: Floats
    offsets: Floats
    amax: float
    noise: float


def activation_noise(matrix: Floats, read: LayerInput, scale: float) -> float:
    """Mean squared error of all outputs of a layer together when it reads its input with one int8 scale."""
    return float(_by_input(matrix) @ _channel_noise(read, scale))


def weight_noise(matrix: Floats, variance: Floats, clips: Floats | None = None) -> float:
    """The same when its weights are int8, a scale per output channel; clips (outputs,) as `best_clips` gives them.

    variance: of the input channels. What the weights' errors make of their means is a constant, which the bias takes.
    """
    return float(_weight_errors(matrix, variance, np.ones(1) if clips is None else clips).sum())


def equalisation(matrix: Floats, read: LayerInput, may_offset: bool) -> Equalisation:
    """The divisors, and where they are allowed the offsets, of least noise.

    Divisors trade the noise of the activations against that of the weights. Offsets give a one-sided input, as ReLU and
    SiLU make it, all of INT8's range instead of half: a quarter of its noise.
    """
    found = [_equalised(matrix, read, exponent, False) for exponent in _EXPONENTS]
    if may_offset:
        found += [_equalised(matrix, read, exponent, True) for exponent in (0.0, *_EXPONENTS)]
    return min(found, key=lambda candidate: candidate.noise)


def _equalised(matrix: Floats, read: LayerInput, exponent: float, offset: bool) -> Equalisation:
    width = _MARGIN * ((read.high - read.low) / 2.0 if offset else read.amax)
    widest = max(float(width.max()), MIN_SCALE)
    ranges = np.maximum(width, _NARROWEST * widest) / widest
    divisors = np.exp2(np.rint(exponent * np.log2(ranges)))
    scaled = matrix * divisors.reshape(matrix.shape[0], 1, matrix.shape[2], 1)
    gains = _by_input(scaled)
    found = []
    for amax in _candidates(float((width / divisors).max())):
        offsets = np.zeros_like(divisors)
        if offset:  # from the low end up: what is clipped, at the high end, is rare there
            step = divisors * max(amax / QMAX, MIN_SCALE)
            offsets = np.rint((read.low + amax * divisors) / step) * step
        noise = float(gains @ _channel_noise(read.scaled(divisors, offsets), max(amax / QMAX, MIN_SCALE)))
        found.append((noise, amax, offsets))
    noise, amax, offsets = min(found, key=lambda candidate: candidate[0])
    variance = read.scaled(divisors, offsets).variance
    return Equalisation(divisors, offsets, amax, noise + weight_noise(scaled, variance))


def _candidates(largest: float) -> Floats:
    """amax to try, (n,), from the largest value down."""
    candidates: Floats = largest * np.exp2(-np.arange(0.0, _OCTAVES, 1.0 / _PER_OCTAVE))
    return candidates


def best_clips(matrix: Floats, variance: Floats) -> Floats:
    """Per output channel (outputs,) how much of its largest weight the scale should reach; 1 is all of it."""
    noise = np.stack([_weight_errors(matrix, variance, np.full(1, clip)) for clip in _CLIPS])
    best: Floats = _CLIPS[noise.argmin(axis=0)]
    return best


def output_shift(matrix: Floats, read: LayerInput, scale: float, clips: Floats | None = None) -> Floats:
    """What quantisation moves the mean of each output by, (outputs,); borders, where taps read padding, apart."""
    seen = np.clip(np.rint(read.samples / scale), -QMAX, QMAX).mean(axis=1) * scale
    groups, _, inputs, _ = matrix.shape
    quantised = _quantised(matrix, np.ones(1) if clips is None else clips)
    means = np.stack((seen, read.samples.mean(axis=1))).reshape(2, groups, inputs)
    moved: Floats = np.einsum("goit,gi->go", quantised, means[0]) - np.einsum("goit,gi->go", matrix, means[1])
    return moved.ravel()


def _channel_noise(read: LayerInput, scale: float) -> Floats:
    """Mean squared error of each input channel at one int8 scale, (channels,)."""
    steps = np.clip(np.rint(read.samples / scale), -QMAX, QMAX)
    noise: Floats = np.square(steps * scale - read.samples).mean(axis=1)
    return noise


def _by_input(matrix: Floats) -> Floats:
    """Sum of w**2 over what reads each input channel, (channels,)."""
    gains: Floats = np.square(matrix).sum(axis=(1, 3)).ravel()
    return gains


def _weight_errors(matrix: Floats, variance: Floats, clips: Floats) -> Floats:
    """Output noise per output channel, (outputs,)."""
    groups, _, inputs, _ = matrix.shape
    squared = np.square(_quantised(matrix, clips) - matrix).sum(axis=3)
    noise: Floats = np.einsum("goi,gi->go", squared, variance.reshape(groups, inputs))
    return noise.ravel()


def _quantised(matrix: Floats, clips: Floats) -> Floats:
    amax = np.abs(matrix).max(axis=(2, 3), keepdims=True) * np.broadcast_to(
        clips, matrix.shape[0] * matrix.shape[1]
    ).reshape(*matrix.shape[:2], 1, 1)
    scales = np.maximum(amax / QMAX, MIN_SCALE)
    quantised: Floats = np.clip(np.rint(matrix / scales), -QMAX, QMAX) * scales
    return quantised
