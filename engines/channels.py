"""What the layers of a reference graph read and give, channel by channel, from a few frames.

A calibration's histograms are per tensor. Repairs and sensitivities ask which channels a layer reads, so for planning
a few frames are run once more, on the embedded runtime: only a sample of the values is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto

from calibrate.repair import LayerInput
from engines.backend import Array, Backend, Progress, silent
from engines.layer_weights import channels_first
from engines.taps import element_counts, expose
from engines.topology import Topology

_SAMPLES = 1 << 16  # per tensor, over all its channels
_FEWEST = 256  # per channel
_CONSTANT = 1e-12  # of the power: less is the rounding of float32, not a variance
_PASS_BYTES = 256 << 20  # of exposed tensors at a time: a board shares its memory with the camera


@dataclass(frozen=True)
class LayerStatistics:
    """A layer's input, and the variance of each of its output channels, (outputs,)."""

    read: LayerInput
    variance: NDArray[np.float64]


def observe_channels(
    reference: ModelProto,
    layers: Sequence[NodeProto],
    frames: Sequence[Array],
    runtime: Backend,
    progress: Progress = silent,
) -> dict[str, LayerStatistics]:
    """Run the frames, network inputs (1, C, H, W), and keep what is needed of every layer's input and output.

    Layers that read one tensor share its samples. Raises EngineError as the runtime does.
    """
    found: dict[str, LayerStatistics] = {}
    for part in _passes(reference, layers, frames[0].shape):
        tensors = tuple(dict.fromkeys(name for node in part for name in (node.input[0], node.output[0])))
        with closing(runtime.load(expose(reference, tensors).SerializeToString())) as engine:
            collectors = {node.name: _Collector(node, len(frames)) for node in part}
            for number, frame in enumerate(frames):
                seen = {engine.inputs[0].name: frame, **engine.infer(frame)}
                for collector in collectors.values():
                    collector.add(seen)
                done = (len(found) + len(part) * (number + 1) / len(frames)) / len(layers)
                progress(done, "looking at the channels of every layer")
        found |= {name: collector.statistics() for name, collector in collectors.items()}
    return found


def _passes(reference: ModelProto, layers: Sequence[NodeProto], shape: Sequence[int]) -> Iterator[list[NodeProto]]:
    """The layers in parts whose tensors fit into memory together."""
    names = [name for node in layers for name in (node.input[0], node.output[0])]
    inputs = Topology(reference).inputs
    sizes: Mapping[str, int | None] = element_counts(reference, shape, [n for n in names if n not in inputs])
    part: list[NodeProto] = []
    taken = 0
    for node in layers:
        need = sum(4 * (sizes.get(name) or prod(shape)) for name in (node.input[0], node.output[0]))
        if part and taken + need > _PASS_BYTES:
            yield part
            part, taken = [], 0
        part.append(node)
        taken += need
    if part:
        yield part


class _Collector:
    """One layer's statistics in the making; every frame gives the same number of samples per channel."""

    def __init__(self, node: NodeProto, frames: int) -> None:
        self._node = node
        self._frames = frames
        self._random = np.random.default_rng(0)
        self._samples: list[NDArray[np.float32]] = []
        self._low, self._high = np.full(1, np.inf), np.full(1, -np.inf)
        self._moments = np.zeros(1)

    def add(self, tensors: Mapping[str, Array]) -> None:
        read = channels_first(self._node, tensors[self._node.input[0]], is_input=True)
        given = channels_first(self._node, tensors[self._node.output[0]], is_input=False)
        wanted = max(_FEWEST, _SAMPLES // len(read)) // self._frames + 1
        chosen = self._random.integers(0, read.shape[1], min(wanted, read.shape[1]))
        self._samples.append(read[:, chosen])
        self._low = np.minimum(self._low, read.min(axis=1))
        self._high = np.maximum(self._high, read.max(axis=1))
        power = np.square(given, dtype=np.float64).mean(axis=1)
        self._moments = self._moments + np.stack((given.mean(axis=1, dtype=np.float64), power))

    def statistics(self) -> LayerStatistics:
        mean, power = self._moments / self._frames
        variance = power - np.square(mean)
        variance[variance < _CONSTANT * power] = 0.0
        return LayerStatistics(LayerInput(np.concatenate(self._samples, axis=1), self._low, self._high), variance)
