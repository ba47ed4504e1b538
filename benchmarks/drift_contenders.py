"""Who looks for drift in benchmarks/drift.py: our own judge at two paces, CUSUM, and river's detectors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log2

import numpy as np
from numpy.typing import NDArray

from agent.monitoring.drift import Blocks, RecalibrationEvidence
from agent.monitoring.observation_budget import ObservationBudget
from benchmarks.drift_streams import Floats, gains_db, noises_db
from benchmarks.peers import Worker
from calibrate.statistics.evidence import DriftDetector

TOLERANCE_DB, BLOCK_S, FALSE_ALARMS = 3.0, 3, 1.0  # the defaults of config.yaml
FPS, COST = 30.0, 2.0  # in the budgeted run: the reference takes twice as long as the engine
# Of the time of inference, half of what config.yaml allows: one frame in 100 * COST, as when taps cost as much again.
SHARE = 0.01

Alarms = NDArray[np.float64]  # times in s
Power = tuple[float, int]  # summed over frames, and how many


@dataclass(frozen=True)
class Stream:
    """Levels in octaves (seconds,), the calibrations that are cached, and the method that made them."""

    levels: Floats
    regimes: Sequence[float] = (0.0,)
    method: str = "max"

    @property
    def gains_db(self) -> Floats:
        return gains_db(self.levels, self.regimes, self.method)


Detect = Callable[[Stream], Alarms]  # times in s


class Watched:
    """The evidence of a daemon on a stream. Its newest frames are their signal power; scales follow their level."""

    def __init__(self, stream: Stream) -> None:
        detector = DriftDetector(FALSE_ALARMS, TOLERANCE_DB, BLOCK_S)
        self.evidence: RecalibrationEvidence[Power, float] = RecalibrationEvidence(
            detector, TOLERANCE_DB, _together, _level
        )
        self._curve = _Curve(stream.method)
        self._regimes = stream.regimes

    def alarms(self, block: Sequence[float], seconds: float) -> bool:
        """Take the levels of a block of frames; True for an alarm, which is answered at once."""
        today = [self._noise_db(block, regime) for regime in self._regimes]
        recent = self.evidence.recent.scales
        gain_db = None if recent is None else min(today) - self._noise_db(block, recent)
        power = sum(4.0**level for level in block)
        self.evidence.update((power, len(block)), len(block), seconds, max(0.0, min(today)), gain_db)
        if not self.evidence.detector.drift_detected:
            return False
        self.evidence.detector.reset()
        return True

    def _noise_db(self, block: Sequence[float], level: float) -> float:
        return sum(self._curve.at(each - level) for each in block) / len(block)


def _together(one: Power, other: Power) -> Power:
    return one[0] + other[0], one[1] + other[1]


def _level(power: Power) -> float:
    """Octaves of the RMS of frames, which the scales of all of them together follow."""
    return 0.5 * log2(power[0] / power[1])


class _Curve:
    """`noises_db` by table, for one value at a time."""

    def __init__(self, method: str) -> None:
        self._db: list[float] = noises_db(np.arange(-8.0, 4.0, 1.0 / 128.0), method).tolist()

    def at(self, octaves: float) -> float:
        return self._db[min(max(int((octaves + 8.0) * 128.0 + 0.5), 0), len(self._db) - 1)]


def every_second(stream: Stream) -> Alarms:
    """Ours, in blocks of three observations."""
    watched, levels = Watched(stream), stream.levels.tolist()
    ends = range(BLOCK_S, len(levels) + 1, BLOCK_S)
    return np.array([float(end) for end in ends if watched.alarms(levels[end - BLOCK_S : end], BLOCK_S)])


def budgeted(stream: Stream, inference_s: float = 0.01) -> Alarms:
    """Ours at the pace of the daemon's budget: one observation in 6.7 s, and one a second where it looks closely."""
    budget = ObservationBudget(SHARE, 1.0, 1.0, burst=256)
    watched, blocks = Watched(stream), Blocks(BLOCK_S)
    found, block = [], list[float]()
    for second, level in enumerate(stream.levels.tolist()):
        budget.earn(FPS * inference_s)
        if not budget.due(float(second)):
            continue
        budget.spend(COST * inference_s)
        first, last = blocks.place(float(second))
        block = [level] if first else [*block, level]
        if not last:
            continue
        if watched.alarms(block, second - blocks.started_ts):
            found.append(second + 1.0)
        budget.set_pace(alert=watched.evidence.wants_more_frames)
    return np.array(found)


def cusum(threshold: float, stream: Stream) -> Alarms:
    """One-sided, on what exceeds the tolerance (Page, 1954)."""
    found, total = [], 0.0
    for number, gain in enumerate(_blocks(stream.gains_db).tolist(), start=1):
        total = max(0.0, total + gain - TOLERANCE_DB)
        if total > threshold:
            found.append(float(number * BLOCK_S))
            total = 0.0
    return np.array(found)


def of_river(worker: Worker, name: str, parameter: float, stream: Stream) -> Alarms:
    indices = worker.call("alarms", name, parameter, _blocks(stream.gains_db)).value
    alarms: Alarms = (indices + 1.0) * BLOCK_S
    return alarms


def _blocks(gains: Floats) -> Floats:
    means: Floats = gains[: gains.size // BLOCK_S * BLOCK_S].reshape(-1, BLOCK_S).mean(axis=1)
    return means
