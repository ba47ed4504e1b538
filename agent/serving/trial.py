"""The median of the newest values, kept in order so that the next one costs no sorting."""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from agent.camera.capture import Frame
from agent.common.errors import AgentError
from agent.config import ProbationConfig
from agent.vision.decode import Prediction
from agent.vision.spec import ModelSpec
from agent.vision.task import ServedFrame, VisionTask
from calibrate.errors import TaredError
from calibrate.evidence import Interval
from engines.interface import Array, Engine, TensorSpec


class RunningMedian:
    """Of `window` values at most; none may be NaN."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._newest: deque[float] = deque()
        self._ordered: list[float] = []

    def add(self, value: float) -> float:
        """The median with this value; of an even number the upper one."""
        if len(self._newest) == self._window:
            del self._ordered[bisect_left(self._ordered, self._newest.popleft())]
        self._newest.append(value)
        insort(self._ordered, value)
        return self._ordered[len(self._ordered) // 2]


_NEWEST = 4000  # inference times kept of each engine
_FEWEST = 32  # of either engine, without which their latencies are not compared
_RECENT = 31  # gaps between frames, whose median is the usual one
_LONGEST_GAP = 5.0  # times the usual one, which is what a longer one counts
_PATIENCE = 10.0  # times the seconds asked, after which fewer frames than asked are enough
_NO_WORSE = 0.01  # of fidelity: no difference
_SIGMAS = 3.0
_LONGEST_DEADLINE_S = 30.0  # half of what the service's watchdog waits for a frame


@dataclass
class _Answers:
    frames: int = 0
    times_s: deque[float] = field(default_factory=lambda: deque(maxlen=_NEWEST))
    # By camera: several may deliver in step, so that their frames come in bursts.
    seconds: dict[str, float] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)


class AnswerRecord:
    """The frames each engine has answered: how many, over what time, and how long inference took for the newest.

    live: time is what has passed on the machine's monotonic clock, whatever the clock of the frames is set to; else it
    is capture time. `add` is for the frame path, all else for any thread.
    """

    def __init__(self, live: bool) -> None:
        self._live = live
        self._lock = threading.Lock()
        self._answers: dict[str, _Answers] = {}
        self._gaps_s: dict[str, RunningMedian] = {}  # by camera, between its newest frames

    def start(self, engine_id: str, beside: str) -> None:
        """From now on count this engine's frames anew; of all others only those of `beside` are of use."""
        with self._lock:
            before = self._answers.get(beside, _Answers())
            self._answers = {beside: before, engine_id: _Answers()}

    def add(self, served: ServedFrame) -> None:
        now_s = served.frame.captured_ns / 1e9 if self._live else served.frame.ts
        with self._lock:
            answers = self._answers.setdefault(served.engine_id, _Answers())
            camera, last = served.frame.camera, answers.last.get(served.frame.camera)
            if last is not None:
                gap_s = max(0.0, now_s - last)
                usual_s = self._gaps_s.setdefault(camera, RunningMedian(_RECENT)).add(gap_s)
                answers.seconds[camera] = answers.seconds.get(camera, 0.0) + min(gap_s, _LONGEST_GAP * usual_s)
            answers.last[camera] = now_s
            answers.frames += 1
            if served.batch_size == 1:  # a share of a batch is not what a frame alone takes
                answers.times_s.append(served.inferred_s)

    def frames(self, engine_id: str) -> int:
        with self._lock:
            return self._of(engine_id).frames

    def seconds(self, engine_id: str) -> float:
        """From its first frame to its last, of the camera that it has seen the longest, but for gaps in the video."""
        with self._lock:
            return max(self._of(engine_id).seconds.values(), default=0.0)

    def times_s(self, engine_id: str) -> NDArray[np.float64]:
        """Inference times in s of the newest frames, sorted."""
        with self._lock:
            return np.sort(np.array(self._of(engine_id).times_s, np.float64))

    def slowest_s(self) -> float:
        """The longest inference of those kept, of any engine; 0 where none is."""
        with self._lock:
            return max((time_s for answers in self._answers.values() for time_s in answers.times_s), default=0.0)

    def _of(self, engine_id: str) -> _Answers:
        return self._answers.get(engine_id, _Answers())


def deadline_s(config: ProbationConfig, record: AnswerRecord) -> float:
    """After which a candidate hangs; record: of the engine before. What that needs at its slowest is no hang."""
    return max(config.deadline_s, min(_LONGEST_DEADLINE_S, config.max_slowdown * record.slowest_s()))


def quantile_bounds(ordered: NDArray[np.float64], share: float) -> tuple[float, float]:
    """The interval of a quantile, three standard errors of its rank either way: 99.7 % for independent values.

    ordered: sorted values (n,). 0 and infinity where the values do not reach as far. Source: order statistics; how
    many of n values lie below a quantile is binomial, whatever their distribution (David and Nagaraja, "Order
    Statistics", 2003, section 7.1).
    """
    n = ordered.size
    margin = _SIGMAS * math.sqrt(n * share * (1.0 - share))
    low, high = math.floor(n * share - margin) - 1, math.ceil(n * share + margin) - 1
    return (float(ordered[low]) if low >= 0 else 0.0), (float(ordered[high]) if high < n else math.inf)


class Probation:
    """One candidate's, from its first frame on.

    It asks at every look, and must not tire of a sound candidate. Latency: a bound of three standard errors on either
    side, for the median and for the 99th percentile; a candidate as fast as the engine before would have to be
    misjudged by the whole of `max_slowdown` beside. A machine that is suddenly busy for most of it may do that. A first
    engine's is told and not judged: where a runtime has no fast kernels for INT8, it is what the owner has asked for.
    Fidelity: beside the engine before, on the same frames; a first engine's beside the reference, which it may lose
    `max_loss` to. The interval is a confidence sequence, so that all looks together condemn a candidate that loses no
    more than it may in 2.5 % of probations at most, for each camera.
    """

    def __init__(
        self,
        config: ProbationConfig,
        record: AnswerRecord,
        candidate: str,
        before: str,
        max_loss: float,
        *,
        first: bool = False,
    ) -> None:
        """max_loss: of fidelity, that the owner accepts. first: it takes the place of the float reference, and no
        latency of that is a measure for it."""
        record.start(candidate, before)
        self._config = config
        self._record = record
        self._candidate = candidate
        self._before_s = np.empty(0) if first else record.times_s(before)
        self._may_lose = max_loss if first else _NO_WORSE

    @property
    def frames(self) -> int:
        """Frames that the candidate has answered."""
        return self._record.frames(self._candidate)

    @property
    def seconds(self) -> float:
        return self._record.seconds(self._candidate)

    @property
    def is_finished(self) -> bool:
        """Whether it has lasted as long as was asked; to be asked once a first frame has been answered.

        A camera of few frames would take hours for as many: there it lasts for ten times the seconds.
        """
        frames, seconds = max(1, self.frames), self.seconds
        if frames >= self._config.frames:
            return seconds >= self._config.seconds
        return frames >= _FEWEST and self._config.seconds > 0.0 and seconds >= _PATIENCE * self._config.seconds

    @property
    def late_frames(self) -> int:
        """Frames, of the newest, that took longer than nearly all did before, by more than is allowed."""
        if not self._before_s.size:
            return 0
        limit_s = self._config.max_slowdown * float(np.quantile(self._before_s, 0.99))
        return int((self._record.times_s(self._candidate) > limit_s).sum())

    @property
    def judges_p99(self) -> bool:
        """Whether either engine has answered enough frames for their 99th percentiles to be compared."""
        if min(self.frames, self._before_s.size) < _FEWEST:
            return False
        return quantile_bounds(self._before_s, 0.99)[1] < math.inf

    def objection(self, gains: Sequence[Interval]) -> AgentError | None:
        """What speaks against the candidate; gains: of its fidelity over the engine before, on each camera where that
        is a measure for it."""
        return self._slow() or next(filter(None, map(self._unfaithful, gains)), None)

    def affected_frames(self, error: AgentError, asked: bool) -> int:
        """Frames that were answered late or wrongly, or would have been, when it was taken back for this reason.

        asked: whether one waited for its answer then.
        """
        return self.frames if error.code == "probation.fidelity" else self.late_frames + asked

    def _slow(self) -> AgentError | None:
        times_s = self._record.times_s(self._candidate)
        if min(times_s.size, self._before_s.size) < _FEWEST:
            return None
        for share in (0.5, 0.99):
            at_least_s = quantile_bounds(times_s, share)[0]
            at_most_s = self._config.max_slowdown * quantile_bounds(self._before_s, share)[1]
            if at_least_s > at_most_s:
                found = f"p{100 * share:g} of inference at least {1e3 * at_least_s:.2f} ms"
                remedy = "look at what else the machine does, or raise probation.max_slowdown"
                return AgentError("probation.latency", found, f"at most {1e3 * at_most_s:.2f} ms", remedy)
        return None

    def _unfaithful(self, gain: Interval) -> AgentError | None:
        if not gain.n or gain.high >= -self._may_lose:
            return None
        found = f"fidelity lower by {-gain.high:.3f} at least than of the engine before, on the same {gain.n} frames"
        remedy = "what served before serves on; a recalibration from other frames may do better"
        return AgentError("probation.fidelity", found, f"at most {self._may_lose:g} lower", remedy)


log = logging.getLogger(__package__)

# A first inference loads a runtime's code and maps its memory: seconds on a slow board, tens of them from a slow disk.
# Nobody waits for it, so this only has to be longer than any.
REHEARSAL_S = 60.0
_SERVED_ON = "what served before serves on; if it happens again, look at the model and at the runtime"


class NonFiniteRecorder(VisionTask):
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


class CheckedVisionTask(VisionTask):
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
    comes back after all closes its engine and ends; until then `is_stuck` is true, and only a restart frees it. A runtime
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
        self.is_live = False  # it has answered a frame
        self._task = task
        self._deadline_s = deadline_s
        self._on_rehearsal = on_rehearsal
        self._frames: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[ServedFrame | Exception] = queue.SimpleQueue()
        self._left_behind = False
        self._owes = False  # an answer; for the frame path's thread, as the next
        self._rehearses_s: float | None = None  # monotonic, since when

    @property
    def is_stuck(self) -> bool:
        """Whether its thread was left behind and has not come back."""
        return self._left_behind and self.is_alive()

    @property
    def is_busy(self) -> bool:
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
        elif self._owes and not (self.is_busy and time.monotonic() - self._rehearses_s < REHEARSAL_S):
            self._result(0.0, REHEARSAL_S)
        return not self._owes

    def end_rehearsal(self) -> None:
        """Of one under way, if any, the end, within the time for a frame: none comes any more. Raises as `rehearse`."""
        if self._owes:
            self._result(self._deadline_s, self._deadline_s)

    def answer(self, frame: Frame) -> ServedFrame:
        """The candidate's answer to a frame.

        Raises AgentError (`probation.hang`) where none comes in time, and whatever the engine or its decoder raises.
        """
        self._ask(frame)
        return self._result(self._deadline_s, self._deadline_s)

    def _ask(self, frame: Frame) -> None:
        self._owes = True
        self._frames.put(frame)

    def _result(self, patience_s: float, limit_s: float) -> ServedFrame:
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
        self._left_behind = self.is_busy
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

    def _infer(self, frame: Frame) -> ServedFrame | Exception:
        try:
            result, geometry = self._task.infer(self.engine, frame.image)
        except Exception as error:  # whatever it is, the engine before can answer
            return error
        return ServedFrame(frame, self.engine_id, result, time.monotonic_ns(), self._task.inferred_s, geometry)

    def _close_engine(self) -> None:
        """What cannot be closed any more must not stop the frame path, which does without it."""
        try:
            self.engine.close()
        except TaredError as error:
            log.warning("event=trial artefact=%s problem=%r", self.engine_id, str(error))
