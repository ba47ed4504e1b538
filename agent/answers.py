"""What was answered for the newest frames, in a few MB, to be found by frame id or by capture time."""

from __future__ import annotations

import bisect
import statistics
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from agent.decode import Classification, Prediction
from agent.detections import Detections
from agent.errors import AgentError
from agent.fitting import Geometry

MAX_BYTES = 4 * 2**20  # three minutes at 30 frames per second with ten detections each, nearly five with none
_BASE_BYTES = 480  # of an answer and its places in the two indexes, beside its boxes
_INTERVALS = 31  # between frames, of which the median counts


class LabelsError(AgentError):
    """Labels that say nothing of the accuracy of what was answered."""


@dataclass(slots=True, eq=False)
class Answer:
    """What one frame got from one engine. labelled: whether that has been compared with the truth already."""

    frame: int
    ts: float
    engine_id: str
    _found: int | NDArray[np.float32]  # a class, or (n, 6): x1 y1 x2 y2 as the engine has them, class, score
    _geometry: Geometry | None = None  # by which boxes come to frame pixels once they are asked for, as few are
    labelled: bool = False

    @classmethod
    def of(cls, frame: int, ts: float, engine_id: str, result: Prediction, geometry: Geometry | None) -> Answer:
        """From a classification, or from detections in network pixels; in frame pixels where there is no geometry."""
        if isinstance(result, Classification):
            return cls(frame, ts, engine_id, result.class_id)
        assert isinstance(result, Detections), "raw outputs have no labels"
        packed = np.empty((len(result), 6), np.float32)
        packed[:, :4], packed[:, 4], packed[:, 5] = result.boxes, result.classes, result.scores
        return cls(frame, ts, engine_id, packed, geometry)

    @property
    def found(self) -> int | Detections:
        """A class id, or detections in frame pixels."""
        if isinstance(self._found, int):
            return self._found
        boxes, classes, scores = self._found[:, :4], self._found[:, 4].astype(np.int64), self._found[:, 5]
        if self._geometry is not None:
            boxes = self._geometry.to_frame(boxes)
        return Detections(boxes=boxes, classes=classes, scores=scores)

    @property
    def nbytes(self) -> int:
        """What it takes, about."""
        return _BASE_BYTES + (0 if isinstance(self._found, int) else self._found.nbytes)


class Answers:
    """The newest answers, of ascending frame ids, in about `max_bytes`. Not thread-safe."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.nbytes = 0
        self._max_bytes = max_bytes
        self._by_frame: OrderedDict[int, Answer] = OrderedDict()
        self._by_ts: list[tuple[float, int]] = []  # sorted, which frame ids alone are not: a clock may be set back
        self._intervals_s: deque[float] = deque(maxlen=_INTERVALS)
        self._newest: Answer | None = None

    def __len__(self) -> int:
        return len(self._by_frame)

    def add(self, answer: Answer) -> None:
        """Keep an answer, and forget the oldest where there is no room for both."""
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

    def after(self, frame: int) -> Iterator[Answer]:
        """The answers to frames of higher ids, the newest first."""
        for known in reversed(self._by_frame):
            if known <= frame:
                return
            yield self._by_frame[known]

    def at_frame(self, frame: int) -> Answer:
        """The answer to a frame. Raises LabelsError: `labels.late`, `labels.unknown`."""
        answer = self._by_frame.get(frame)
        if answer is None:
            _refuse(f"labels of frame {frame}", bool(self) and frame < next(iter(self._by_frame)), self._span)
        return answer

    def at_ts(self, ts: float) -> Answer:
        """The answer to the frame captured nearest to `ts`, within half the time between frames, dropped ones included.

        Raises LabelsError: `labels.late`, `labels.unknown`.
        """
        place = bisect.bisect_left(self._by_ts, (ts, -1))
        around = self._by_ts[max(place - 1, 0) : place + 1]
        reach_s = statistics.median(self._intervals_s) / 2.0 if self._intervals_s else 0.0
        nearest = min(around, key=lambda known: abs(known[0] - ts), default=None)
        if nearest is None or abs(nearest[0] - ts) > reach_s:
            _refuse(f"labels of capture time {ts:.3f}", bool(self) and ts < self._by_ts[0][0], self._span)
        return self._by_frame[nearest[1]]

    @property
    def _span(self) -> str:
        if self._newest is None:
            return "a frame that was answered, and none was yet"
        oldest = next(iter(self._by_frame.values()))
        return (
            f"a frame that was answered, of {oldest.frame} to {self._newest.frame}, "
            f"capture times {oldest.ts:.3f} to {self._newest.ts:.3f}"
        )


def _refuse(found: str, is_late: bool, expected: str) -> NoReturn:
    if is_late:
        raise LabelsError("labels.late", found, expected, "send labels sooner")
    raise LabelsError("labels.unknown", found, expected, "name frames as this daemon counts them since its start")
