"""Which frames the observer looks at, and which of them are set aside to judge a candidate."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

from calibrate.histogram import AbsHistogram, merge_into, nbytes
from engines.backend import Array

HELD_OUT_EVERY = 4  # one taken frame in so many goes to the held-out set instead of the histograms
# Held-out frames in a row, in the beginning and at most: soon there are some, and later most have no neighbour that
# calibrates.
_STRETCH, _LONGEST_STRETCH = 4, 16
_STRETCH_SHARE = 16  # a stretch is one part in so many of all frames so far

_SILENT_S, _GAPS = 2.0, 3.0  # after which a camera is passed over, or so many times what it took last

T = TypeVar("T")


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


class Rota:
    """Whose frame is observed next: cameras take turns, and one that delivers nothing keeps nobody waiting.

    `now_ts` is the capture time that they have in common. Of recordings each has a time of its own, so that it goes on
    as theirs do in the mean, and begins at 0.
    """

    def __init__(self, cameras: Sequence[str]) -> None:
        self.now_ts = 0.0
        self._order = deque(cameras)
        self._heard_s: dict[str, float] = {}  # monotonic
        self._gap_s: dict[str, float] = {}
        self._last_ts: dict[str, float] = {}

    def is_turn(self, camera: str, ts: float, now_s: float) -> bool:
        """Whether it is the turn of this camera, which has a frame of capture time `ts` now (monotonic s)."""
        self._gap_s[camera] = now_s - self._heard_s.get(camera, now_s)
        self._heard_s[camera] = now_s
        while self._is_silent(self._order[0], now_s):
            self._order.rotate(-1)
        heard = sum(not self._is_silent(each, now_s) for each in self._order)
        self.now_ts += max(0.0, ts - self._last_ts.get(camera, ts)) / heard
        self._last_ts[camera] = ts
        return self._order[0] == camera

    def observed(self) -> None:
        """A frame of the camera whose turn it was is taken."""
        self._order.rotate(-1)

    def _is_silent(self, camera: str, now_s: float) -> bool:
        patience_s = max(_SILENT_S, _GAPS * self._gap_s.get(camera, 0.0))
        return now_s - self._heard_s.get(camera, -math.inf) > patience_s


class Blocks:
    """Puts observations into blocks of at least `block_s` of capture time: each ends with one, and the next follows it.

    Where observations are rarer, each is a block. A clock that jumps back starts a block anew.
    """

    def __init__(self, block_s: float) -> None:
        self.began_ts = float("inf")  # of the block of the observation that was placed last
        self._block_s = block_s
        self._ends = True  # whether that observation ended it
        self._last_ts = float("inf")

    def place(self, ts: float) -> tuple[bool, bool]:
        """Whether an observation of capture time `ts` is the first of its block, and whether it is the last."""
        jumped = ts < self._last_ts
        first = jumped or self._ends
        if first:
            self.began_ts = ts if jumped else self._last_ts
        self._last_ts = ts
        self._ends = ts - self.began_ts >= self._block_s
        return first, self._ends


class Reservoir(Generic[T]):
    """A uniform sample of fixed size from a stream of unknown length.

    Source: Vitter, "Random Sampling with a Reservoir" (ACM TOMS 1985), algorithm R.
    """

    def __init__(self, size: int) -> None:
        self.kept: list[T] = []
        self._size = size
        self._seen = 0
        self._random = random.Random(0)

    def offer(self, copy: Callable[[], T]) -> None:
        """The next of the stream, which is copied where it is kept."""
        self._seen += 1
        if len(self.kept) < self._size:
            self.kept.append(copy())
            return
        place = self._random.randrange(self._seen)
        if place < self._size:
            self.kept[place] = copy()


class HoldOut:
    """Says which frames of a stream are held out: one in four, in stretches that grow from 4 in a row to 16."""

    def __init__(self) -> None:
        self._seen = self._stretch_at = self._ends_at = 0  # where the stretch begins that is next, and where it ends

    def next(self) -> bool:
        """Whether the next frame is."""
        if self._seen == self._ends_at:
            stretch = min(max(_STRETCH, self._seen // _STRETCH_SHARE), _LONGEST_STRETCH)
            self._ends_at += HELD_OUT_EVERY * stretch
            self._stretch_at = self._ends_at - stretch
        self._seen += 1
        return self._seen > self._stretch_at


class Collection:
    """What the observer has seen in one regime: histograms of many frames, and a few held-out network inputs.

    Held-out frames never enter the histograms: a candidate is not judged on the very frames that it was calibrated
    on, and most of the later ones have no neighbour in time among those either. No other frame is kept. Three quarters
    of them are *telling*, frames on which the reference found something; on the others a candidate may only show that
    it finds nothing either.
    """

    def __init__(self, held_out_size: int) -> None:
        self.histograms: dict[str, AbsHistogram] = {}
        self.frames = 0
        self._telling = Reservoir[Array](held_out_size - held_out_size // 4)
        self._empty = Reservoir[Array](held_out_size // 4)
        self._holds_out = held_out_size > 0
        self._hold_out = {True: HoldOut(), False: HoldOut()}  # by whether telling

    @property
    def telling(self) -> int:
        """Held-out frames on which the reference found something."""
        return len(self._telling.kept)

    @property
    def nbytes(self) -> int:
        """What its histograms take."""
        return nbytes(self.histograms)

    @property
    def held_out(self) -> list[Array]:
        """The held-out network inputs (1, C, H, W), of any sizes, the telling ones first."""
        return self._telling.kept + self._empty.kept

    def add(self, tensor: Array, histograms: Mapping[str, AbsHistogram], telling: bool = True) -> None:
        """Take one observed frame: its network input (1, C, H, W) and its histograms by tap."""
        if self._holds_out and self._hold_out[telling].next():
            (self._telling if telling else self._empty).offer(tensor.copy)
            return
        self.frames += 1
        merge_into(self.histograms, histograms)
