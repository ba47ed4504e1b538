"""Propose repairs for layers that lose too much in INT8, from what they read and give, channel by channel.

A calibration's histograms are per tensor, but repairs and sensitivities depend on single channels. So for planning
`observe_channels` runs a few frames once more, on the embedded runtime, and keeps a sample of the values.
`propose_repairs` then tries the families of repairs in turn on every layer; calibrate/repair.py has the arithmetic.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, numpy_helper

from calibrate.histogram import merge_all
from calibrate.plan import Numbers, Repairs
from calibrate.repair import (
    Equalisation,
    Extremes,
    LayerInput,
    activation_noise,
    best_clips,
    equalisation,
    output_shift,
    weight_noise,
)
from calibrate.scale import activation_scale
from calibrate.threshold import histogram_amax
from engines.calibration import Calibration
from engines.graph.signs import never_negative
from engines.graph.taps import element_counts, expose
from engines.graph.topology import Topology, number
from engines.graph.weights import by_input, channels_first, coverage, groups, to_matrix
from engines.interface import Array, Backend, Progress, silent
from engines.quantise.equalise import can_divide, can_offset, equalised_name, is_free, takes_bias
from engines.quantise.placement import Placement, ScaleGroup

FAMILIES = ("methods", "divisors", "clips", "shifts")
METHODS = ("entropy", "mse", "percentile:99.99", "max")  # a tensor may get one of these instead of the calibration's
_SAMPLES = 1 << 16  # per tensor, over all its channels. More: slower, and hardly better repairs.
_FEWEST_SAMPLES = 256  # per channel
_CONSTANT = 1e-12  # share of the power: less is the rounding of float32, not a variance
_PASS_BYTES = 256 << 20  # exposed tensors at a time: a board shares its memory with the camera
# A repair is kept if it brings the noise below this share of what it was. Larger: repairs by chance, or not worth their
# price.
_BETTER_THRESHOLD = 0.9  # chance alone makes one method a little better than another
_BETTER_FREE = 0.8
_BETTER_PAID = 0.5  # 3 dB, for a multiplication that the layer would not need
_BETTER_CENTRED = 0.8  # share of the noise with divisors alone, which cost a multiplication too
_BETTER_WEIGHTS = 0.95
# Headroom may raise the network's predicted noise by this multiple, shared equally among the divided layers.
_HEADROOM_PRICE = 2.0
_LEAST_SHARE = 0.005  # share of the network's predicted noise: layers with less are left alone
_LEAST_SHIFT = 0.02  # share of the layer's noise: smaller shifts are left alone


@dataclass(frozen=True)
class LayerStatistics:
    """A layer's input, and the variance of each of its output channels, (outputs,).

    A product of two activations is described as one channel. other: its second operand. terms: of which each of its
    outputs is the sum.
    """

    read: LayerInput
    variance: NDArray[np.float64]
    other: LayerInput | None = None
    terms: float = 1.0


def observe_channels(
    reference: ModelProto,
    layers: Sequence[NodeProto],
    frames: Sequence[Array],
    runtime: Backend,
    progress: Progress = silent,
    pass_bytes: int = _PASS_BYTES,
) -> dict[str, LayerStatistics]:
    """Run the frames, network inputs (1, C, H, W), and keep statistics of every layer's input and output.

    layers: convolutions and matrix products with constant weights, and matrix products of two activations.
    The frames are run several times where one pass would expose tensors of more than `pass_bytes`, at least a layer's.

    Layers that read one tensor share its samples. Raises EngineError as the runtime does.
    """
    statistics: dict[str, LayerStatistics] = {}
    constants = Topology(reference).initializers
    exposed = {
        node.name: [name for name in (*node.input[:2], node.output[0]) if name not in constants] for node in layers
    }
    for part in _passes(reference, layers, exposed, frames[0].shape, pass_bytes):
        tensors = tuple(dict.fromkeys(name for node in part for name in exposed[node.name]))
        with closing(runtime.load(expose(reference, tensors).SerializeToString())) as engine:
            collectors = {
                node.name: _Collector(node, len(frames))
                if node.input[1] in constants
                else _ProductCollector(node, len(frames))
                for node in part
            }
            for number, frame in enumerate(frames):
                seen = {engine.inputs[0].name: frame, **engine.infer(frame)}
                for collector in collectors.values():
                    collector.add(seen)
                done = (len(statistics) + len(part) * (number + 1) / len(frames)) / len(layers)
                progress(done, "looking at the channels of every layer")
        statistics |= {name: collector.statistics() for name, collector in collectors.items()}
    return statistics


def _passes(
    reference: ModelProto,
    layers: Sequence[NodeProto],
    exposed: Mapping[str, Sequence[str]],
    shape: Sequence[int],
    pass_bytes: int,
) -> Iterator[list[NodeProto]]:
    """Yield the layers in parts whose tensors, `exposed` by layer, fit into memory together."""
    names = [name for node in layers for name in exposed[node.name]]
    inputs = Topology(reference).inputs
    sizes: Mapping[str, int | None] = element_counts(reference, shape, [n for n in names if n not in inputs])
    part: list[NodeProto] = []
    taken = 0
    for node in layers:
        need = sum(4 * (sizes.get(name) or prod(shape)) for name in exposed[node.name])
        if part and taken + need > pass_bytes:
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
        samples = max(_FEWEST_SAMPLES, _SAMPLES // len(read)) // self._frames + 1
        chosen = self._random.integers(0, read.shape[1], min(samples, read.shape[1]))
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


class _ProductCollector:
    """Statistics of a product of two activations in the making; the sizes may change from frame to frame."""

    def __init__(self, node: NodeProto, frames: int) -> None:
        self._node = node
        self._samples = _SAMPLES // frames + 1
        self._random = np.random.default_rng(0)
        self._operands: tuple[list[NDArray[np.float32]], ...] = ([], [])
        self._moments: list[tuple[float, float, int]] = []

    def add(self, tensors: Mapping[str, Array]) -> None:
        for name, samples in zip(self._node.input, self._operands, strict=True):
            values = tensors[name].ravel()
            ends = np.array([values.min(), values.max()], np.float32)
            samples.append(np.concatenate((ends, self._random.choice(values, min(self._samples, values.size)))))
        given = tensors[self._node.output[0]].astype(np.float64)
        self._moments.append((given.mean(), np.square(given).mean(), tensors[self._node.input[0]].shape[-1]))

    def statistics(self) -> LayerStatistics:
        mean, power, terms = np.mean(np.array(self._moments), axis=0)
        read, other = (np.concatenate(samples)[np.newaxis] for samples in self._operands)
        inputs = [LayerInput(values, values.min(axis=1), values.max(axis=1)) for values in (read, other)]
        return LayerStatistics(inputs[0], np.maximum([power - mean**2], 0.0), inputs[1], float(terms))


@dataclass
class RepairedLayer:
    """One layer under repair. Noise is in its output's units squared, `signal` the sum of its outputs' variances.

    Both as if all taps met in every output, which `coverage` of them do. A product of two activations is two of them,
    one for each operand: the other one takes the place of the weights, with its own noise.
    """

    node: NodeProto
    matrix: NDArray[np.float64]
    read: LayerInput
    signal: float
    scale: float
    tensor: str
    has_weights: bool = True
    clips: NDArray[np.float64] = field(default_factory=lambda: np.ones(1))
    notes: list[str] = field(default_factory=list)

    @property
    def noise(self) -> float:
        weights = weight_noise(self.matrix, self.read.variance, self.clips) if self.has_weights else 0.0
        return activation_noise(self.matrix, self.read, self.scale) + weights

    @property
    def nsr(self) -> float:
        """Noise to signal at its output when it alone is INT8, predicted; a silent layer has none."""
        return self.noise / self.signal if self.signal > 0.0 else 0.0

    def equalise(self, better: Equalisation, note: str) -> None:
        """Read the input divided and offset from now on, under a scale of its own."""
        self.notes = [note]
        self.matrix = self.matrix * by_input(better.divisors, self.matrix)
        self.read = self.read.scaled(better.divisors, better.offsets)
        self.scale = activation_scale(better.amax, equalised_name(self.node.name), self.read.is_unsigned)


Equalisations = dict[tuple[str, bool], tuple[Equalisation, ...]]  # by layer, and whether centred; for each of HEADROOMS


@dataclass(frozen=True)
class Proposal:
    """Repairs; per layer the predicted noise to signal before and after them, and notes in words.

    loudest: per layer the tensor that makes most of the noise before them.
    """

    repairs: Repairs
    before: Mapping[str, float]
    after: Mapping[str, float]
    notes: Mapping[str, tuple[str, ...]]
    loudest: Mapping[str, str]


def propose_repairs(
    master: ModelProto,
    placement: Placement,
    calibration: Calibration,
    statistics: Mapping[str, LayerStatistics],
    families: Collection[str] = FAMILIES,
    known: Equalisations | None = None,
    unsigned: bool = False,
) -> Proposal:
    """Propose repairs for every layer that reads a tensor under a scale of ours.

    statistics: as `observe_channels` returns them.
    families: the kinds of repairs that may be proposed.
    known: a dictionary to share between proposals from the same statistics: most of the work is the same in all.
    unsigned: as for `insert_qdq`.
    """
    shared = {} if known is None else known
    return _RepairSearch(master, placement, calibration, statistics, shared, unsigned).proposal(families)


class _RepairSearch:
    """The layers of one model, repaired step by step. known: equalisations, which depend on no other repair."""

    def __init__(
        self,
        master: ModelProto,
        placement: Placement,
        calibration: Calibration,
        statistics: Mapping[str, LayerStatistics],
        known: Equalisations,
        unsigned: bool,
    ) -> None:
        self.topology = Topology(master)
        self.unsigned = never_negative(self.topology) if unsigned else set()
        self.calibration = calibration
        self.known = known
        self.groups = {tensor: group for group in placement.groups for tensor in group.tensors}
        nodes = [node for node in self.topology.nodes if node.name in statistics and self._is_scaled(node.input[0])]
        self.layers = {
            node.name: self._layer(node, statistics[node.name]) for node in nodes if node.name in placement.weights
        }
        self.operands = [
            operand
            for node in nodes
            if node.name in placement.products and self._is_scaled(node.input[1])
            for operand in self._operands(node, statistics[node.name])
        ]
        self.readers = [*self.layers.values(), *self.operands]
        self.before = self._noise()
        self.loudest = {reader.node.name: reader.tensor for reader in sorted(self.readers, key=lambda each: each.nsr)}
        total = sum(self.before.values())
        self.loud = [reader for reader in self.readers if self.before[reader.node.name] >= _LEAST_SHARE * total]

    def _noise(self) -> dict[str, float]:
        """Return the noise to signal of each layer as it stands; that of a product comes from both operands."""
        noise: dict[str, float] = {}
        for reader in self.readers:
            noise[reader.node.name] = noise.get(reader.node.name, 0.0) + reader.nsr
        return noise

    def proposal(self, families: Collection[str]) -> Proposal:
        methods = self._thresholds() if "methods" in families else {}
        divided = self._equalise() if "divisors" in families else Repairs()
        clips = self._clip() if "clips" in families else {}
        shifts = self._shifts() if "shifts" in families else {}
        # Tensors that some layer still reads as they are.
        read = {layer.tensor for name, layer in self.layers.items() if name not in divided.divisors}
        read |= {operand.tensor for operand in self.operands}
        used = {tap: method for group, method in methods.items() if read & {*group.tensors} for tap in group.taps}
        repairs = replace(divided, methods=used, clips=clips, shifts=shifts)
        notes: dict[str, tuple[str, ...]] = {}
        for reader in self.readers:
            known = notes.get(reader.node.name, ())
            notes[reader.node.name] = (*known, *(note for note in reader.notes if note not in known))
        noted = {name: each for name, each in notes.items() if each}
        return Proposal(repairs, self.before, self._noise(), noted, self.loudest)

    def _is_scaled(self, tensor: str) -> bool:
        """Return True if a tensor is under a scale of ours. Some have none: their readers stay float."""
        return tensor in self.groups and self.calibration.amax.keys() >= set(self.groups[tensor].taps)

    def _layer(self, node: NodeProto, seen: LayerStatistics) -> RepairedLayer:
        matrix = to_matrix(node, numpy_helper.to_array(self.topology.initializers[node.input[1]]))
        if node.op_type == "Gemm":
            matrix = matrix * number(node, "alpha", 1.0)
        signal = float(seen.variance.sum()) / coverage(node)
        return self._reading(node, node.input[0], matrix, seen.read, signal)

    def _operands(self, node: NodeProto, seen: LayerStatistics) -> list[RepairedLayer]:
        """Return both operands of a product; an error of one meets the root mean square of the other, in each term."""
        assert seen.other is not None, "a product has two operands"
        powers = [float(np.square(each.samples, dtype=np.float64).mean()) for each in (seen.other, seen.read)]
        signal = float(seen.variance.sum())
        return [
            replace(
                self._reading(node, tensor, np.full((1, 1, 1, 1), np.sqrt(seen.terms * power)), read, signal),
                has_weights=False,
            )
            for tensor, power, read in zip(node.input, powers, (seen.read, seen.other), strict=True)
        ]

    def _reading(
        self, node: NodeProto, tensor: str, matrix: NDArray[np.float64], seen: LayerInput, signal: float
    ) -> RepairedLayer:
        """Return what reads a tensor under its scale as it was calibrated."""
        amax = max(self.calibration.amax[tap] for tap in self.groups[tensor].taps)
        read = replace(seen, is_unsigned=tensor in self.unsigned)
        return RepairedLayer(node, matrix, read, signal, activation_scale(amax, tensor, read.is_unsigned), tensor)

    def _thresholds(self) -> dict[ScaleGroup, str]:
        """Return per group the method of least noise behind the weights that read it, if that is clearly less.

        A calibration with the scales of another tool may have no histograms; it keeps these scales.
        """
        chosen: dict[ScaleGroup, str] = {}
        loud = {reader.tensor for reader in self.loud}
        for group in dict.fromkeys(self.groups[tensor] for tensor in sorted(loud)):
            readers = [reader for reader in self.readers if reader.tensor in group.tensors]
            members = [self.calibration.histograms[tap] for tap in group.taps if tap in self.calibration.histograms]
            if not members:
                continue
            seen = merge_all(members, members[0].bits)
            amax = {method: histogram_amax(seen, method) for method in METHODS}
            is_unsigned = readers[0].read.is_unsigned
            scales = {method: activation_scale(amax[method], group.taps[0], is_unsigned) for method in METHODS}
            noise = {method: _noise_to_signal(readers, scale) for method, scale in scales.items()}
            best = min(noise, key=noise.__getitem__)
            if noise[best] < _BETTER_THRESHOLD * _noise_to_signal(readers, readers[0].scale):
                chosen[group] = best
                for layer in readers:
                    layer.scale = scales[best]
                    layer.notes.append(f"threshold {best}")
        return chosen

    def _equalise(self) -> Repairs:
        """Return divisors and offsets per layer, and the range of its new input."""
        ways = {name: ways for name, layer in self.layers.items() if (ways := self._equalised(layer))}
        left = sum(
            ways[name][-1].noise / layer.signal if name in ways else layer.nsr for name, layer in self.layers.items()
        )
        price = _HEADROOM_PRICE * left / max(len(ways), 1)
        divisors, offsets = dict[str, Numbers](), dict[str, Numbers]()
        ranges, reach = dict[str, float](), dict[str, float]()
        for name, found in ways.items():
            layer = self.layers[name]
            better = next(each for each in found if each.noise - found[-1].noise <= price * layer.signal)
            if (layer.noise - better.noise) / layer.signal < _LEAST_SHARE * left:
                continue
            divisors[name], tensor = tuple(better.divisors.tolist()), equalised_name(name)
            ranges[tensor], reach[tensor] = better.amax, better.reach
            if better.offsets.any():
                offsets[name] = tuple(better.offsets.tolist())
                layer.equalise(better, "equalised and centred")
            else:
                layer.equalise(better, f"equalised{', free' if is_free(self.topology, layer.node) else ''}")
        return Repairs(divisors, offsets, ranges, reach)

    def _equalised(self, layer: RepairedLayer) -> list[Equalisation]:
        """Return the equalisations of a layer that are worth their price, that of most headroom first.

        There is none without extremes: the range of a divided tensor does not follow from what a few frames show.
        """
        extremes = self.calibration.extremes.get(layer.node.name)
        if extremes is None or not extremes.any() or layer.signal == 0.0 or not layer.read.amax.any():
            return []
        if not (can_divide(self.topology, layer.node) and _has_scale_per_output(layer.node)):
            return []
        free, plain = is_free(self.topology, layer.node), layer.noise
        ways = [self._equalisation(layer, extremes, centred=False)]
        if can_offset(self.topology, layer.node):
            ways.append(self._equalisation(layer, extremes, centred=True))
        found = []
        for divided, *others in zip(*ways, strict=True):
            noise, best = plain, None
            if divided.noise < (_BETTER_FREE if free else _BETTER_PAID) * noise:
                noise, best = divided.noise, divided
            for centred in others:
                if centred.noise < (_BETTER_CENTRED if best and not free else _BETTER_PAID) * noise:
                    best = centred
            if best is not None:
                found.append(best)
        return found

    def _equalisation(self, layer: RepairedLayer, extremes: Extremes, centred: bool) -> tuple[Equalisation, ...]:
        key = (layer.node.name, centred)
        if key not in self.known:
            self.known[key] = equalisation(layer.matrix, layer.read, extremes, centred)
        return self.known[key]

    def _clip(self) -> dict[str, Numbers]:
        """Return per layer the fraction of its largest weight that each output channel's scale reaches."""
        clips: dict[str, Numbers] = {}
        for layer in self.loud:
            if not layer.has_weights:
                continue
            if len(self.topology.readers(layer.node.input[1])) > 1 or not _has_scale_per_output(layer.node):
                continue  # one INT8 weight serves all its readers
            best = best_clips(layer.matrix, layer.read.variance)
            unclipped = layer.noise
            layer.clips = best
            if layer.noise < _BETTER_WEIGHTS * unclipped:
                clips[layer.node.name] = tuple(best.tolist())
                layer.notes.append(f"weights clipped in {int((best < 1.0).sum())} of {best.size} channels")
            else:
                layer.clips = np.ones(1)
        return clips

    def _shifts(self) -> dict[str, Numbers]:
        """Return per layer the shift of each output that its bias has to take back."""
        shifts: dict[str, Numbers] = {}
        for layer in self.layers.values():
            if not (takes_bias(self.topology, layer.node) and _has_scale_per_output(layer.node)):
                continue
            share = coverage(layer.node)
            shift = share * output_shift(layer.matrix, layer.read, layer.scale, layer.clips)
            if np.square(shift).sum() > _LEAST_SHIFT * share * layer.noise:
                shifts[layer.node.name] = tuple(shift.tolist())
                layer.notes.append("bias corrected")
        return shifts


def _noise_to_signal(readers: list[RepairedLayer], scale: float) -> float:
    """Return the sum over a tensor's readers of noise to signal by its activations; silent readers do not count."""
    active = [layer for layer in readers if layer.signal > 0.0]
    return sum(activation_noise(layer.matrix, layer.read, scale) / layer.signal for layer in active)


def _has_scale_per_output(node: NodeProto) -> bool:
    """Return False if ONNX has the outputs of all groups on one axis of the weight: see `channel_axis`."""
    return node.op_type != "ConvTranspose" or groups(node) == 1
