"""The task raw: outputs that no decoder here reads. They are judged by the noise of their channels.

An output may hold values of several kinds, e.g. coordinates in pixels beside scores below one. Its power is then that
of the largest kind, and hides noise in all others. So each channel is judged by the level of its own kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from agent.common.errors import ConfigError
from agent.vision.answer import Answer, Decoder
from agent.vision.boxes import Size
from agent.vision.spec import ModelSpec
from agent.vision.tasks.task import ModelTask
from engines.interface import Array, TensorSpec

_NULL = np.array(None, object)
# Channels in the order of their sizes are of another kind from where the power falls by so much. Kinds of values differ
# by more (pixels and scores: 50 dB), classes that are in a frame and others by less from one to the next.
_KIND_DB = 20.0


@dataclass(frozen=True, eq=False)
class RawOutputs(Answer):
    """Hold the outputs of one image.

    Args:
        outputs: By name, of a batch of one.
        least_db: What channels have to reach to count as faithful; by name, of the outputs that are judged.
    """

    outputs: Mapping[str, Array]
    least_db: float | Mapping[str, float] = 20.0

    @property
    def nbytes(self) -> int:
        return sum(output.nbytes for output in self.outputs.values())

    def fidelity(self, reference: RawOutputs) -> float | None:
        """Return the share of channels that reach `least_db`, of the output in which it is least.

        It is None where no output can be judged: see `channel_sqnr_db`.
        """
        judged = {name: db[~np.isnan(db)] for name, db in self._sqnr_db(reference).items()}
        bounds = self._bounds
        return min((float((db >= bounds[name]).mean()) for name, db in judged.items() if db.size), default=None)

    def sqnr_by_part(self, reference: RawOutputs) -> Mapping[str, float]:
        """Return that of each channel that is judged: `scores[5]`, or `scores` of a single vector."""
        return {
            name if len(channels) == 1 else f"{name}[{number}]": db
            for name, channels in self._sqnr_db(reference).items()
            for number, db in enumerate(channels.tolist())
            if not np.isnan(db)
        }

    @property
    def _bounds(self) -> Mapping[str, float]:
        return self.least_db if isinstance(self.least_db, Mapping) else dict.fromkeys(self.outputs, self.least_db)

    def _sqnr_db(self, reference: RawOutputs) -> Mapping[str, NDArray[np.float64]]:
        return {name: channel_sqnr_db(self.outputs[name], reference.outputs[name]) for name in self._bounds}

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
        del size
        least_db = self.spec.min_sqnr_db
        names = [output.name for output in outputs]
        if isinstance(least_db, Mapping) and (unknown := sorted(least_db.keys() - set(names))):
            raise ConfigError(
                "decoder.shape",
                f"min_sqnr_db of {', '.join(unknown)}",
                f"outputs of the model: {', '.join(names)}",
                "name outputs as the model does; one number holds for all of them",
            )
        return lambda batch: RawOutputs(dict(batch), least_db)


def channel_sqnr_db(served: Array, reference: Array) -> NDArray[np.float64]:
    """Return the signal to quantisation noise of each channel of one output, in dB.

    The signal of a channel is the mean power of its kind: of the channels whose power in the reference is alike. So a
    class that is not in a frame, whose scores are next to zero, is judged by those that are. Integers, such as classes,
    are one channel, whose noise is the share of values that differ.

    Returns:
        float64 (channels,): none where the shapes differ, NaN for a channel without signal and noise. Values that are
        not finite, and were so in the reference, count as equal; others are -inf, as is noise without signal.
    """
    if served.shape != reference.shape or not reference.size:
        return np.empty(0)  # the number of rows is the number of objects, which may come in any order
    signal, noise = _powers(served, reference)
    with np.errstate(divide="ignore", invalid="ignore"):
        sqnr_db = 10.0 * (np.log10(_levels_of_kinds(signal)) - np.log10(noise))
    return np.where((signal > 0.0) | (noise > 0.0), sqnr_db, np.nan)


def channel_axis(shape: Sequence[int]) -> int | None:
    """Return the axis of an output's channels; None for a single vector, whose values have nothing to be pooled with.

    Nothing states it. A map has the axis first or last, whichever leaves the squarer map. A table has fewer columns
    than rows. With more axes it is the last, as in the heads of YOLOv5: (batch, anchors, H, W, values).

    >>> channel_axis((1, 84, 8400)), channel_axis((1, 12, 360, 480)), channel_axis((1, 64, 64, 39))
    (1, 1, 3)
    """
    if len(shape) < 3:
        return None
    if len(shape) == 3:
        return 1 if shape[1] < shape[2] else 2
    if len(shape) > 4:
        return len(shape) - 1
    sides = {1: shape[2:], 3: shape[1:3]}
    return min(sides, key=lambda axis: max(sides[axis]) / max(min(sides[axis]), 1))


def _powers(served: Array, reference: Array) -> NDArray[np.float64]:
    """Return the mean power of each channel's reference, and that of its noise: float64 (2, channels)."""
    if reference.dtype.kind != "f":
        return np.array([[1.0], [(served != reference).mean()]])
    expected = reference.astype(np.float64)
    finite = np.isfinite(expected)
    same = (served == expected) | (np.isnan(served) & np.isnan(expected))
    with np.errstate(all="ignore"):
        noise = np.where(same, 0.0, np.square(served - expected))
    noise[np.isnan(noise)] = np.inf
    signal = np.square(np.where(finite, expected, 0.0))
    axis = channel_axis(reference.shape)
    others = tuple(each for each in range(reference.ndim) if each != axis)
    return np.stack([power.mean(others).ravel() for power in (signal, noise)])


def _levels_of_kinds(powers: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the mean power of each channel's kind. A channel without a signal is of the kind with the least power."""
    order = np.argsort(-powers)
    falling = powers[order]
    with np.errstate(divide="ignore", invalid="ignore"):
        drops = (falling[1:] > 0.0) & (10.0 * np.log10(falling[:-1] / falling[1:]) > _KIND_DB)
    kinds = np.concatenate(([0], np.cumsum(drops)))
    levels = np.bincount(kinds, falling) / np.bincount(kinds)
    unsorted = np.empty_like(powers)
    unsorted[order] = levels[kinds]
    return unsorted


def _values(output: Array) -> list[Any]:
    finite = np.isfinite(output)
    values: list[Any] = (output if finite.all() else np.where(finite, output.astype(object), _NULL)).tolist()
    return values
