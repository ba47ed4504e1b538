"""Apply label messages to the live accuracy of the cameras, or report why they are refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from agent.contract.commands import LabelledBox, Labels
from agent.contract.wire import MessageError
from agent.monitoring.accuracy import LabelsError, LiveAccuracy
from agent.vision.labels import LabelError, Truth
from agent.vision.spec import ModelSpec
from agent.vision.tasks.opening import open_task
from calibrate.errors import TaredError

_SILENCE_S = 60.0  # between two reports of one error code


@dataclass
class LabelsInbox:
    """Receive labels of the cameras' frames, and score them; one thread uses it, the supervisor's.

    A refused message is reported at once, further ones with the same error code once a minute: a flood fills no log.

    Args:
        on_refused: Receives the latest LabelsError or MessageError of a code, and the number of messages refused for it
            since its last report.
    """

    accuracies: Mapping[str, LiveAccuracy]
    spec: ModelSpec
    on_refused: Callable[[TaredError, int], None]
    _unreported: Counter[str] = field(default_factory=Counter, init=False)  # by code
    _latest: dict[str, TaredError] = field(default_factory=dict, init=False)  # by code, of those that are unreported
    _silent_until: dict[str, float] = field(default_factory=dict, init=False)

    def receive(self, payload: bytes, now_s: float, retained: bool = False) -> None:
        """Apply a message; `now_s` is monotonic time."""
        try:
            self._apply(payload, retained)
        except (LabelsError, LabelError, MessageError) as error:
            self._unreported[error.code] += 1
            self._latest[error.code] = error
        self.tick(now_s)

    def tick(self, now_s: float) -> None:
        """Report refused messages whose time has come."""
        for code in [code for code in self._latest if now_s >= self._silent_until.get(code, now_s)]:
            self._silent_until[code] = now_s + _SILENCE_S
            self.on_refused(self._latest.pop(code), self._unreported.pop(code))

    def _apply(self, payload: bytes, retained: bool) -> None:
        if retained:  # it would label a frame of the same number in every run to come
            remedy = "publish labels without the retain flag, and clear the retained ones"
            raise LabelsError("labels.retained", "retained labels", "labels that the broker does not keep", remedy)
        message = Labels.from_json(payload)
        accuracy = self.accuracies.get(message.camera)
        if accuracy is None:
            found = f"labels of camera {message.camera[:64]!a}"
            expected = f"of {' or '.join(ascii(camera) for camera in self.accuracies)}"
            raise LabelsError("labels.camera", found, expected, "send them to the device that has this camera")
        truth = self._truth(message.labels)
        if message.frame is not None:
            accuracy.label_frame(message.frame, truth)
        elif message.ts is not None:
            accuracy.label_ts(message.ts, truth)

    def _truth(self, labels: int | str | list[LabelledBox]) -> Truth:
        kind = open_task(self.spec).labels
        if kind is None:
            found = f"labels for a model of task {self.spec.task}"
            raise LabelError("labels.task", found, "none: this task has no labels", "correct the sender")
        document: object = labels
        if isinstance(labels, list):
            document = [each.model_dump(by_alias=True, exclude_none=True) for each in labels]
        return kind.fitted(self.spec).read(document, self.spec.labels)
