"""The task raw: outputs that no decoder here reads, as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from agent.vision.answer import Answer, Decoder
from agent.vision.boxes import Size
from agent.vision.spec import ModelSpec
from agent.vision.tasks.task import ModelTask
from engines.interface import Array, TensorSpec

_SILENT = 0.01
# Channels are unlike: in plain INT8 the worst one of ESPNet is 5 dB below the whole output, of FastestDet 10 dB.
_CHANNEL_DB = 10.0
_NULL = np.array(None, object)


@dataclass(frozen=True, eq=False)
class RawOutputs(Answer):
    """Hold the outputs of one image.

    Args:
        outputs: By name, of a batch of one.
        least_db: What every output has to reach to count as faithful; a single channel may have _CHANNEL_DB less.
    """

    outputs: Mapping[str, Array]
    least_db: float = 20.0

    @property
    def is_empty(self) -> bool:
        """True where every value is 0, or there is none: that says nothing of an engine."""
        return not any(output.any() for output in self.outputs.values())

    @property
    def nbytes(self) -> int:
        return sum(output.nbytes for output in self.outputs.values())

    def fidelity(self, reference: RawOutputs) -> float:
        """Return 1 when every output reaches `least_db`, and its channels nearly, else 0.

        The output alone would hide small scores beside large coordinates: all of them could be wrong.
        """
        worst_db = min(
            min(_output_sqnr_db(self.outputs[name], each), _worst_channel_db(self.outputs[name], each) + _CHANNEL_DB)
            for name, each in reference.outputs.items()
        )
        return float(worst_db >= self.least_db)

    def as_dict(self, spec: ModelSpec) -> dict[str, Any]:
        del spec
        return {"outputs": {name: _values(output) for name, output in self.outputs.items()}}

    def summary(self, spec: ModelSpec) -> str:
        del spec
        return ", ".join(f"{name} {list(output.shape)}" for name, output in self.outputs.items())


class Raw(ModelTask):
    """Outputs as they are: nothing says what they mean."""

    has_large_answers: ClassVar[bool] = True

    def open_decoder(self, size: Size, outputs: Sequence[TensorSpec]) -> Decoder:
        del size, outputs
        least_db = self.spec.min_sqnr_db
        return lambda batch: RawOutputs(dict(batch), least_db)


def sqnr_db(served: Mapping[str, Array], reference: Mapping[str, Array]) -> float:
    """Return 10 log10(sum ref^2 / sum (served - ref)^2) in dB, the signal to quantisation noise of the worst output.

    The worst one counts, since pooled outputs would hide a small one behind a large one. No noise at all is +inf;
    noise on an all-zero reference, or noise that is not finite, is -inf.
    """
    return min(_output_sqnr_db(served[name], output) for name, output in reference.items())


def _output_sqnr_db(served: Array, reference: Array) -> float:
    signal = reference.astype(np.float64)
    with np.errstate(all="ignore"):
        noise_power = np.square(served - signal).sum()
        signal_power = np.square(signal).sum()
        if noise_power == 0.0:
            return np.inf
        ratio_db = 10.0 * np.log10(signal_power / noise_power)
    return float(ratio_db) if np.isfinite(noise_power) else -np.inf


def _worst_channel_db(served: Array, reference: Array) -> float:
    """Return the signal to quantisation noise of the worst channel of an output (batch, ...), in dB.

    A channel in which next to nothing is, such as the scores of a class that is not there, is judged as if it held
    _SILENT of the output's largest value, or of 1 where that is larger: scores and probabilities are at most 1.
    """
    signal = reference.astype(np.float64)
    axis = _channel_axis(signal.shape)
    if axis is None or signal.size == 0 or served.shape != signal.shape:
        return np.inf
    others = tuple(each for each in range(signal.ndim) if each != axis)
    with np.errstate(all="ignore"):
        noise_power = np.square(served - signal).mean(axis=others)
        floor = np.square(_SILENT * min(1.0, float(np.abs(signal).max())))
        signal_power = np.maximum(np.square(signal).mean(axis=others), floor)
        ratios = np.divide(signal_power, noise_power, out=np.full(len(noise_power), np.inf), where=noise_power != 0.0)
        worst_db = 10.0 * np.log10(ratios.min())
    return float(worst_db) if np.isfinite(noise_power).all() else -np.inf


def _channel_axis(shape: Sequence[int]) -> int | None:
    """Return which axis of an output (batch, ...) has the channels; None: it has none.

    Of a table it is the shorter one, of a map the first or the last, whichever leaves the squarer map, and of anything
    larger the last.
    """
    if len(shape) < 3:
        return None
    if len(shape) == 3:
        return 1 if shape[1] < shape[2] else 2
    if len(shape) > 4:
        return len(shape) - 1
    sides = {axis: [side for at, side in enumerate(shape) if at not in (0, axis)] for axis in (1, 3)}
    return min(sides, key=lambda axis: max(sides[axis]) / max(min(sides[axis]), 1))


def _values(output: Array) -> list[Any]:
    finite = np.isfinite(output)
    values: list[Any] = (output if finite.all() else np.where(finite, output.astype(object), _NULL)).tolist()
    return values
