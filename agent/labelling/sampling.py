"""Draw observed frames for labelling: at random, with known probabilities, more often where the answers are unsure.

`FrameSampler` gets each observed frame from the observer's thread. A frame stands for the time since the one before; it
is drawn with a probability that follows from how sure the answers are (calibrate.statistics.sampling: Strata). So many
frames a week are drawn in the mean as the configuration says, and what the others are is counted, in seconds.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from agent.common.clock import SYSTEM_CLOCK, Clock
from agent.common.errors import AgentError
from agent.common.timing import Backoff, RetryState
from agent.config import LabellingConfig
from agent.labelling.accuracy import FrameScores, MeasuredAccuracy, measured_accuracy
from agent.labelling.store import KEPT_ASIDE, NOTHING_COUNTED, Cell, Counted, Draw, DrawnFrame, LabelStore
from agent.vision.answer import Answer
from agent.vision.drawing import jpeg
from agent.vision.preprocess import Geometry
from agent.vision.task import ServedFrame
from calibrate.errors import TaredError
from calibrate.statistics.sampling import STRATA, Strata

_WEEK_S = 7 * 86_400.0
_WARM_UP = 60  # observed frames by which the strata are parted
_LONGEST_S = 600.0  # that one frame stands for: a slow reference observes one in minutes; of more nothing is known
_KEPT_EVERY_S = 600.0  # what was counted is written to the disk
_READ_EVERY_S = 30.0  # the labels are looked at
_QUALITY = 95  # JPEG quality, in %

log = logging.getLogger(__package__)


class FrameSampler:
    """Draws frames for one model, and reads what their labels come to. For the observer's thread; any may read.

    `measured`: by the labels so far; None without any.
    """

    def __init__(
        self,
        store: LabelStore,
        config: LabellingConfig,
        labels: Sequence[str],
        cameras: int,
        on_change: Callable[[TaredError | None], None],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Args:
        labels: The names of the model's classes.
        cameras: How many there are: they share the frames of a week.
        on_change: Called when the store fails, and when it works again.
        """
        self.measured: MeasuredAccuracy | None = None
        self._store = store
        self._clock = clock
        self._config = config
        self._labels = labels
        self._per_s = config.per_week / _WEEK_S / cameras
        self._storing = RetryState(on_change, Backoff(_READ_EVERY_S, _KEPT_EVERY_S), well_after=1)
        self._random = random.SystemRandom()
        self._warm_up: list[float] = []
        self._strata: Strata | None = None
        self._is_loaded = False
        self._scores = FrameScores()
        self._kept_aside: dict[str, int] = {}  # labels by task
        self._counted: dict[Cell, Counted] = {}
        self._newest: dict[str, float] = {}  # capture time, by camera
        self._waiting = 0
        self._stamp: tuple[int, ...] = ()
        self._revision: tuple[int, float] | None = None
        self._read_at = self._keep_at = 0.0  # monotonic

    def add(self, served: ServedFrame, reference: Answer, geometry: Geometry | None) -> None:
        """Count an observed frame, and draw it perhaps. An error of the store costs this frame alone.

        geometry: Where the frame lies in the reference's network input.
        """
        answer, right = served.result.in_frame(served.geometry), reference.in_frame(geometry)
        is_pausing = self._storing.code and self._clock.monotonic_s() < self._read_at  # for a while after a failure
        if is_pausing:
            return
        try:
            self._read()
            self._count(served, answer, right)
        except AgentError as error:
            self._read_at = self._clock.monotonic_s() + self._storing.note_failure(error)

    def close(self) -> None:
        """Write to the disk what was counted."""
        try:
            self._keep()
        except AgentError as error:
            self._storing.note_failure(error)

    def _read(self) -> None:
        """Read what other processes have written, every so often."""
        now_s = self._clock.monotonic_s()
        if now_s < self._read_at:
            return
        self._read_at = now_s + _READ_EVERY_S
        if not self._store.exists:
            self._restart_counting()
            return
        if not self._is_loaded:
            self._counted, self._is_loaded = self._store.counted(), True
            self._report_kept_aside()
        if (stamp := self._store.stamp()) == self._stamp:
            return
        cuts = self._store.strata()
        if cuts is None:
            self._restart_counting()
        elif self._strata is None:
            self._strata = Strata(cuts)
        if (revision := self._store.revision()) == self._revision:
            self._stamp = stamp  # what this process has written itself; to read all frames takes seconds
            return
        frames = self._store.frames()
        self._learn(frames)
        self._waiting = sum(frame.is_waiting for frame in frames)
        self.measured = measured_accuracy(frames, self._labels, self._counted, self._scores)
        self._store.prune(self._config.keep)
        self._stamp, self._revision = stamp, revision

    def _report_kept_aside(self) -> None:
        """Log how many labels of this model are of other tasks, once."""
        kept_aside = self._store.labels_of_other_tasks()
        for task, labels in kept_aside.items() - self._kept_aside.items():
            log.warning("event=labelling labels=%d task=%s problem=%r", labels, task, KEPT_ASIDE)
        self._kept_aside = kept_aside

    def _restart_counting(self) -> None:
        """Forget what was counted for frames that are kept no more: their file was removed, or set aside as damaged."""
        if self._strata is not None:
            self._strata, self._warm_up = None, []
        self._counted, self._is_loaded, self._stamp, self._revision = {}, False, (), None
        self._scores = FrameScores()

    def _learn(self, frames: Sequence[DrawnFrame]) -> None:
        """Learn again how much the scores vary in each stratum, from all labels."""
        if self._strata is None:
            return
        self._strata = Strata(self._strata.cuts)
        for counted in self._counted.values():
            for stratum in range(STRATA):
                self._strata.see(stratum, float(counted.seconds[stratum]))
        for frame in frames:
            if frame.is_labelled and (value := self._scores.get(frame)[0][0]) is not None:
                self._strata.learn(frame.stratum, value)

    def _count(self, served: ServedFrame, answer: Answer, reference: Answer) -> None:
        camera, ts = served.frame.camera, served.frame.ts
        newest, self._newest[camera] = self._newest.get(camera), ts
        if not self._per_s or self._waiting >= self._config.most_waiting:
            return  # time that no labels speak for
        sureness = answer.sureness(reference)
        if self._strata is None:
            self._warm_up.append(sureness)
            if len(self._warm_up) == _WARM_UP:
                self._strata = Strata.by_quantiles(self._warm_up)
                self._store.fix_strata(self._strata.cuts, self._labels)
            return
        if newest is None or ts <= newest:
            return  # the first one, or that of a recording that starts over
        weight, stratum = min(ts - newest, _LONGEST_S), self._strata.index(sureness)
        probability = self._strata.probability(stratum, self._per_s * weight)
        self._strata.see(stratum, weight)
        cell = camera, served.engine_id
        before, here = self._counted.get(cell, NOTHING_COUNTED), np.arange(STRATA) == stratum
        counted = Counted(before.seconds + weight * here, before.expected + probability * here)
        if self._random.random() < probability:
            draw = Draw(
                camera=camera,
                regime=served.engine_id,
                frame=served.frame.id,
                ts=ts,
                stratum=stratum,
                weight=weight,
                probability=probability,
                seen=counted.seconds.tolist(),
                served=answer,
                reference=reference,
            )
            height, width = served.frame.image.shape[:2]
            self._store.add(draw, jpeg(served.frame.image, _QUALITY), (height, width), counted)
            self._storing.note_success()
            self._waiting += 1
            if self.measured is not None:
                self.measured = replace(self.measured, waiting=self._waiting)
        self._counted[cell] = counted
        if self._clock.monotonic_s() >= self._keep_at:
            self._keep()

    def _keep(self) -> None:
        if self._counted:
            self._store.keep_counted(self._counted)
            self._storing.note_success()
        self._keep_at = self._clock.monotonic_s() + _KEPT_EVERY_S
