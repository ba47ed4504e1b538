"""How the GPU benchmark times: samples in turns, behind a gate that keeps the host's own pace out of the figure."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

Run = Callable[[int], object]  # given its number within a sample

_BUDGET_MS = 1000.0  # time of each contender in each case, once it has had its first sample
_LONGEST_GATE = 32  # copies; some 30 ms on an H200, in which a host queues a thousand calls


class Clock(Protocol):
    def milliseconds(self, run: Run, times: int, gate: int) -> tuple[float, bool]:
        """See CudaDevice."""
        ...


@dataclass(frozen=True)
class Speed:
    """ahead: whether the host had queued everything before the GPU got to it; if not, its pace is in the figure."""

    gbps: float
    ahead: bool = True

    def text(self, digits: int = 0) -> str:
        return f"{self.gbps:.{digits}f}{'' if self.ahead else '*'}"


class Contender:
    """Who is timed, `times` runs to a sample, behind a gate as long as it turns out to need.

    One that no gate is long enough for, because its calls wait for the GPU, is timed without: at the host's pace.
    """

    def __init__(self, run: Run, times: int = 1) -> None:
        self._run, self._times, self._gate = run, times, 1
        self._samples: list[float] = []

    @property
    def ahead(self) -> bool:
        return self._gate > 0

    @property
    def median_ms(self) -> float:
        return float(np.median(self._samples))

    @property
    def spent_ms(self) -> float:
        return sum(self._samples) * self._times

    def speed(self, nbytes: int) -> Speed:
        return Speed(nbytes / self.median_ms / 1e6, self.ahead)

    def sample(self, clock: Clock) -> None:
        while True:
            milliseconds, ahead = clock.milliseconds(self._run, self._times, self._gate)
            if ahead or not self.ahead:
                self._samples.append(milliseconds)
                return
            self._lengthen_gate()

    def _lengthen_gate(self) -> None:
        self._gate *= 2
        if self._gate > _LONGEST_GATE:
            self._gate = 0
            self._samples.clear()  # one figure, one rule


def take_turns(clock: Clock, contenders: Sequence[Contender], rounds: int) -> None:
    """Sample by sample, so that a GPU that changes its clocks changes them for all. Who is slow has fewer samples."""
    for _ in range(rounds):
        for contender in contenders:
            if contender.spent_ms < _BUDGET_MS:
                contender.sample(clock)


def median_wall_ms(call: Callable[[], object], rounds: int) -> float:
    waited = []
    for _ in range(rounds):
        started = time.perf_counter()
        call()
        waited.append((time.perf_counter() - started) * 1e3)
    return float(np.median(waited))
