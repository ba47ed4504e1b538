"""Score the engine in service by labels that arrive while it serves, or lie beside a recording.

`RecentAnswers` keeps what was answered for the newest frames, in a few MB. `LiveAccuracy` finds the answer that a label
is for, by frame id or by capture time, and keeps the mean of the scores. `accuracy_bound` derives a classifier's
accuracy from its fidelity, without labels.
"""

from __future__ import annotations

import bisect
import statistics
import threading
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NoReturn

from agent.common.errors import AgentError
from agent.monitoring.estimates import Estimate, SinceStartBySecond
from agent.monitoring.evidence_file import EvidenceFile
from agent.vision.answer import Answer
from agent.vision.labels import LabelKind, Truth
from agent.vision.preprocess import Geometry
from agent.vision.task import ServedFrame
from calibrate.statistics.evidence import Interval

MAX_BYTES = 4 * 2**20  # two minutes at 30 frames per second with ten detections each, nearly three with none
_BASE_BYTES = 480  # size of an answer and its places in the two indexes, beside its arrays
_INTERVALS = 31  # between frames, of which the median counts
# Answers that wait for the supervisor, which reads them ten times a second; one that hangs loses some.
_ARRIVING, _ARRIVING_SHAPES = 600, 60  # a map of classes may take a MB


class LabelsError(AgentError):
    """Labels that fit no answer: `labels.late`, `labels.unknown`."""


@dataclass(slots=True, eq=False)
class RecentAnswer:
    """The answer of one engine for one frame. labelled: it has been compared with the truth already."""

    frame: int
    ts: float
    engine_id: str
    answer: Answer
    geometry: Geometry | None = None  # by which places come to frame pixels when a label arrives, as few do
    labelled: bool = False

    @classmethod
    def from_served(cls, served: ServedFrame) -> RecentAnswer:
        """Take what may be labelled later of a frame."""
        return cls(served.frame.id, served.frame.ts, served.engine_id, served.result, served.geometry)

    @property
    def nbytes(self) -> int:
        """Its size in memory, approximately."""
        return _BASE_BYTES + self.answer.nbytes


class RecentAnswers:
    """The newest answers, of ascending frame ids, in about `max_bytes`. Not thread-safe."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.nbytes = 0
        self._max_bytes = max_bytes
        self._by_frame: OrderedDict[int, RecentAnswer] = OrderedDict()
        self._by_ts: list[tuple[float, int]] = []  # sorted, which frame ids alone are not: a clock may be set back
        self._intervals_s: deque[float] = deque(maxlen=_INTERVALS)
        self._newest: RecentAnswer | None = None

    def __len__(self) -> int:
        return len(self._by_frame)

    def add(self, answer: RecentAnswer) -> None:
        """Keep an answer, and drop the oldest where there is no room for both."""
        if self._newest is not None and answer.ts > self._newest.ts:
            self._intervals_s.append((answer.ts - self._newest.ts) / (answer.frame - self._newest.frame))
        self._newest = answer
        self._by_frame[answer.frame] = answer
        bisect.insort(self._by_ts, (answer.ts, answer.frame))
        self.nbytes += answer.nbytes
        while self.nbytes > self._max_bytes and len(self._by_frame) > 1:
            _, oldest = self._by_frame.popitem(last=False)
            del self._by_ts[bisect.bisect_left(self._by_ts, (oldest.ts, oldest.frame))]
            self.nbytes -= oldest.nbytes

    def after(self, frame: int) -> list[RecentAnswer]:
        """Return the answers to frames of higher ids, the oldest first."""
        newer = takewhile(lambda known: known > frame, reversed(self._by_frame))
        return [self._by_frame[known] for known in newer][::-1]

    def at_frame(self, frame: int) -> RecentAnswer:
        """Return the answer to a frame. Raises LabelsError: `labels.late`, `labels.unknown`."""
        answer = self._by_frame.get(frame)
        if answer is None:
            self._refuse(f"labels of frame {frame}", bool(self) and frame < next(iter(self._by_frame)))
        return answer

    def at_ts(self, ts: float) -> RecentAnswer:
        """Return the answer to the frame captured nearest to `ts`, within half the usual time between frames.

        That time counts dropped frames. Raises LabelsError: `labels.late`, `labels.unknown`.
        """
        place = bisect.bisect_left(self._by_ts, (ts, -1))
        around = self._by_ts[max(place - 1, 0) : place + 1]
        reach_s = statistics.median(self._intervals_s) / 2.0 if self._intervals_s else 0.0
        nearest = min(around, key=lambda known: abs(known[0] - ts), default=None)
        if nearest is None or abs(nearest[0] - ts) > reach_s:
            self._refuse(f"labels of capture time {ts:.3f}", bool(self) and ts < self._by_ts[0][0])
        return self._by_frame[nearest[1]]

    def _refuse(self, found: str, is_late: bool) -> NoReturn:
        expected = "an answered frame; no frame was answered yet"
        if self._newest is not None:
            oldest, newest = next(iter(self._by_frame.values())), self._newest
            frames, times = f"{oldest.frame} to {newest.frame}", f"{oldest.ts:.3f} to {newest.ts:.3f}"
            expected = f"an answered frame, of {frames}, capture times {times}"
        if is_late:
            raise LabelsError("labels.late", found, expected, "send labels sooner")
        raise LabelsError("labels.unknown", found, expected, "name frames as this daemon counts them since its start")


class LiveAccuracy:
    """Accuracy of the engine in service.

    It is the mean over frames of the accuracy that an answer's task gives it by the label (`Answer.accuracy`). Frames
    on which nothing is, and nothing was found, are counted apart.

    The mean starts over with every engine. Labels of a frame that an earlier engine answered are accepted and ignored,
    and so are further labels of one frame.

    The frame path calls `add_answer`, which neither waits nor computes; any other thread does the rest.
    """

    def __init__(self, labels: LabelKind[Any, Any] | None, answers: RecentAnswers | None = None) -> None:
        """Args:
        labels: Of the model's task; None: it has none, and answers are not kept.
        answers: Keeps those that labels may still come for.
        """
        self._keeps = labels is not None
        self._unnamed = labels.unnamed if labels is not None else None
        is_large = labels is not None and labels.form == "shapes"
        self._arriving: deque[ServedFrame] = deque(maxlen=_ARRIVING_SHAPES if is_large else _ARRIVING)
        self._lock = threading.Lock()  # guards all below; the frame path never takes it
        self.answers = answers if answers is not None else RecentAnswers()
        self._mean = SinceStartBySecond()
        self._evidence = EvidenceFile(None)
        self._engine_id: str | None = None
        self._first_frame = 0  # that this engine answered
        self._recorded_to = -1  # the last frame that `label_recorded` has seen

    def remember(self, evidence: EvidenceFile) -> None:
        """Keep what is counted from now on, and go on with what an earlier process counted of the same engine."""
        self._evidence = evidence

    def add_answer(self, served: ServedFrame) -> None:
        """Keep the answer to a frame; a sink of the frame path."""
        if self._keeps:
            self._arriving.append(served.without_image)

    def label_frame(self, frame: int, truth: Truth) -> None:
        """Score the answer to a frame. Raises LabelsError: `labels.late`, `labels.unknown`."""
        with self._lock:
            self._receive()
            self._score(self.answers.at_frame(frame), truth)

    def label_ts(self, ts: float, truth: Truth) -> None:
        """Label the frame captured at `ts` in seconds, or the nearest within half an interval, like `label_frame`."""
        with self._lock:
            self._receive()
            self._score(self.answers.at_ts(ts), truth)

    def label_recorded(self, labels: Mapping[int, Truth]) -> None:
        """Score every answer since the last call by the labels of a recording, by frame number.

        A frame that is not named shows no object to a detector; for a classifier it is not labelled.
        """
        with self._lock:
            self._receive()
            for answer in self.answers.after(self._recorded_to):
                self._recorded_to = answer.frame
                truth = labels.get(answer.frame, self._unnamed)
                if truth is not None:
                    self._score(answer, truth)

    @property
    def estimate(self) -> Estimate:
        """The mean since the engine in service answered its first frame, in this process or in an earlier one."""
        with self._lock:
            self._receive()
            return self._mean.estimate

    def _receive(self) -> None:
        while self._arriving:
            answer = RecentAnswer.from_served(self._arriving.popleft())
            if answer.engine_id != self._engine_id:
                recall = self._engine_id is None
                self._engine_id, self._first_frame = answer.engine_id, answer.frame
                self._evidence.start(answer.engine_id, answer.ts, recall, self._mean)
            self.answers.add(answer)

    def _score(self, answer: RecentAnswer, truth: Truth) -> None:
        if answer.labelled:
            return
        answer.labelled = True
        if answer.frame < self._first_frame:
            return
        value = answer.answer.in_frame(answer.geometry).accuracy(truth)
        self._mean.add(answer.ts, value)
        self._evidence.note_frame(answer.ts, value)


def accuracy_bound(reference_accuracy: float, fidelity: Interval) -> float:
    """Return a lower bound of a classifier's top-1 accuracy, given the reference's; both in [0, 1].

    Where the two agree, both are right or both are wrong. So the accuracies differ by at most 1 - fidelity, of which
    the interval gives an upper bound.
    """
    return max(0.0, reference_accuracy - (1.0 - fidelity.low))
