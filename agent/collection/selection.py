"""Choose the frames of a calibration: enough within a given time, and those first that show something new.

`LumaGrid` is what a frame looks like in a few hundred bytes, enough to recognise near-duplicates. `FrameSelector`
decides for each observed frame whether it is taken, and counts the outcomes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ROWS, COLUMNS = 24, 32
_SAMPLES = 4  # pixels a side that a cell is the mean of, however large the frame
# Luma steps of 255 by which a cell may differ in two frames that show the same. White noise of a standard deviation of
# 10, a camera at night, moves the worst of all cells by less in 99 of 100 pairs; an object as large as a cell that is
# 60 brighter or darker than what is behind it moves one by 15 wherever it stands. Clips:
# tests/agent/collection/test_luma_grid.py.
NEAR = 12

HELD_OUT_EVERY = 4  # one taken frame in so many goes to the held-out set instead of the histograms

BRIGHTNESS_BINS = 8  # over [0, 255]
TAKEN, DUPLICATE, EARLY, BRIGHTNESS, CLASS = "taken", "duplicate", "early", "brightness", "class"
NOTHING, OTHERS = -1, -2  # in place of a class: a frame shows none; classes beyond the most
_REMEMBERED = 128  # taken frames among which a twin is looked for
_BEHIND = 16.0  # frames at most that a pause lets be taken later as they come
_AHEAD = 0.5  # share of the needed frames that may come early, so that half of the time passes in any case
_CROWDED = 1.5  # times its fair share: what has had more is thinned
_FEW = 16  # frames of a kind are never too many
_MOST_CLASSES = 256

Luma = NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class LumaGrid:
    """luma: uint8 (24, 32), of the cells of a frame. brightness: their mean, in [0, 255]."""

    luma: Luma

    @classmethod
    def from_image(cls, image: NDArray[np.uint8]) -> LumaGrid:
        """image: BGR uint8 (H, W, 3), of any size. Takes a quarter of a millisecond, for it reads 12288 pixels only."""
        rows, columns = (
            np.arange(parts * _SAMPLES) * size // (parts * _SAMPLES)  # in a frame of few pixels cells share some
            for parts, size in zip((ROWS, COLUMNS), image.shape[:2], strict=True)
        )
        pixels = image[rows][:, columns].astype(np.uint32)
        weighted = pixels[..., 0] + 2 * pixels[..., 1] + pixels[..., 2]
        cells = weighted.reshape(ROWS, _SAMPLES, COLUMNS, _SAMPLES).sum(axis=(1, 3))
        return cls((cells // (4 * _SAMPLES * _SAMPLES)).astype(np.uint8))

    @property
    def brightness(self) -> float:
        return float(self.luma.mean())

    def distances(self, others: Luma) -> NDArray[np.int16]:
        """Return the largest difference of a cell from each of `others` (n, 24, 32), (n,)."""
        differences: NDArray[np.int16] = np.abs(others.astype(np.int16) - self.luma).max(axis=(1, 2))
        return differences


@dataclass(frozen=True)
class SelectionCounts:
    """Counts of a selection of frames.

    outcomes: All frames by what became of them: TAKEN or the reason why not.
    span_s: Capture time from the first frame to the last.
    brightness: Taken frames per bin.
    classes: Taken frames on which the reference sees a class; NOTHING and OTHERS count as classes.
    """

    outcomes: Counter[str]
    span_s: float
    brightness: tuple[int, ...]
    classes: dict[int, int]

    @property
    def taken(self) -> int:
        return self.outcomes[TAKEN]


class FrameSelector:
    """Take frames on a schedule that collects what is needed within `within_s`, and better ones ahead of it.

    1. A frame that the schedule waits for is taken whatever it shows: a scene in which nothing happens fills a
       calibration as surely as any other.
    2. Ahead of the schedule a frame is taken if it shows something new: it is no near-duplicate of a recent one, and
       its brightness or a class on it has not had more than its share. So duplicates give way to what is rare.
    3. Once enough is taken, the schedule slows down with the time that has passed: an hour more of the same scene adds
       little.
    4. In a hurry all frames are taken but exact repeats.
    """

    def __init__(self, frames: int, within_s: float) -> None:
        """frames: needed in the histograms; those that are held out come on top."""
        self._needed = frames * HELD_OUT_EVERY / (HELD_OUT_EVERY - 1)
        self._within_s = within_s
        self._due = 1.0  # frames that the schedule waits for; negative: taken ahead of it
        self._last_ts: float | None = None
        self._span_s = 0.0
        self._recent: Luma = np.zeros((_REMEMBERED, ROWS, COLUMNS), np.uint8)
        self._outcomes: Counter[str] = Counter()
        self._brightness: Counter[int] = Counter()
        self._classes: Counter[int] = Counter()

    @property
    def nbytes(self) -> int:
        return self._recent.nbytes

    @property
    def counts(self) -> SelectionCounts:
        bins = tuple(self._brightness[place] for place in range(BRIGHTNESS_BINS))
        return SelectionCounts(self._outcomes.copy(), self._span_s, bins, dict(self._classes))

    def consider(self, ts: float, grid: LumaGrid, classes: Collection[int], hurried: bool = False) -> str:
        """Return TAKEN, or why a frame is not taken.

        Args:
            ts: Its capture time; a clock that is set back passes no time.
            grid: What it looks like.
            classes: Those that the reference sees on it.
            hurried: Whether somebody waits for the collection.
        """
        passed_s = max(0.0, ts - self._last_ts) if self._last_ts is not None else 0.0
        self._last_ts = ts
        self._span_s += passed_s
        complete = self._outcomes[TAKEN] >= self._needed
        within_s = max(self._within_s, self._span_s) if complete else self._within_s
        self._due = min(self._due + passed_s * self._needed / within_s, _BEHIND)

        light = min(int(grid.brightness * BRIGHTNESS_BINS / 256.0), BRIGHTNESS_BINS - 1)
        shown = self._known(classes)
        outcome = self._judge(grid, light, shown, hurried)
        if outcome == TAKEN:
            self._recent[self._outcomes[TAKEN] % _REMEMBERED] = grid.luma
            self._due -= 1.0
            self._brightness[light] += 1
            self._classes.update(shown)
        self._outcomes[outcome] += 1
        return outcome

    def _judge(self, grid: LumaGrid, light: int, shown: Collection[int], hurried: bool) -> str:
        if self._due >= 1.0:
            return TAKEN
        if not hurried and self._due <= -_AHEAD * self._needed:
            return EARLY
        recent = self._recent[: self._outcomes[TAKEN]]
        nearest = int(grid.distances(recent).min(initial=255))
        if hurried:
            return TAKEN if nearest else DUPLICATE
        if nearest < NEAR:
            return DUPLICATE
        if _is_crowded(self._brightness, (light,)):
            return BRIGHTNESS
        return CLASS if _is_crowded(self._classes, shown) else TAKEN

    def _known(self, classes: Collection[int]) -> set[int]:
        """Return the classes under which a frame is counted."""
        fresh = sorted(set(classes) - self._classes.keys())
        room = max(0, _MOST_CLASSES - len(self._classes))
        others = {OTHERS} if fresh[room:] else set()
        return (set(classes) - set(fresh[room:])) | others or {NOTHING}


def _is_crowded(counts: Counter[int], kinds: Collection[int]) -> bool:
    """Return whether each of these kinds has had more than its share of all that were seen."""
    if not counts:
        return False
    most = max(_CROWDED * counts.total() / len(counts), _FEW)
    return all(counts[kind] > most for kind in kinds)
