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

_NULL = np.array(None, object)


@dataclass(frozen=True, eq=False)
class RawOutputs(Answer):
    """Hold the outputs of one image.

    Args:
        outputs: By name, of a batch of one.
        least_db: What every output has to reach to count as faithful.
    """

    outputs: Mapping[str, Array]
    least_db: float = 20.0

    @property
    def nbytes(self) -> int:
        return sum(output.nbytes for output in self.outputs.values())

    def fidelity(self, reference: RawOutputs) -> float:
        """Return 1 when every output reaches `least_db`, else 0."""
        return float(sqnr_db(self.outputs, reference.outputs) >= self.least_db)

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


def _values(output: Array) -> list[Any]:
    finite = np.isfinite(output)
    values: list[Any] = (output if finite.all() else np.where(finite, output.astype(object), _NULL)).tolist()
    return values
