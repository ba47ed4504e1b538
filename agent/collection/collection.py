"""Collect observed frames for the next calibration, and hold some of them out to judge a candidate.

From bottom to top: `Reservoir` samples a stream, `hold_out` decides which frames are held out, `CalibrationSet` keeps
histograms and held-out frames, and `SharedCollection` fills one such set at a time with the frames that its
`FrameSelector` chooses.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from agent.collection.report import MAX_THUMBNAILS, SelectionReport, Thumbnail
from agent.collection.selection import HELD_OUT_EVERY, TAKEN, FrameSelector, LumaGrid
from agent.vision.answer import Answer
from agent.vision.spec import ModelSpec
from calibrate.histogram import AbsHistogram, merge_into, nbytes
from calibrate.repair import Extremes, merge_extremes
from engines.interface import Array, Observation

if TYPE_CHECKING:  # a job's child process reads `Collected`, and needs neither
    from agent.camera.capture import Frame
    from agent.config import Config

# Held-out frames in a row, in the beginning and at most: soon there are some, and later most have no neighbour that
# calibrates.
_STRETCH, _LONGEST_STRETCH = 4, 16
_STRETCH_SHARE = 16  # a stretch is one part in so many of all frames so far

_SAMPLED = 16  # frames of the calibration whose inputs are kept: repairs are proposed from them

T = TypeVar("T")


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
        """Offer the next item of the stream; `copy` is called only where it is kept."""
        self._seen += 1
        if len(self.kept) < self._size:
            self.kept.append(copy())
            return
        place = self._random.randrange(self._seen)
        if place < self._size:
            self.kept[place] = copy()


def hold_out() -> Iterator[bool]:
    """Yield of each frame of a stream whether it is held out: one in four, in stretches that grow from 4 to 16."""
    seen = 0
    while True:
        stretch = min(max(_STRETCH, seen // _STRETCH_SHARE), _LONGEST_STRETCH)
        yield from [False] * ((HELD_OUT_EVERY - 1) * stretch) + [True] * stretch
        seen += HELD_OUT_EVERY * stretch


class CalibrationSet:
    """The material of a calibration: histograms and extremes of many frames, and a few held-out network inputs.

    Held-out frames never enter the histograms: a candidate is not judged on the very frames that it was calibrated
    on, and most of the later ones have no neighbour in time among those either. Three quarters
    of the held-out frames are *informative*: the reference found something on them. On the others a candidate can only
    show that it finds nothing either.

    Of the frames in the histograms a few inputs are kept too, a sample over all their time, from which repairs are
    proposed. They are never among those that judge.
    """

    def __init__(self, held_out_size: int) -> None:
        self.histograms: dict[str, AbsHistogram] = {}
        self.extremes: dict[str, Extremes] = {}
        self.frames = 0
        self._informative = Reservoir[Array](held_out_size - held_out_size // 4)
        self._empty = Reservoir[Array](held_out_size // 4)
        self._sample = Reservoir[Array](_SAMPLED)
        self._holds_out = held_out_size > 0
        self._hold_out = {True: hold_out(), False: hold_out()}  # by whether informative

    @property
    def informative(self) -> int:
        """Held-out frames on which the reference found something."""
        return len(self._informative.kept)

    @property
    def held_out(self) -> list[Array]:
        """The held-out network inputs (1, C, H, W), of any sizes, the informative ones first."""
        return self._informative.kept + self._empty.kept

    @property
    def sample(self) -> list[Array]:
        """Network inputs (1, C, H, W) of some of the frames in the histograms."""
        return self._sample.kept

    @property
    def nbytes(self) -> int:
        """Memory of the histograms and the extremes."""
        return nbytes(self.histograms) + sum(seen.nbytes for seen in self.extremes.values())

    def add(self, tensor: Array, seen: Observation, informative: bool = True) -> None:
        """Add an observed frame, with its network input (1, C, H, W)."""
        if self._holds_out and next(self._hold_out[informative]):
            (self._informative if informative else self._empty).offer(tensor.copy)
            return
        self.frames += 1
        self._sample.offer(tensor.copy)
        merge_into(self.histograms, seen.histograms)
        merge_extremes(self.extremes, seen.extremes)


@dataclass(frozen=True)
class Collected:
    """The data with which a job calibrates, plans and judges.

    frames: how many are in the histograms, which are by tap.
    held_out: network inputs (1, C, H, W), of any sizes, that are not in the histograms, the informative ones first.
    sample: network inputs of some that are.
    extremes: of the same frames as the histograms, by layer.
    """

    frames: int
    histograms: dict[str, AbsHistogram]
    held_out: list[Array]
    sample: list[Array]
    extremes: dict[str, Extremes] = field(default_factory=dict)


class SharedCollection:
    """The frames of all cameras for the next calibration, chosen by a `FrameSelector`. Any thread may use it."""

    def __init__(
        self, spec: ModelSpec, config: Config, clock: Callable[[Frame], float] = lambda frame: frame.ts
    ) -> None:
        """clock: returns the capture time of a frame that all cameras have in common."""
        self._spec = spec
        self._config = config
        self._clock = clock
        self._lock = threading.Lock()  # guards everything below
        self._alerted: set[str] = set()
        self._in_use = False
        self._start(hurried=False)

    def _start(self, hurried: bool) -> None:
        calibration = self._config.calibration
        self._hurried = hurried
        self._set = CalibrationSet(self._config.observe.held_out)
        self._selector = FrameSelector(calibration.frames, calibration.within_s)
        self._thumbnails = Reservoir[Thumbnail](MAX_THUMBNAILS) if calibration.contact_sheet else None

    def set_in_use(self, in_use: bool) -> None:
        """Say whether a job waits for the collection, which a warning then does not drop."""
        with self._lock:
            self._in_use = in_use

    def restart(self, hurried: bool = False) -> None:
        """Drop the collection and start a new one.

        hurried: somebody waits for it, and no frame is passed over for a better one.
        """
        with self._lock:
            self._start(hurried)

    def calm(self, camera: str) -> None:
        """Note that the calibration fits this camera's scene."""
        with self._lock:
            self._alerted.discard(camera)

    def alert(self, camera: str) -> None:
        """Note that this camera's scene has drifted: frames collected before do not represent it, so start over."""
        with self._lock:
            if camera not in self._alerted and not self._in_use:
                self._start(hurried=False)
            self._alerted.add(camera)

    def add(self, frame: Frame, tensor: Array, seen: Observation, reference: Answer) -> None:
        """Add an observed frame, its network input and the answer of the reference, if it is chosen.

        From a warning on frames are chosen at once, so that by the alarm most of the collection is complete.
        """
        with self._lock:
            grid = LumaGrid.from_image(frame.image)
            hurried = self._hurried or bool(self._alerted)
            if self._selector.consider(self._clock(frame), grid, reference.classes_seen, hurried) != TAKEN:
                return
            self._set.add(tensor, seen, informative=not reference.is_empty)
            if self._thumbnails is not None:
                self._thumbnails.offer(lambda: Thumbnail.from_image(frame.ts, grid.brightness, frame.image))

    @property
    def counts(self) -> tuple[int, int]:
        """Chosen frames in the histograms, and informative ones that are held out beside them."""
        with self._lock:
            return self._set.frames, self._set.informative

    @property
    def nbytes(self) -> int:
        """Memory of the collection, without the held-out frames."""
        with self._lock:
            thumbnails = sum(each.image.nbytes for each in self._thumbnails.kept) if self._thumbnails else 0
            return self._set.nbytes + self._selector.nbytes + thumbnails

    def selection_report(self) -> SelectionReport:
        """Return how the frames of the collection were chosen."""
        with self._lock:
            thumbnails = None if self._thumbnails is None else tuple(self._thumbnails.kept)
            counts = self._selector.counts
            return SelectionReport(counts, counts.taken - self._set.frames, self._spec.label, thumbnails)

    def collected(self) -> Collected:
        """Return a copy of what a job needs."""
        with self._lock:
            chosen = self._set
            return Collected(
                chosen.frames, dict(chosen.histograms), chosen.held_out, list(chosen.sample), dict(chosen.extremes)
            )
