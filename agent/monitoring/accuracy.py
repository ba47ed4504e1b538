"""True accuracy beside fidelity: what was answered is kept for a while, until somebody who knows better labels it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping

from agent.answers import Answer, Answers
from agent.decode import Prediction
from agent.detections import LabelledBoxes
from agent.estimates import Estimate, SinceStartBySecond
from agent.fidelity import count_matches
from agent.findings import Served
from agent.fitting import Geometry
from agent.memory import Memory
from agent.review import NOTHING
from calibrate.evidence import Interval

Truth = int | LabelledBoxes  # a class id, or boxes in frame pixels

# Answers on their way from the frame path; taken ten times a second, and a supervisor that hangs makes no heap of them.
_ARRIVING = 600


class LiveAccuracy:
    """How often the engine in service is right, by labels that come while it serves, or lie beside a recording.

    classify: the share of frames whose top-1 is the label. detect: the mean over frames of F1 at IoU 0.5, as for
    fidelity, with the labels in the place of the reference; frames without an object on which nothing was found are
    counted apart. It starts anew with every engine: labels of a frame that an earlier one answered are taken, and
    count for nothing, and so are further labels of one frame.

    The frame path calls `answered`, which neither waits nor computes; any other thread does the rest.
    """

    def __init__(self, task: str, answers: Answers | None = None) -> None:
        """task: of the model spec; raw outputs have no labels, and are not kept."""
        self._keeps = task != "raw"
        self._unnamed = NOTHING if task == "detect" else None  # what a recording's labels say by saying nothing
        self._arriving: deque[tuple[int, float, str, Prediction, Geometry | None]] = deque(maxlen=_ARRIVING)
        self._lock = threading.Lock()  # guards all below; the frame path never takes it
        self._answers = answers if answers is not None else Answers()
        self._mean = SinceStartBySecond()
        self._memory: Memory | None = None
        self._engine_id: str | None = None
        self._first_frame = 0  # that this engine answered
        self._recorded_to = -1  # the last frame that `label_recorded` has seen

    def remember(self, memory: Memory) -> None:
        """Keep what is counted from now on, and go on with what an earlier process counted of the same engine."""
        self._memory = memory

    def answered(self, served: Served) -> None:
        """Remember what a frame got; a sink of the frame path."""
        if self._keeps:
            frame = served.frame  # not kept: its image takes MB
            self._arriving.append((frame.id, frame.ts, served.engine_id, served.result, served.geometry))

    def label_frame(self, frame: int, truth: Truth) -> None:
        """Score the answer to a frame. Raises LabelsError: `labels.late`, `labels.unknown`."""
        with self._lock:
            self._take_in()
            self._score(self._answers.at_frame(frame), truth)

    def label_ts(self, ts: float, truth: Truth) -> None:
        """As label_frame, for the frame captured at `ts` in seconds, or the nearest within half a frame interval."""
        with self._lock:
            self._take_in()
            self._score(self._answers.at_ts(ts), truth)

    def label_recorded(self, labels: Mapping[int, Truth]) -> None:
        """Score every answer since the last call by the labels of a recording, by frame number.

        A frame that is not named shows no object to a detector; for a classifier it is not labelled.
        """
        with self._lock:
            self._take_in()
            for answer in reversed(list(self._answers.after(self._recorded_to))):
                self._recorded_to = answer.frame
                truth = labels.get(answer.frame, self._unnamed)
                if truth is not None:
                    self._score(answer, truth)

    @property
    def nbytes(self) -> int:
        """What the answers take that labels may still come for, about."""
        return self._answers.nbytes

    @property
    def estimate(self) -> Estimate:
        """Since the engine in service answered its first frame, in this process or in one before it."""
        with self._lock:
            self._take_in()
            return self._mean.estimate

    def _take_in(self) -> None:
        while self._arriving:
            answer = Answer.of(*self._arriving.popleft())
            if answer.engine_id != self._engine_id:
                recall = self._engine_id is None
                self._engine_id, self._first_frame = answer.engine_id, answer.frame
                if self._memory is None:
                    self._mean.start(answer.ts)
                else:
                    self._memory.begin(answer.engine_id, answer.ts, recall, self._mean)
            self._answers.add(answer)

    def _score(self, answer: Answer, truth: Truth) -> None:
        if answer.labelled:
            return
        answer.labelled = True
        if answer.frame < self._first_frame:
            return
        value = _value(answer, truth)
        self._mean.add(answer.ts, value)
        if self._memory is not None:
            self._memory.frame(answer.ts, value)


def accuracy_bound(reference_accuracy: float, fidelity: Interval) -> float:
    """What a classifier's top-1 accuracy is at least, where the reference's is `reference_accuracy`, both in [0, 1].

    Where the two agree both are right or both are wrong, so the accuracies differ by the loss at most, 1 - fidelity,
    of which the interval gives an upper bound.
    """
    return max(0.0, reference_accuracy - (1.0 - fidelity.low))


def _value(answer: Answer, truth: Truth) -> float | None:
    """How right an answer is, in [0, 1]; None where there was nothing to find and nothing was found."""
    found = answer.found
    if isinstance(found, int):
        return float(found == truth)
    assert isinstance(truth, LabelledBoxes), "labels are read for the task they are of"
    return count_matches(found, truth).f1 if len(found) or len(truth) else None
