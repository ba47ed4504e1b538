"""Which frames the observer looks at, and which of them are set aside to judge a candidate."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from agent.camera.capture import Frame
from agent.collection.report import MAX_THUMBNAILS, SelectionReport, Thumbnail
from agent.collection.selection import HELD_OUT_EVERY, TAKEN, FrameSelector, LumaGrid
from agent.config import Config
from agent.vision.decode import Classification, Prediction
from agent.vision.detections import Detections
from agent.vision.fidelity import is_empty
from agent.vision.spec import ModelSpec
from calibrate.histogram import AbsHistogram, merge_into, nbytes
from engines.interface import Array, Observation

# Held-out frames in a row, in the beginning and at most: soon there are some, and later most have no neighbour that
# calibrates.
_STRETCH, _LONGEST_STRETCH = 4, 16
_STRETCH_SHARE = 16  # a stretch is one part in so many of all frames so far

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


class CalibrationSet:
    """What the observer has seen in one regime: histograms of many frames, and a few held-out network inputs.

    Held-out frames never enter the histograms: a candidate is not judged on the very frames that it was calibrated
    on, and most of the later ones have no neighbour in time among those either. No other frame is kept. Three quarters
    of them are *telling*, frames on which the reference found something; on the others a candidate may only show that
    it finds nothing either.
    """

    def __init__(self, held_out_size: int) -> None:
        self.histograms: dict[str, AbsHistogram] = {}
        self.frames = 0
        self._informative = Reservoir[Array](held_out_size - held_out_size // 4)
        self._empty = Reservoir[Array](held_out_size // 4)
        self._holds_out = held_out_size > 0
        self._hold_out = {True: HoldOut(), False: HoldOut()}  # by whether telling

    @property
    def informative(self) -> int:
        """Held-out frames on which the reference found something."""
        return len(self._informative.kept)

    @property
    def nbytes(self) -> int:
        """What its histograms take."""
        return nbytes(self.histograms)

    @property
    def held_out(self) -> list[Array]:
        """The held-out network inputs (1, C, H, W), of any sizes, the telling ones first."""
        return self._informative.kept + self._empty.kept

    def add(self, tensor: Array, histograms: Mapping[str, AbsHistogram], informative: bool = True) -> None:
        """Take one observed frame: its network input (1, C, H, W) and its histograms by tap."""
        if self._holds_out and self._hold_out[informative].next():
            (self._informative if informative else self._empty).offer(tensor.copy)
            return
        self.frames += 1
        merge_into(self.histograms, histograms)


class FrameCollection:
    """A collection, and the selection that decides what enters it.

    hurried: whether its frames are wanted at once from the beginning, by an operator.
    """

    def __init__(self, config: Config, hurried: bool) -> None:
        calibration = config.calibration
        self.calibration_set = CalibrationSet(config.observe.held_out)
        self._hurried = hurried
        self._selection = FrameSelector(calibration.frames, calibration.within_s)
        self._thumbnails = Reservoir[Thumbnail](MAX_THUMBNAILS) if calibration.contact_sheet else None

    @property
    def nbytes(self) -> int:
        """What it takes, beside the held-out frames."""
        thumbnails = sum(each.image.nbytes for each in self._thumbnails.kept) if self._thumbnails else 0
        return self.calibration_set.nbytes + self._selection.nbytes + thumbnails

    def add(
        self, frame: Frame, now_ts: float, tensor: Array, seen: Observation, reference: Prediction, hurried: bool
    ) -> None:
        """Take an observed frame, its network input and what the reference says of it, if it is chosen.

        now_ts: capture time, as all cameras have it.
        """
        grid = LumaGrid.from_image(frame.image)
        if self._selection.consider(now_ts, grid, shown_classes(reference), hurried or self._hurried) != TAKEN:
            return
        self.calibration_set.add(tensor, seen.histograms, informative=not is_empty(reference))
        if self._thumbnails is not None:
            self._thumbnails.offer(lambda: Thumbnail.from_image(frame.ts, grid.brightness, frame.image))

    def report(self, name_of: Callable[[int], str]) -> SelectionReport:
        """How it stands. name_of: from a class id to its label."""
        thumbnails = None if self._thumbnails is None else tuple(self._thumbnails.kept)
        counts = self._selection.counts
        return SelectionReport(counts, counts.taken - self.calibration_set.frames, name_of, thumbnails)


def shown_classes(reference: Prediction) -> frozenset[int]:
    """What the reference sees; outputs that nobody decodes show no class."""
    if isinstance(reference, Detections):
        return frozenset(reference.classes.tolist())
    return frozenset((reference.class_id,)) if isinstance(reference, Classification) else frozenset()


class SharedCollection:
    """One collection at a time; any thread may use it."""

    def __init__(
        self, spec: ModelSpec, config: Config, clock: Callable[[Frame], float] = lambda frame: frame.ts
    ) -> None:
        """clock: the capture time of a frame, as all cameras have it."""
        self._spec = spec
        self._config = config
        self._clock = clock
        self._lock = threading.Lock()
        self._chosen = FrameCollection(config, hurried=False)
        self._alerted: set[str] = set()
        self._in_use = False

    def set_in_use(self, in_use: bool) -> None:
        """Whether a job waits for the collection, which a warning then does not drop."""
        with self._lock:
            self._in_use = in_use

    def restart(self, hurried: bool = False) -> None:
        """Drop the collection and start a new one. hurried: somebody waits for it, and no frame is passed over for a
        better one."""
        with self._lock:
            self._chosen = FrameCollection(self._config, hurried)

    def calm(self, camera: str) -> None:
        """This camera's scene is what the calibration was made for."""
        with self._lock:
            self._alerted.discard(camera)

    def alert(self, camera: str) -> None:
        """This camera's scene has left the calibration: what was gathered before is not what the cure is for."""
        with self._lock:
            if camera not in self._alerted and not self._in_use:
                self._chosen = FrameCollection(self._config, hurried=False)
            self._alerted.add(camera)

    def add(self, frame: Frame, tensor: Array, seen: Observation, reference: Prediction) -> None:
        """Take an observed frame, its network input and what the reference says of it, if it is chosen.

        From a warning on frames are wanted at once, so that by the alarm most of the cure has been gathered.
        """
        with self._lock:
            self._chosen.add(frame, self._clock(frame), tensor, seen, reference, hurried=bool(self._alerted))

    @property
    def counts(self) -> tuple[int, int]:
        """Chosen frames in the histograms; telling ones that are held out beside them."""
        with self._lock:
            return self._chosen.calibration_set.frames, self._chosen.calibration_set.informative

    @property
    def nbytes(self) -> int:
        """What it takes, beside the held-out frames."""
        with self._lock:
            return self._chosen.nbytes

    def selection_report(self) -> SelectionReport:
        """How the frames of the collection were chosen."""
        with self._lock:
            return self._chosen.report(self._spec.label)

    def collected(self) -> tuple[int, dict[str, AbsHistogram], list[Array]]:
        """A copy of the collection: frames in the histograms, histograms by tap, held-out network inputs."""
        with self._lock:
            collection = self._chosen.calibration_set
            return collection.frames, dict(collection.histograms), list(collection.held_out)
