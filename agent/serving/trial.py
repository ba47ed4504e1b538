"""A candidate that answers live frames while the engine before it stays loaded: what it does wrong costs no frame."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np

from agent.capture import Frame
from agent.decode import Prediction
from agent.errors import AgentError
from agent.findings import Served
from agent.model_spec import ModelSpec
from agent.vision import VisionTask
from calibrate.errors import TaredError
from engines.backend import Array, Engine, TensorSpec

log = logging.getLogger(__name__)

# A first inference loads a runtime's code and maps its memory: seconds on a slow board, tens of them from a slow disk.
# Nobody waits for it, so this only has to be longer than any.
REHEARSAL_S = 60.0
_SERVED_ON = "what served before serves on; if it happens again, look at the model and at the runtime"


class WitnessTask(VisionTask):
    """As VisionTask, of the engine before: it tells which of its outputs are not finite, as masked logits never are."""

    def __init__(self, spec: ModelSpec, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> None:
        super().__init__(spec, inputs, outputs)
        self._not_finite: frozenset[str] = frozenset()
        self._seen = threading.Event()
        self._seen.set()

    def watch(self) -> None:
        """Look at the next frame, which a candidate rehearses on."""
        self._seen.clear()

    def not_finite(self) -> frozenset[str]:
        """Names of the outputs with NaN or infinity; for a candidate's thread, which waits for that frame's answer."""
        return self._not_finite if self._seen.wait(REHEARSAL_S) else frozenset()

    def decode(self, outputs: Mapping[str, Array], shape: tuple[int, ...] | None = None) -> Prediction:
        if not self._seen.is_set():
            self._not_finite = _not_finite(outputs)
            self._seen.set()
        return super().decode(outputs, shape)


class CheckedTask(VisionTask):
    """As VisionTask, but a prediction is only made of outputs that are all there, of their shapes, and finite.

    An output that the engine before does not answer finitely either may be what it is: it is the model's.
    """

    def __init__(
        self,
        spec: ModelSpec,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        not_finite: Callable[[], Set[str]],
    ) -> None:
        """inputs, outputs, not_finite: of the engine before, whose place the candidate takes."""
        super().__init__(spec, inputs, outputs)
        self._expected = {output.name: output.shape for output in outputs}
        self._may_be = not_finite

    def decode(self, outputs: Mapping[str, Array], shape: tuple[int, ...] | None = None) -> Prediction:
        """As VisionTask.decode. Raises AgentError (`probation.output`)."""
        check_outputs(outputs, self._expected)
        broken = _not_finite(outputs)
        if broken and (wrong := broken - self._may_be()):
            raise _wrong(f"NaN or infinite values in {', '.join(sorted(wrong))}", "finite outputs")
        return super().decode(outputs, shape)


def _not_finite(outputs: Mapping[str, Array]) -> frozenset[str]:
    return frozenset(name for name, values in outputs.items() if not np.isfinite(values).all())


def check_outputs(outputs: Mapping[str, Array], expected: Mapping[str, tuple[int | None, ...]]) -> None:
    """Compare outputs with what is expected by name; a dimension that is None may be any.

    Raises AgentError (`probation.output`) for an output too few or too many, or of another shape.
    """
    if outputs.keys() != expected.keys():
        raise _wrong(f"the outputs {sorted(outputs)}", f"{sorted(expected)}")
    for name, shape in expected.items():
        found = outputs[name].shape
        if len(found) != len(shape) or any(ask not in (None, have) for ask, have in zip(shape, found, strict=True)):
            raise _wrong(f"{name} of shape {found}", f"shape {shape}")


def _wrong(found: str, expected: str) -> AgentError:
    return AgentError("probation.output", found, expected, _SERVED_ON)


def as_failure(error: Exception) -> AgentError:
    """Why a candidate is taken out of service, as an error of its own (`probation.error`) where it is not one yet."""
    if isinstance(error, AgentError) and error.code.startswith("probation."):
        return error
    found = f"{type(error).__name__}: {error}"
    return AgentError("probation.error", found, "an answer to every frame", _SERVED_ON)


@dataclass(frozen=True)
class TrialEvents:
    """Who hears how a trial goes; called in the frame path's thread, so that none may block.

    live(ts, skipped): the candidate has answered its first frame, of capture time `ts`; `skipped` frame ids lie between
    that and the last one of the engine before. failed(error, ts, asked): the engine before serves again from the frame
    of capture time `ts` on (None: no more frames came); asked: that frame had waited for the candidate's answer.
    ended(): frames have ended while the candidate was on trial.
    """

    live: Callable[[float, int], None]
    failed: Callable[[AgentError, float | None, bool], None]
    ended: Callable[[], None]


class Trial(threading.Thread):
    """A candidate's inference, in a thread of its own with a deadline for each frame.

    Its first one is a rehearsal, which may take its time: the engine before answers that frame too, and goes on until
    the rehearsal is over. What comes of it goes nowhere, but what is wrong with it ends the trial.

    An inference that hangs does so inside a runtime's C code, which nothing in this process can interrupt. Were it to
    hang in the frame path, only a new process could serve again. Here the thread is left behind, with the engine that
    it holds, and the frame path goes on with the engine before: what a hang costs is one deadline. A thread that
    comes back after all closes its engine and ends; until then `stuck` is true, and only a restart frees it. A runtime
    that hangs while it holds the interpreter's lock stops every thread: then no watchdog ping goes out, systemd
    restarts the daemon, and `current`, which has not moved, serves.
    """

    def __init__(
        self,
        engine_id: str,
        engine: Engine,
        task: VisionTask,
        deadline_s: float,
        events: TrialEvents,
        on_rehearsal: Callable[[], None] = lambda: None,
    ) -> None:
        """task: the trial's own, for its buffers may still be in use by a thread that is left behind. on_rehearsal:
        called in the frame path before the frame to rehearse on, which the engine before answers next."""
        super().__init__(name="trial", daemon=True)
        self.engine_id = engine_id
        self.engine = engine
        self.events = events
        self.live = False  # it has answered a frame
        self._task = task
        self._deadline_s = deadline_s
        self._on_rehearsal = on_rehearsal
        self._frames: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Served | Exception] = queue.SimpleQueue()
        self._left_behind = False
        self._owes = False  # an answer; for the frame path's thread, as the next
        self._rehearses_s: float | None = None  # monotonic, since when

    @property
    def stuck(self) -> bool:
        """Whether its thread was left behind and has not come back."""
        return self._left_behind and self.is_alive()

    @property
    def busy(self) -> bool:
        """Whether an inference is under way."""
        return self._owes and self._answers.empty()

    def rehearse(self, frame: Frame) -> bool:
        """Whether the candidate may answer this frame; where not, it rehearses, and nobody waits.

        Raises AgentError (`probation.hang`) where the rehearsal takes longer than any, and whatever it has raised.
        """
        if self._rehearses_s is None:
            self._on_rehearsal()
            self._rehearses_s = time.monotonic()
            self._ask(frame)
        elif self._owes and not (self.busy and time.monotonic() - self._rehearses_s < REHEARSAL_S):
            self._result(0.0, REHEARSAL_S)
        return not self._owes

    def end_rehearsal(self) -> None:
        """Of one under way, if any, the end, within the time for a frame: none comes any more. Raises as `rehearse`."""
        if self._owes:
            self._result(self._deadline_s, self._deadline_s)

    def answer(self, frame: Frame) -> Served:
        """The candidate's answer to a frame.

        Raises AgentError (`probation.hang`) where none comes in time, and whatever the engine or its decoder raises.
        """
        self._ask(frame)
        return self._result(self._deadline_s, self._deadline_s)

    def _ask(self, frame: Frame) -> None:
        self._owes = True
        self._frames.put(frame)

    def _result(self, patience_s: float, limit_s: float) -> Served:
        """Of the inference under way; limit_s: what it has had when patience ends."""
        try:
            answer = self._answers.get(timeout=patience_s)
        except queue.Empty:
            found = f"no answer within {limit_s:g} s"
            remedy = "what served before serves on; a restart frees what the engine in hand holds"
            raise AgentError("probation.hang", found, "an answer to every frame", remedy) from None
        self._owes = False
        if isinstance(answer, Exception):
            raise answer
        return answer

    def finish(self) -> None:
        """End the thread; the engine is then the caller's, unless the thread is left behind: it closes it itself.

        A thread that is busy is left behind, for nobody waits for it.
        """
        self._left_behind = self.busy
        self._frames.put(None)
        if not self._left_behind:
            self.join()

    def close(self) -> None:
        """`finish`, and close the engine."""
        self.finish()
        if not self._left_behind:
            self._close_engine()

    def run(self) -> None:
        while (frame := self._frames.get()) is not None:
            self._answers.put(self._infer(frame))
        if self._left_behind:
            self._close_engine()

    def _infer(self, frame: Frame) -> Served | Exception:
        try:
            result, geometry = self._task.infer(self.engine, frame.image)
        except Exception as error:  # whatever it is, the engine before can answer
            return error
        return Served(frame, self.engine_id, result, time.monotonic_ns(), self._task.inferred_s, geometry)

    def _close_engine(self) -> None:
        """What cannot be closed any more must not stop the frame path, which does without it."""
        try:
            self.engine.close()
        except TaredError as error:
            log.warning("event=trial artefact=%s problem=%r", self.engine_id, str(error))
