"""Which frames the observer looks at, and which of them are set aside to judge a candidate."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from calibrate.histogram import AbsHistogram, merge

HELD_OUT_EVERY = 4  # one observed frame in so many goes to the held-out set instead of the histograms


class Clock:
    """Says when the next frame is due, in capture time; the gaps are random, so no rhythm of the scene is aliased.

    Gaps are uniform on [0.5, 1.5] periods. A clock that jumps backwards (a file that starts over) starts anew.
    """

    def __init__(self, period_s: float, seed: int = 0) -> None:
        self.period_s = period_s
        self._random = random.Random(seed)
        self._last = float("-inf")
        self._due = float("-inf")

    def due(self, ts: float) -> bool:
        """True when a frame of capture time `ts` should be observed; the next gap then starts at it."""
        if self._last <= ts < self._due:
            self._last = ts
            return False
        self._last = ts
        self._due = ts + self.period_s * self._random.uniform(0.5, 1.5)
        return True

    def change(self, period_s: float) -> None:
        """Change the period from now on; the next frame is due at once."""
        self.period_s = period_s
        self._due = float("-inf")


@dataclass
class Collection:
    """What the observer has seen in one regime: histograms of many frames, and a few held-out network inputs.

    Held-out frames never enter the histograms: a candidate is not judged on the very frames that it was calibrated
    on, though on their neighbours in time. They are a uniform sample over the regime (reservoir sampling, Vitter
    1985); no other frame is kept.
    """

    held_out_size: int
    histograms: dict[str, AbsHistogram] = field(default_factory=dict)
    frames: int = 0
    held_out: list[NDArray[np.float32]] = field(default_factory=list)
    _seen: int = 0
    _held_out_seen: int = 0
    _random: random.Random = field(default_factory=lambda: random.Random(0))

    def add(self, tensor: NDArray[np.float32], histograms: dict[str, AbsHistogram]) -> None:
        """Take one observed frame: its network input (1, C, H, W) and its histograms by tap."""
        self._seen += 1
        if self.held_out_size and self._seen % HELD_OUT_EVERY == 0:
            self._hold_out(tensor)
            return
        self.frames += 1
        for name, histogram in histograms.items():
            known = self.histograms.get(name)
            self.histograms[name] = histogram if known is None else merge(known, histogram)

    def _hold_out(self, tensor: NDArray[np.float32]) -> None:
        self._held_out_seen += 1
        if len(self.held_out) < self.held_out_size:
            self.held_out.append(tensor.copy())
            return
        place = self._random.randrange(self._held_out_seen)
        if place < self.held_out_size:
            self.held_out[place] = tensor.copy()
