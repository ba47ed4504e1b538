"""The task raw: outputs that no decoder here reads. They are judged by the noise of their channels.

An output may hold values of several kinds, e.g. coordinates in pixels beside scores below one. Its power is then that
of the largest kind, and hides noise in all others. So each channel is judged by the level of its own kind, and the
worst kind decides: the one channel of scores counts as much as the fifty of key points beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

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
_MOST_COLUMNS, _LEAST_ROWS = 8, 4  # a table that is written as one vector has so many
_MOST_OBLONG = 20.0  # sides of a map of one channel; a longer one is a table


class ChannelNoise(NamedTuple):
    """The noise of the channels of one output.

    Args:
        sqnr_db: float64 (channels,), signal to quantisation noise.
        kinds: int (channels,), equal for channels of one kind.
    """

    sqnr_db: NDArray[np.float64]
    kinds: NDArray[np.intp]

    def share_above(self, least_db: float) -> float | None:
        """Return the share of channels that reach a bound, of the kind where it is least; None without channels."""
        judged = ~np.isnan(self.sqnr_db)
        if not judged.any():
            return None
        counts = np.bincount(self.kinds[judged])
        faithful = np.bincount(self.kinds[judged], self.sqnr_db[judged] >= least_db)
        return float((faithful[counts > 0] / counts[counts > 0]).min())


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
        """Return the share of channels that reach `least_db`, of the output and the kind in which it is least.

        It is None where no output can be judged: see `channel_noise`.
        """
        shares = (noise.share_above(self._bounds[name]) for name, noise in self._noise(reference).items())
        return min((share for share in shares if share is not None), default=None)

    def sqnr_by_part(self, reference: RawOutputs) -> Mapping[str, float]:
        """Return that of each channel that is judged: `scores[5]`, or `scores` of a single one."""
        return {
            name if len(noise.kinds) == 1 else f"{name}[{number}]": db
            for name, noise in self._noise(reference).items()
            for number, db in enumerate(noise.sqnr_db.tolist())
            if not np.isnan(db)
        }

    @property
    def _bounds(self) -> Mapping[str, float]:
        return self.least_db if isinstance(self.least_db, Mapping) else dict.fromkeys(self.outputs, self.least_db)

    def _noise(self, reference: RawOutputs) -> Mapping[str, ChannelNoise]:
        return {name: channel_noise(self.outputs[name], reference.outputs[name]) for name in self._bounds}

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


def channel_noise(served: Array, reference: Array) -> ChannelNoise:
    """Return the signal to quantisation noise of each channel of one output.

    The signal of a channel is the mean power of its kind: of the channels whose power in the reference is alike. So a
    class that is not in a frame, whose scores are next to zero, is judged by those that are. Integers, such as classes,
    are one channel, whose noise is the share of values that differ.

    There are no channels where the shapes differ, and of a vector that cannot be judged: see `_columns`. The value is
    NaN for a channel without signal and noise. Values that are not finite, and were so in the reference, count as
    equal; others are -inf, as is noise without signal.
    """
    none = ChannelNoise(np.empty(0), np.empty(0, np.intp))
    if served.shape != reference.shape or not reference.size:
        return none  # the number of rows is the number of objects, which may come in any order
    if reference.dtype.kind != "f":
        differing = (served != reference).mean()
        with np.errstate(divide="ignore"):
            return ChannelNoise(np.array([-10.0 * np.log10(differing)]), np.zeros(1, np.intp))
    axis = channel_axis(reference.shape)
    if axis is None:
        columns = _columns(reference.ravel().astype(np.float64))
        if columns is None:
            return none
        served, reference, axis = served.reshape(-1, columns), reference.reshape(-1, columns), 1
    others = tuple(each for each in range(reference.ndim) if each != axis)
    expected = reference.astype(np.float64)
    same = (served == expected) | (np.isnan(served) & np.isnan(expected))
    with np.errstate(all="ignore"):
        squares = np.where(same, 0.0, np.square(served - expected))
    squares[np.isnan(squares)] = np.inf
    noise = squares.mean(others)
    signal, kinds = _kinds(expected, others)
    levels = np.bincount(kinds, signal) / np.bincount(kinds)
    with np.errstate(divide="ignore", invalid="ignore"):
        sqnr_db = 10.0 * (np.log10(levels[kinds]) - np.log10(noise))
    return ChannelNoise(np.where((signal > 0.0) | (noise > 0.0), sqnr_db, np.nan), kinds)


def channel_axis(shape: Sequence[int]) -> int | None:
    """Return the axis of an output's channels; None for a vector.

    Nothing states it. A map has the axis first or last, whichever leaves the squarer map. A table, with or without a
    batch, has fewer columns than rows. With more axes it is the last, as in the heads of YOLOv5: (batch, anchors, H, W,
    values).

    >>> channel_axis((1, 84, 8400)), channel_axis((300, 6)), channel_axis((1, 12, 360, 480))
    (1, 1, 1)
    >>> channel_axis((1, 64, 64, 39)), channel_axis((1, 5, 1, 8400)), channel_axis((1, 1, 195))
    (3, 1, None)
    """
    longer = [axis for axis, side in enumerate(shape) if side > 1]
    if len(longer) < 2:
        return None
    if len(shape) > 4:
        return len(shape) - 1
    if len(shape) == 4:
        sides = {1: shape[2:], 3: shape[1:3]}
        oblong = {axis: max(each) / max(min(each), 1) for axis, each in sides.items()}
        axis = min(oblong, key=lambda each: oblong[each])
        if len(longer) > 2 or (min(sides[axis]) > 1 and oblong[axis] <= _MOST_OBLONG):
            return axis
    return min(longer, key=lambda axis: (shape[axis], -axis))


def _columns(values: NDArray[np.float64]) -> int | None:
    """Return how many columns a vector (n,) has, as a table that is written row by row: 1, as far as nothing shows it.

    Values of two kinds show it, as x, y and a score of one key point after another do. It is None where single values
    are of two kinds, as those of a box and its score: one is next to zero by chance, or it means something else.
    Probabilities are of one kind, however small some are.
    """
    if _are_shares(values, (0,)):
        return 1
    for columns in range(2, _MOST_COLUMNS + 1):
        rows, rest = divmod(values.size, columns)
        if rest == 0 and rows >= _LEAST_ROWS and _kinds(values.reshape(rows, columns), (0,))[1].any():
            return columns
    powers = np.square(values[np.isfinite(values)])
    return None if _falling(powers[powers > 0.0])[1].any() else 1


def _kinds(values: NDArray[np.float64], others: tuple[int, ...]) -> tuple[NDArray[np.float64], NDArray[np.intp]]:
    """Return the mean power of each channel, and the number of its kind.

    Channels of values in [0, 1] alone are no kind with others. Those of one kind have powers that follow each other
    closely. A channel without a signal is of the kind with the least power.

    others: the axes other than that of the channels.
    """
    powers = np.square(np.where(np.isfinite(values), values, 0.0)).mean(others).ravel()
    kinds = np.zeros(len(powers), np.intp)
    has_signal, are_shares = powers > 0.0, _are_shares(values, others)
    count = 0
    for channels in (np.flatnonzero(has_signal & are_shares), np.flatnonzero(has_signal & ~are_shares)):
        if len(channels):
            order, numbers = _falling(powers[channels])
            kinds[channels[order]] = count + numbers
            count += int(numbers[-1]) + 1
    if has_signal.any():
        kinds[~has_signal] = kinds[np.where(has_signal, powers, np.inf).argmin()]
    return powers, kinds


def _falling(powers: NDArray[np.float64]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the order of positive powers, the largest first, and a number that rises where they drop by `_KIND_DB`."""
    order = np.argsort(-powers)
    drops = 10.0 * np.log10(powers[order][:-1] / powers[order][1:]) > _KIND_DB
    return order, np.cumsum(np.concatenate(([0], drops)).astype(np.intp)[: len(order)])


def _are_shares(values: NDArray[np.float64], axes: tuple[int, ...]) -> NDArray[np.bool_]:
    """Return where all values along these axes that are finite lie in [0, 1], as probabilities do."""
    with np.errstate(invalid="ignore"):
        beyond = np.isfinite(values) & ((values < 0.0) | (values > 1.0))
    return ~beyond.any(axes).ravel()


def _values(output: Array) -> list[Any]:
    finite = np.isfinite(output)
    values: list[Any] = (output if finite.all() else np.where(finite, output.astype(object), _NULL)).tolist()
    return values
