"""Try a candidate engine on live frames, and judge it against the previous engine.

1. `AnswerRecord` counts the frames that each engine has answered, with their inference times.
2. `Probation` compares candidate and previous engine by it, and says when the probation has finished.
3. `Trial` runs the candidate's inference in a thread of its own, with a deadline for each frame. It reports through
   `TrialEvents`. `CheckedVisionTask` refuses broken outputs of the candidate; `NonFiniteRecorder` watches the previous
   engine, so that outputs the model never computes finitely are not held against it.

`FrameLoop` in inference.py hands frames to the trial; agent/core/trials.py decides by the probation.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from agent.camera.capture import Frame
from agent.common.clock import SYSTEM_CLOCK, Clock
from agent.common.errors import AgentError
from agent.config import ProbationConfig
from agent.vision.answer import Answer
from agent.vision.boxes import Part
from agent.vision.spec import ModelSpec
from agent.vision.task import ServedFrame, VisionTask
from calibrate.errors import TaredError
from calibrate.statistics.evidence import Interval
from engines.interface import Array, Engine, TensorSpec

_NEWEST = 4000  # inference times kept of each engine
_FEWEST = 32  # frames of either engine, without which their latencies are not compared
_RECENT = 31  # gaps between frames, whose median is the usual one
_LONGEST_GAP = 5.0  # times the usual one, as which a longer one counts
_PATIENCE = 10.0  # times the configured seconds, after which fewer frames than configured are enough
_NO_WORSE = 0.01  # a smaller loss of fidelity is no difference
_SIGMAS = 3.0
_LONGEST_DEADLINE_S = 30.0  # half of the time that the service's watchdog waits for a frame
# A first inference loads a runtime's code and maps its memory: seconds on a slow board, tens of them from a slow disk.
# Nobody waits for it, so this only has to be longer than any.
REHEARSAL_S = 60.0
_SERVED_ON = "the previous engine serves; if it happens again, check the model and the runtime"

log = logging.getLogger(__package__)


@dataclass
class _Answers:
    frames: int = 0
    times_s: deque[float] = field(default_factory=lambda: deque(maxlen=_NEWEST))
    # By camera: several may deliver in step, so that their frames come in bursts.
    seconds: dict[str, float] = field(default_factory=dict)
    last_s: dict[str, float] = field(default_factory=dict)


class AnswerRecord:
    """The frames that each engine has answered: how many, over what time, and the newest inference times.

    `add` is for the frame path, all else for any thread.
    """

    def __init__(self, live: bool) -> None:
        """live: measure time on the machine's monotonic clock, which nobody sets; else capture time counts."""
        self._live = live
        self._lock = threading.Lock()
        self._answers: dict[str, _Answers] = {}
        self._gaps_s: dict[str, deque[float]] = {}  # by camera, between its newest frames

    def start(self, engine_id: str, previous: str) -> None:
        """Count this engine's frames from 0; of all others only those of `previous` are kept."""
        with self._lock:
            self._answers = {previous: self._answers.get(previous, _Answers()), engine_id: _Answers()}

    def add(self, served: ServedFrame) -> None:
        now_s = served.frame.captured_ns / 1e9 if self._live else served.frame.ts
        camera = served.frame.camera
        with self._lock:
            answers = self._answers.setdefault(served.engine_id, _Answers())
            last_s = answers.last_s.get(camera)
            if last_s is not None:
                gaps_s = self._gaps_s.setdefault(camera, deque(maxlen=_RECENT))
                gaps_s.append(max(0.0, now_s - last_s))
                usual_s = sorted(gaps_s)[len(gaps_s) // 2]
                answers.seconds[camera] = answers.seconds.get(camera, 0.0) + min(gaps_s[-1], _LONGEST_GAP * usual_s)
            answers.last_s[camera] = now_s
            answers.frames += 1
            if served.batch_size == 1:  # a share of a batch is not what a frame alone takes
                answers.times_s.append(served.inferred_s)

    def frames(self, engine_id: str) -> int:
        with self._lock:
            return self._answers_by(engine_id).frames

    def seconds(self, engine_id: str) -> float:
        """Seconds from its first frame to its last, of the camera seen the longest, without gaps in the video."""
        with self._lock:
            return max(self._answers_by(engine_id).seconds.values(), default=0.0)

    def times_s(self, engine_id: str) -> NDArray[np.float64]:
        """Return the inference times in s of the newest frames, sorted."""
        with self._lock:
            return np.sort(np.array(self._answers_by(engine_id).times_s, np.float64))

    def slowest_s(self) -> float:
        """Return the longest inference time that is kept, of any engine; 0 without one."""
        with self._lock:
            return max((time_s for answers in self._answers.values() for time_s in answers.times_s), default=0.0)

    def _answers_by(self, engine_id: str) -> _Answers:
        return self._answers.get(engine_id, _Answers())


def deadline_s(config: ProbationConfig, record: AnswerRecord) -> float:
    """Return the seconds after which a candidate counts as hung; the slowest frame in `record` is no hang."""
    return max(config.deadline_s, min(_LONGEST_DEADLINE_S, config.max_slowdown * record.slowest_s()))


def quantile_bounds(ordered: NDArray[np.float64], share: float) -> tuple[float, float]:
    """Return the interval of a quantile, three standard errors of its rank either way.

    It holds with 99.7 % for independent values. ordered: sorted values (n,). The bounds are 0 and infinity where the
    values do not reach as far. Source: order statistics; how many of n values lie below a quantile is binomial,
    whatever their distribution (David and Nagaraja, "Order Statistics", 2003, section 7.1).
    """
    n = ordered.size
    margin = _SIGMAS * math.sqrt(n * share * (1.0 - share))
    low, high = math.floor(n * share - margin) - 1, math.ceil(n * share + margin) - 1
    return (float(ordered[low]) if low >= 0 else 0.0), (float(ordered[high]) if high < n else math.inf)


@dataclass
class Probation:
    """Compare a candidate with the previous engine, from its first frame on.

    `objection` is evaluated again and again, and must not refuse a sound candidate by chance.

    1. Latency: bounds of three standard errors on either side, for the median and for the 99th percentile. A candidate
       as fast as the previous engine would have to be misjudged by the whole of `max_slowdown`; a machine that is
       suddenly busy for most of the probation may do that. A first engine's latency is reported and not judged: where a
       runtime has no fast kernels for INT8, that is what was configured.
    2. Fidelity: compared with the previous engine on the same frames; a first engine's with the reference, to which it
       may lose `max_loss`. The interval is a confidence sequence: all evaluations together refuse a candidate that
       loses no more than it may in 2.5 % of probations at most, for each camera. Before it becomes current, any loss
       counts that is more than chance: that test refuses a candidate that loses nothing in 5 % at most.

    Args:
        config: How long it lasts, and how much slower the candidate may be.
        record: Counts the answers of both engines.
        previous: Id of the engine whose place it takes.
        max_loss: The loss of fidelity that is accepted.
        first: It takes the place of the float reference, whose latency is no measure for it.
    """

    config: ProbationConfig
    record: AnswerRecord
    candidate: str
    previous: str
    max_loss: float
    first: bool = False

    def __post_init__(self) -> None:
        self.record.start(self.candidate, self.previous)
        self._previous_s = np.empty(0) if self.first else self.record.times_s(self.previous)
        self._may_lose = self.max_loss if self.first else _NO_WORSE

    @property
    def frames(self) -> int:
        """Frames that the candidate has answered."""
        return self.record.frames(self.candidate)

    @property
    def seconds(self) -> float:
        return self.record.seconds(self.candidate)

    @property
    def is_finished(self) -> bool:
        """True if it has lasted for the configured frames and seconds. Valid once a first frame was answered.

        A camera of few frames would take hours for as many: there it lasts for ten times the seconds.
        """
        frames, seconds = max(1, self.frames), self.seconds
        if frames >= self.config.frames:
            return seconds >= self.config.seconds
        return frames >= _FEWEST and self.config.seconds > 0.0 and seconds >= _PATIENCE * self.config.seconds

    @property
    def late_frames(self) -> int:
        """Newest frames that took longer than the previous engine's 99th percentile, by more than is allowed."""
        if not self._previous_s.size:
            return 0
        limit_s = self.config.max_slowdown * float(np.quantile(self._previous_s, 0.99))
        return int((self.record.times_s(self.candidate) > limit_s).sum())

    @property
    def judges_p99(self) -> bool:
        """True if either engine has answered enough frames for their 99th percentiles to be compared."""
        if min(self.frames, self._previous_s.size) < _FEWEST:
            return False
        return quantile_bounds(self._previous_s, 0.99)[1] < math.inf

    def objection(self, gains: Sequence[Interval], losses: Sequence[Interval] = ()) -> AgentError | None:
        """Return what speaks against the candidate: `probation.latency`, `probation.fidelity` or None.

        Args:
            gains: Of its fidelity over the previous engine's, on each camera where that is a measure for it.
            losses: Those of them that a test for one look finds to be losses; only for the last evaluation.
        """
        times_s = self.record.times_s(self.candidate)
        if min(times_s.size, self._previous_s.size) >= _FEWEST:
            for share in (0.5, 0.99):
                at_least_s = quantile_bounds(times_s, share)[0]
                at_most_s = self.config.max_slowdown * quantile_bounds(self._previous_s, share)[1]
                if at_least_s > at_most_s:
                    found = f"p{100 * share:g} of inference at least {1e3 * at_least_s:.2f} ms"
                    remedy = "check what else the machine does, or raise probation.max_slowdown"
                    return AgentError("probation.latency", found, f"at most {1e3 * at_most_s:.2f} ms", remedy)
        for gain in gains:
            if gain.n and gain.high < -self._may_lose:
                return _less_faithful(f"at least {-gain.high:.3f}", gain.n, f"at most {self._may_lose:g} lower")
        for lost in losses if not self.first else ():
            return _less_faithful(f"{-lost.estimate:.3f}", lost.n, "no loss that is more than chance")
        return None

    def affected_frames(self, error: AgentError, frame_was_waiting: bool) -> int:
        """Return how many frames were answered late or wrongly, or would have been, by a candidate that is withdrawn.

        Args:
            error: Why it is withdrawn.
            frame_was_waiting: Whether a frame waited for its answer then.
        """
        return self.frames if error.code == "probation.fidelity" else self.late_frames + frame_was_waiting


def _less_faithful(loss: str, frames: int, expected: str) -> AgentError:
    found = f"fidelity lower by {loss} than that of the previous engine, on the same {frames} frames"
    remedy = "the previous engine serves; a recalibration from other frames may do better"
    return AgentError("probation.fidelity", found, expected, remedy)


class NonFiniteRecorder(VisionTask):
    """A VisionTask of the previous engine that records which outputs are not finite, as masked logits never are."""

    def __init__(
        self,
        spec: ModelSpec,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        super().__init__(spec, inputs, outputs, clock)
        self._not_finite: frozenset[str] = frozenset()
        self._seen = threading.Event()
        self._seen.set()

    def watch(self) -> None:
        """Record the next frame, on which a candidate rehearses."""
        self._seen.clear()

    def not_finite(self) -> frozenset[str]:
        """Return the names of outputs with NaN or infinity; a candidate's thread waits here for that frame's answer."""
        return self._not_finite if self._clock.wait(self._seen, REHEARSAL_S) else frozenset()

    def decode(self, outputs: Mapping[str, Array], shape: tuple[int, ...], part: Part | None = None) -> Answer:
        if not self._seen.is_set():
            self._not_finite = _not_finite(outputs)
            self._seen.set()
        return super().decode(outputs, shape, part)


class CheckedVisionTask(VisionTask):
    """A VisionTask that only decodes outputs that are complete, of the expected shapes, and finite.

    An output that the previous engine does not answer finitely either is accepted: it is the model's.
    """

    def __init__(
        self,
        spec: ModelSpec,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        not_finite: Callable[[], Set[str]],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """inputs, outputs, not_finite: of the previous engine, whose place the candidate takes."""
        super().__init__(spec, inputs, outputs, clock)
        self._expected = {output.name: output.shape for output in outputs}
        self._may_be_not_finite = not_finite

    def decode(self, outputs: Mapping[str, Array], shape: tuple[int, ...], part: Part | None = None) -> Answer:
        """Decode as VisionTask does. Raises AgentError (`probation.output`)."""
        check_outputs(outputs, self._expected)
        broken = _not_finite(outputs)
        if broken and (wrong := broken - self._may_be_not_finite()):
            raise _wrong(f"NaN or infinite values in {', '.join(sorted(wrong))}", "finite outputs")
        return super().decode(outputs, shape, part)


def _not_finite(outputs: Mapping[str, Array]) -> frozenset[str]:
    return frozenset(name for name, values in outputs.items() if not np.isfinite(values).all())


def check_outputs(outputs: Mapping[str, Array], expected: Mapping[str, tuple[int | None, ...]]) -> None:
    """Compare outputs with the expected shapes by name; a dimension that is None may be any.

    Raises AgentError: `probation.output` for an output too few or too many, or of another shape.
    """
    if outputs.keys() != expected.keys():
        raise _wrong(f"the outputs {sorted(outputs)}", f"{sorted(expected)}")
    for name, shape in expected.items():
        actual = outputs[name].shape
        if len(actual) != len(shape) or any(size not in (None, has) for size, has in zip(shape, actual, strict=True)):
            raise _wrong(f"{name} of shape {actual}", f"shape {shape}")


def _wrong(found: str, expected: str) -> AgentError:
    return AgentError("probation.output", found, expected, _SERVED_ON)


def as_failure(error: Exception) -> AgentError:
    """Return why a candidate is withdrawn, as a `probation.*` error.

    Any other becomes `probation.error`, and its traceback is logged: once for each trial, which it ends.
    """
    if isinstance(error, AgentError) and error.code.startswith("probation."):
        return error
    log.error("event=trial error=%s", type(error).__name__, exc_info=error)
    found = f"{type(error).__name__}: {error}"
    return AgentError("probation.error", found, "an answer to every frame", _SERVED_ON)


@dataclass(frozen=True)
class TrialEvents:
    """Callbacks of a trial. They run in the frame path's thread and must not block.

    live(ts, skipped): The candidate has answered its first frame, of capture time `ts`; `skipped` frame ids lie between
        that frame and the last one of the previous engine.
    failed(error, ts, frame_was_waiting): The previous engine serves again from the frame of capture time `ts` on (None:
        no more frames came). frame_was_waiting: that frame had waited for the candidate's answer.
    ended(): The frames have ended while the candidate was on trial.
    """

    live: Callable[[float, int], None]
    failed: Callable[[AgentError, float | None, bool], None]
    ended: Callable[[], None]


class Trial(threading.Thread):
    """Run a candidate's inference in a thread of its own, with a deadline for each frame.

    Its first inference is a rehearsal, which may take its time: the previous engine answers that frame too, and goes on
    until the rehearsal has ended. The rehearsal's answer is dropped, but an error in it ends the trial.

    An inference that hangs does so inside a runtime's C code, which nothing in this process can interrupt. If it hung
    in the frame path, only a new process could serve again. Here the thread is left behind, with the engine that it
    holds, and the frame path goes on with the previous engine: a hang costs one deadline. A thread that comes back
    after all closes its engine and ends; until then `is_stuck` is true, and only a restart frees it. A runtime that
    hangs while it holds the interpreter's lock stops every thread: then no watchdog ping is sent, systemd restarts the
    daemon, and `current`, which has not moved, serves.
    """

    def __init__(
        self,
        engine_id: str,
        engine: Engine,
        task: VisionTask,
        deadline_s: float,
        events: TrialEvents,
        on_rehearsal: Callable[[], None] = lambda: None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Args:
        engine: The candidate, which the trial closes.
        task: The trial's own, for a thread that is left behind may still use its buffers.
        deadline_s: Seconds for each answer after the rehearsal.
        events: Reports the course of the trial.
        on_rehearsal: Called in the frame path before the frame to rehearse on; the previous engine answers it next.
        """
        super().__init__(name="trial", daemon=True)
        self.engine_id = engine_id
        self.engine = engine
        self.events = events
        self.is_live = False  # it has answered a frame
        self._task = task
        self._deadline_s = deadline_s
        self._on_rehearsal = on_rehearsal
        self._clock = clock
        self._frames: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self._answers: queue.Queue[ServedFrame | Exception] = queue.Queue()
        self._left_behind = False
        # The frame path's alone:
        self._is_pending = False  # an answer
        self._rehearsal_s: float | None = None  # monotonic start

    @property
    def is_stuck(self) -> bool:
        """True if its thread was left behind and has not come back."""
        return self._left_behind and self.is_alive()

    @property
    def is_busy(self) -> bool:
        """True if an inference is under way."""
        return self._is_pending and self._answers.empty()

    def rehearse(self, frame: Frame) -> bool:
        """Return whether the candidate may answer this frame; if not, it rehearses, and nobody waits.

        Raises AgentError: `probation.hang` if the rehearsal takes longer than any; and whatever it has raised.
        """
        if self._rehearsal_s is None:
            self._on_rehearsal()
            self._rehearsal_s = self._clock.monotonic_s()
            self._submit(frame)
        elif self._is_pending and not (self.is_busy and self._clock.monotonic_s() - self._rehearsal_s < REHEARSAL_S):
            self._result(0.0, REHEARSAL_S)
        return not self._is_pending

    def end_rehearsal(self) -> None:
        """Wait for a rehearsal under way, for a frame's deadline: no more frames come. Raises as `rehearse`."""
        if self._is_pending:
            self._result(self._deadline_s, self._deadline_s)

    def answer(self, frame: Frame) -> ServedFrame:
        """Return the candidate's answer to a frame.

        Raises AgentError: `probation.hang` if none comes in time; and whatever the engine or its decoder raises.
        """
        self._submit(frame)
        return self._result(self._deadline_s, self._deadline_s)

    def _submit(self, frame: Frame) -> None:
        self._is_pending = True
        self._frames.put(frame)

    def _result(self, patience_s: float, limit_s: float) -> ServedFrame:
        """Return the answer under way, waiting for `patience_s`; limit_s: the time it has had in all by then."""
        try:
            answer = self._clock.get(self._answers, patience_s)
        except queue.Empty:
            found = f"no answer within {limit_s:g} s"
            remedy = "the previous engine serves; a restart frees what the stuck engine holds"
            raise AgentError("probation.hang", found, "an answer to every frame", remedy) from None
        self._is_pending = False
        if isinstance(answer, Exception):
            raise answer
        return answer

    def finish(self) -> None:
        """End the thread; the engine is then the caller's.

        A thread that is busy is left behind, for nobody waits for it; it closes the engine itself.
        """
        self._left_behind = self.is_busy
        self._frames.put(None)
        if self.is_alive() and not self._left_behind:
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

    def _infer(self, frame: Frame) -> ServedFrame | Exception:
        try:
            result, geometry = self._task.infer(self.engine, frame.image)
        except Exception as error:  # whatever it is, the previous engine can answer
            return error
        return ServedFrame(frame, self.engine_id, result, self._clock.monotonic_ns(), self._task.inferred_s, geometry)

    def _close_engine(self) -> None:
        """Close the engine; an error must not stop the frame path, which does without this engine."""
        try:
            self.engine.close()
        except TaredError as error:
            log.warning("event=trial artefact=%s problem=%r", self.engine_id, str(error))
