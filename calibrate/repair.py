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

_EXPONENTS = (0.5, 0.75, 1.0)  # how much of the difference in range is taken out; the weights take it over
_OCTAVES = 5.0  # how far below the largest value an amax is looked for
_PER_OCTAVE = 4
_NARROWEST = 2.0**-10  # of the widest channel: one that is all but silent need not be blown up further
_CLIPS = np.array([1.0, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6])  # of the largest weight


@dataclass(frozen=True)
class LayerInput:
    """What a layer reads: samples (channels, n), and the largest |x| of each channel, (channels,)."""

    samples: Floats
    amax: Floats

    @property
    def power(self) -> Floats:
        """Mean of x**2 per channel, (channels,)."""
        power: Floats = np.square(self.samples).mean(axis=1)
        return power

    def divided(self, divisors: Floats) -> LayerInput:
        """The same behind an equalisation."""
        return LayerInput(self.samples / divisors[:, np.newaxis], self.amax / divisors)


@dataclass(frozen=True)
class Equalisation:
    """divisors: (channels,), powers of two, so that float results do not change by a bit. amax: of x / divisors.

    noise: of the layer's output, in its units squared, from activations and weights together.
    """

    divisors: Floats
    amax: float
    noise: float


def activation_noise(matrix: Floats, read: LayerInput, scale: float) -> float:
    """Mean squared error of all outputs of a layer together when it reads its input with one int8 scale."""
    steps = np.clip(np.rint(read.samples / scale), -QMAX, QMAX)
    noise = np.square(steps * scale - read.samples).mean(axis=1)
    return float(_by_input(matrix) @ noise)


def weight_noise(matrix: Floats, power: Floats, clips: Floats | None = None) -> float:
    """The same when its weights are int8, a scale per output channel; clips (outputs,) as `best_clips` gives them."""
    return float(_weight_errors(matrix, power, np.ones(1) if clips is None else clips).sum())


def equalisation(matrix: Floats, read: LayerInput) -> Equalisation:
    """The divisors of least noise; they trade the noise of the activations against that of the weights."""
    ranges = np.maximum(read.amax, _NARROWEST * max(float(read.amax.max()), MIN_SCALE))
    found = []
    for exponent in _EXPONENTS:
        divisors = np.exp2(np.rint(exponent * np.log2(ranges / ranges.max())))
        divided = read.divided(divisors)
        scaled = matrix * divisors.reshape(matrix.shape[0], 1, matrix.shape[2], 1)
        amax, noise = best_amax(scaled, divided)
        found.append(Equalisation(divisors, amax, noise + weight_noise(scaled, divided.power)))
    return min(found, key=lambda candidate: candidate.noise)


def best_amax(matrix: Floats, read: LayerInput) -> tuple[float, float]:
    """The amax of least output noise, to within 1/8 octave, and that noise; (0.0, 0.0) for a silent input."""
    largest = float(read.amax.max())
    if largest == 0.0:
        return 0.0, 0.0
    candidates = largest * np.exp2(-np.arange(0.0, _OCTAVES, 1.0 / _PER_OCTAVE))
    noise = [activation_noise(matrix, read, max(amax / QMAX, MIN_SCALE)) for amax in candidates]
    best = int(np.argmin(noise))
    return float(candidates[best]), noise[best]


def best_clips(matrix: Floats, power: Floats) -> Floats:
    """Per output channel (outputs,) how much of its largest weight the scale should reach; 1 is all of it."""
    noise = np.stack([_weight_errors(matrix, power, np.full(1, clip)) for clip in _CLIPS])
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


def _by_input(matrix: Floats) -> Floats:
    """Sum of w**2 over what reads each input channel, (channels,)."""
    gains: Floats = np.square(matrix).sum(axis=(1, 3)).ravel()
    return gains


def _weight_errors(matrix: Floats, power: Floats, clips: Floats) -> Floats:
    """Output noise per output channel, (outputs,)."""
    groups, _, inputs, _ = matrix.shape
    squared = np.square(_quantised(matrix, clips) - matrix).sum(axis=3)
    noise: Floats = np.einsum("goi,gi->go", squared, power.reshape(groups, inputs))
    return noise.ravel()


def _quantised(matrix: Floats, clips: Floats) -> Floats:
    amax = np.abs(matrix).max(axis=(2, 3), keepdims=True) * np.broadcast_to(
        clips, matrix.shape[0] * matrix.shape[1]
    ).reshape(*matrix.shape[:2], 1, 1)
    scales = np.maximum(amax / QMAX, MIN_SCALE)
    quantised: Floats = np.clip(np.rint(matrix / scales), -QMAX, QMAX) * scales
    return quantised
