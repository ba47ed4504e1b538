"""What is collected for the next calibration: of the observed frames those that were chosen, and how they were."""

from __future__ import annotations

from collections.abc import Callable

from agent.capture import Frame
from agent.config import Config
from agent.contact_sheet import MOST, Thumbnail
from agent.decode import Classification, Prediction
from agent.detections import Detections
from agent.fidelity import is_empty
from agent.luma_grid import LumaGrid
from agent.sampling import Collection, Reservoir
from agent.selection import TAKEN, Selection
from agent.selection_report import SelectionReport
from engines.backend import Array, Observation


class ChosenFrames:
    """A collection, and the selection that decides what enters it.

    hurried: whether its frames are wanted at once from the beginning, by an operator.
    """

    def __init__(self, config: Config, hurried: bool) -> None:
        calibration = config.calibration
        self.collection = Collection(config.observe.held_out)
        self._hurried = hurried
        self._selection = Selection(calibration.frames, calibration.within_s)
        self._thumbnails = Reservoir[Thumbnail](MOST) if calibration.contact_sheet else None

    @property
    def nbytes(self) -> int:
        """What it takes, beside the held-out frames."""
        thumbnails = sum(each.image.nbytes for each in self._thumbnails.kept) if self._thumbnails else 0
        return self.collection.nbytes + self._selection.nbytes + thumbnails

    def add(
        self, frame: Frame, now_ts: float, tensor: Array, seen: Observation, reference: Prediction, hurried: bool
    ) -> None:
        """Take an observed frame, its network input and what the reference says of it, if it is chosen.

        now_ts: capture time, as all cameras have it.
        """
        grid = LumaGrid.of(frame.image)
        if self._selection.consider(now_ts, grid, shown_classes(reference), hurried or self._hurried) != TAKEN:
            return
        self.collection.add(tensor, seen.histograms, telling=not is_empty(reference))
        if self._thumbnails is not None:
            self._thumbnails.offer(lambda: Thumbnail.of(frame.ts, grid.brightness, frame.image))

    def report(self, name_of: Callable[[int], str]) -> SelectionReport:
        """How it stands. name_of: from a class id to its label."""
        thumbnails = None if self._thumbnails is None else tuple(self._thumbnails.kept)
        counts = self._selection.counts
        return SelectionReport(counts, counts.taken - self.collection.frames, name_of, thumbnails)


def shown_classes(reference: Prediction) -> frozenset[int]:
    """What the reference sees; outputs that nobody decodes show no class."""
    if isinstance(reference, Detections):
        return frozenset(reference.classes.tolist())
    return frozenset((reference.class_id,)) if isinstance(reference, Classification) else frozenset()
