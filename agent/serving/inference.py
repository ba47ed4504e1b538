"""Run the inference thread: choose the next frame, keep two inferences under way, hand on the answers.

1. `RoundRobinScheduler` holds the newest frame of each camera and says whose is next.
2. `InFlightFrames` overlaps the work: while the engine computes a frame, the one before is decoded and the next is
   preprocessed. An engine that can only block computes in an `InferenceThread`.
3. `FrameLoop` is the thread. It also tries out a candidate (trial.py) while the previous engine stays loaded.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from agent.camera.capture import Frame, FrameSlot
from agent.common.clock import SYSTEM_CLOCK, Clock
from agent.common.errors import AgentError
from agent.config import BatchConfig
from agent.serving.trial import Trial, as_failure
from agent.vision.answer import Answer
from agent.vision.task import POLL_S, Outputs, PendingInference, ServedFrame, VisionTask
from engines.interface import Engine

_SLOWER, _FASTER = 0.1, 0.5  # weight of the newest frame in the usual times, where it is slower and faster
# Safety margin: the next frame is fetched this much earlier than necessary, plus twice the usual preprocessing time.
# Larger: frames are older when inferred. Smaller: the engine may have to wait.
_MARGIN_S = 1e-3
_STOP_S = 10.0  # an engine that hangs in its runtime's code ends with the process

Sink = Callable[[ServedFrame], None]  # must not block
ALONE = BatchConfig()


class RoundRobinScheduler:
    """The slots of several cameras, from which one thread takes frames in turn.

    Round robin over the slots that hold a frame: the shares are max-min fair. A camera that delivers less than an
    equal share gets all of its frames answered, and the others share the rest equally. Source: Hahne, "Round-robin
    scheduling for max-min fairness in data networks" (IEEE JSAC 1991).
    """

    def __init__(self, keep_every: Sequence[bool], clock: Clock = SYSTEM_CLOCK) -> None:
        """keep_every: of each camera, as for FrameSlot."""
        self._clock = clock
        lock = threading.RLock()
        self._changed = threading.Condition(lock)
        self.slots = tuple(FrameSlot(each, lock, self._changed, clock) for each in keep_every)
        self._next = self._picked = 0  # whose turn it is, and whose it was
        self.is_waiting = False  # whether the loop waits for a frame, with nothing else to do

    @property
    def is_finished(self) -> bool:
        """True if no more frames come."""
        return all(slot.is_finished for slot in self.slots)

    @property
    def may_overwrite(self) -> bool:
        """True if a frame that waits may be overwritten by a newer one."""
        return not all(slot.keep_every for slot in self.slots)

    def next_frame(self, timeout_s: float | None = None, until: Callable[[], bool] | None = None) -> Frame | None:
        """Wait for a frame and return it; None if none comes in time, or none comes any more.

        until: ends the wait as well; it is evaluated again at each `wake`.
        """
        every = range(len(self.slots))
        with self._changed:
            if (frame := self._pick(every)) is not None:
                return frame
            self.is_waiting = until is None
            self._clock.wait_for(
                self._changed,
                lambda: any(slot.is_full for slot in self.slots) or self.is_finished or (until is not None and until()),
                timeout_s,
            )
            self.is_waiting = False
            return self._pick(every)

    def more_for_batch(self, most: int, wait_s: float, until: Callable[[], bool] = lambda: False) -> list[Frame]:
        """After `next_frame`: return the next frames of other cameras, one of each and `most` at most.

        Waits for `wait_s`; `until` ends the wait, as for `next_frame`. It does not wait for cameras that have delivered
        nothing for two seconds.
        """
        if not most:
            return []
        others, frames = set(range(len(self.slots))) - {self._picked}, list[Frame]()
        give_up_s = self._clock.monotonic_s() + wait_s

        def is_over() -> bool:
            return until() or not any(self.slots[other].delivers for other in others)

        with self._changed:
            while len(frames) < most:
                if (frame := self._pick(others)) is not None:
                    others.discard(self._picked)
                    frames.append(frame)
                    continue
                left_s = give_up_s - self._clock.monotonic_s()
                if left_s <= 0.0 or is_over():
                    break
                self._clock.wait_for(
                    self._changed, lambda: any(self.slots[each].is_full for each in others) or is_over(), left_s
                )
        return frames

    def _pick(self, among: Collection[int]) -> Frame | None:
        """Pop the frame of the camera whose turn it is, of those with these numbers that have one."""
        for turn in range(len(self.slots)):
            number = (self._next + turn) % len(self.slots)
            if number in among and (frame := self.slots[number].pop()) is not None:
                self._picked, self._next = number, (number + 1) % len(self.slots)
                return frame
        return None

    def wake(self) -> None:
        """Let a waiting `next_frame` evaluate its `until` again; any thread may call this."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Accept no more frames: a waiting `put` returns, and frames in the slots can still be taken."""
        for slot in self.slots:
            slot.close()


class ThreadInference:
    """An inference in another thread."""

    notifies = True

    def __init__(self, run: Callable[[], Outputs], clock: Clock) -> None:
        self._run = run
        self._clock = clock
        self._under_way = threading.Lock()  # cheaper than an Event, of which each frame would have its own
        self._under_way.acquire()
        self.is_done = False
        self._outputs: Outputs = {}
        self._error: BaseException | None = None
        self._started_s = self._ended_s = 0.0

    def run(self) -> None:
        """Infer; `result` raises what this raises."""
        self._started_s = self._clock.monotonic_s()
        try:
            self._outputs = self._run()
        except BaseException as error:
            self._error = error
        self._ended_s = self._clock.monotonic_s()
        self.is_done = True
        self._under_way.release()

    def wait(self, timeout_s: float) -> None:
        if self._under_way.acquire(timeout=timeout_s):
            self._under_way.release()

    def result(self) -> tuple[Outputs, float, float]:
        with self._under_way:
            pass
        if self._error is not None:
            raise self._error
        return self._outputs, self._started_s, self._ended_s


class InferenceThread(threading.Thread):
    """Run inferences that block, one after the other; `on_end` is called in this thread after each."""

    def __init__(self, on_end: Callable[[], None], clock: Clock) -> None:
        super().__init__(name="engine", daemon=True)
        self._on_end = on_end
        self._clock = clock
        self._work: queue.SimpleQueue[ThreadInference | None] = queue.SimpleQueue()

    def submit(self, run: Callable[[], Outputs]) -> ThreadInference:
        """Run this after what was submitted before."""
        inference = ThreadInference(run, self._clock)
        self._work.put(inference)
        return inference

    def run(self) -> None:
        while (inference := self._work.get()) is not None:
            inference.run()
            self._on_end()

    def stop(self) -> None:
        """End after what was submitted."""
        self._work.put(None)
        self.join(_STOP_S)


class _Submitted(NamedTuple):
    frames: Sequence[Frame]
    engine_id: str
    task: VisionTask
    pending: PendingInference
    started_s: float  # monotonic


class InFlightFrames:
    """Two frames at most, or two batches of them, answered in the order in which they came.

    One thread uses it, the frame path's.
    """

    def __init__(self, tasks: Sequence[VisionTask], on_end: Callable[[], None], clock: Clock = SYSTEM_CLOCK) -> None:
        """Args:
        tasks: One for each inference under way, for its buffers.
        on_end: Called in another thread when an engine is done with a frame, unless it computes asynchronously.
        """
        self._free = deque(tasks)
        self._clock = clock
        self._submitted: deque[_Submitted] = deque()
        self._thread = InferenceThread(on_end, clock)
        self._preparing_s = self._inferring_s = 0.0  # what a frame usually takes
        self._ended_s = 0.0  # monotonic, the latest inference

    def start(self) -> None:
        """Accept frames."""
        self._thread.start()

    @property
    def is_empty(self) -> bool:
        return not self._submitted

    @property
    def is_full(self) -> bool:
        return not self._free

    @property
    def is_done(self) -> bool:
        """True if the engine is known to be done with the first inference under way."""
        return self._submitted[0].pending.inference.is_done

    @property
    def poll_s(self) -> float | None:
        """Seconds after which `is_done` is to be read again; None where `on_end` is called."""
        return None if self._submitted[0].pending.inference.notifies else POLL_S

    def wait_for_freshest(self) -> None:
        """Wait until it is time to fetch the next frame, so that it is ready when the engine is, and no older."""
        first = self._submitted[0]
        ends_s = max(first.started_s, self._ended_s) + self._inferring_s
        spare_s = ends_s - self._clock.monotonic_s() - 2.0 * self._preparing_s - _MARGIN_S
        if spare_s > 0.0:
            first.pending.inference.wait(spare_s)

    def submit(self, frames: Sequence[Frame], engine_id: str, engine: Engine) -> None:
        """Preprocess a frame, or several for one inference; the engine computes it after the one under way."""
        begun_s = self._clock.monotonic_s()
        task = self._free.popleft()
        pending = task.start(engine, [frame.image for frame in frames], self._thread.submit)
        started_s = self._clock.monotonic_s()
        self._submitted.append(_Submitted(frames, engine_id, task, pending, started_s))
        self._preparing_s = _usual(self._preparing_s, started_s - begun_s)

    def collect(self) -> list[ServedFrame]:
        """Return the answers of the first inference under way. Waits for the engine, and raises what that raises."""
        first = self._submitted.popleft()
        try:
            outputs, started_s, ended_s = first.pending.inference.result()
            inferred_s = ended_s - max(started_s, self._ended_s)
            self._ended_s = ended_s
            self._inferring_s = _usual(self._inferring_s, inferred_s)
            results = first.task.decode_batch(outputs, first.pending)
        finally:
            self._free.append(first.task)
        done_ns, each_s = self._clock.monotonic_ns(), inferred_s / len(first.frames)
        rows = zip(first.frames, results, first.pending.geometries, strict=True)
        return [
            ServedFrame(frame, first.engine_id, result, done_ns, each_s, geometry, len(first.frames))
            for frame, result, geometry in rows
        ]

    def close(self) -> None:
        """Accept no more frames; an inference under way ends first."""
        if self._thread.is_alive():
            self._thread.stop()


def _usual(known_s: float, newest_s: float) -> float:
    """Return the usual time of a frame, updated by the newest."""
    weight = 1.0 if not known_s else _FASTER if newest_s < known_s else _SLOWER
    return known_s + weight * (newest_s - known_s)


class FrameLoop(threading.Thread):
    """The inference thread.

    While the engine computes a frame, the one before is decoded and handed on, and the next is preprocessed. From
    cameras that do not wait, the next frame is fetched as late as possible.

    A candidate is tried out while the previous engine stays loaded, one frame at a time:

    1. It rehearses on the next frame. The previous engine answers that one, and all others until the rehearsal ends.
    2. Then the candidate answers. The first frame that it does not answer well, or in time, is answered by the previous
       engine, as are all later ones.
    3. `commit` makes it an engine like any other; `roll_back` withdraws it.

    `start_trial`, `commit` and `roll_back` may be called from any thread. An exception of an engine that is not on
    trial is kept in `error` and ends the loop: without a loop there is no daemon, and systemd starts a new one.
    """

    def __init__(
        self,
        scheduler: RoundRobinScheduler,
        engine_id: str,
        engine: Engine,
        tasks: Sequence[VisionTask],
        sinks: Sequence[Sink],
        batch: BatchConfig = ALONE,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Args:
        engine: Answers until a candidate takes its place; the loop closes it.
        tasks: One for each inference under way; the first answers while a candidate is on trial.
        sinks: Get every answer, in this thread.
        batch: How many frames are inferred at once, and how long one waits for others.
        """
        super().__init__(name="inference", daemon=True)
        self._scheduler = scheduler
        self._engine_id = engine_id
        self._engine = engine
        self._task = tasks[0]
        self._in_flight = InFlightFrames(tasks, scheduler.wake, clock)
        self._clock = clock
        self._sinks = sinks
        self._batch = batch
        self._last_ids: dict[str, int] = {}  # by camera, of the last frame that was answered
        self._left_behind: Trial | None = None
        self._engine_lock = threading.Lock()  # guards the previous engine, while another thread may use it
        self._trial_lock = threading.Lock()  # guards the four below
        self._ended = False
        self._trial: Trial | None = None
        self._is_committed = False  # the candidate; from here on it is an engine like any other
        self._withdrawal: AgentError | None = None  # why the candidate is to go
        self.error: BaseException | None = None

    @property
    def is_stuck(self) -> bool:
        """True if an engine that was on trial still hangs in its thread, with the memory that it holds."""
        return self._left_behind is not None and self._left_behind.is_stuck

    @property
    def is_committing(self) -> bool:
        """True if a committed engine waits for the next frame; until then none can be tried out."""
        with self._trial_lock:
            return self._trial is not None and self._is_committed

    def start_trial(self, trial: Trial) -> None:
        """Let a candidate rehearse, then answer frames; its events report the course.

        If no frame comes any more, `ended` is called at once. Raises RuntimeError while another one is on trial.
        """
        trial.start()
        with self._trial_lock:
            if self._trial is not None:
                trial.close()
                raise RuntimeError("a trial while another trial runs")
            if not self._ended:
                self._trial, self._is_committed, self._withdrawal = trial, False, None
                return
        trial.close()
        trial.events.ended()

    @property
    def has_live_candidate(self) -> bool:
        """True if a candidate on trial answers the frames, and nobody takes it back."""
        with self._trial_lock:
            return self._trial is not None and self._trial.is_live and self._withdrawal is None

    def commit(self) -> bool:
        """Keep the candidate and close the previous engine; False if it is not on trial any more."""
        with self._trial_lock:
            self._is_committed = self._trial is not None and self._trial.is_live and self._withdrawal is None
            return self._is_committed

    def roll_back(self, error: AgentError) -> bool:
        """Let the previous engine serve from the next frame on, because of `error`; False if none is on trial."""
        with self._trial_lock:
            if self._trial is None or self._is_committed:
                return False
            self._withdrawal = self._withdrawal or error
            return True

    def previous_prediction(self, served: ServedFrame, task: VisionTask) -> Answer | None:
        """Return the previous engine's answer to a frame that the candidate has answered; None without a trial.

        For another thread, with a task of its own. If the candidate fails meanwhile, the frame path waits for this
        answer before it uses that engine itself. Raises what the engine raises.
        """
        with self._engine_lock:
            with self._trial_lock:
                if self._trial is None or self._is_committed or self._trial.engine_id != served.engine_id:
                    return None
            return task.infer(self._engine, served.frame.image)[0]

    def run(self) -> None:
        try:
            self._in_flight.start()
            while (frame := self._next_frame()) is not None or not self._in_flight.is_empty:
                if frame is None:
                    self._deliver(*self._in_flight.collect())
                else:
                    self._process(frame)
        except BaseException as error:
            self.error = error
        finally:
            self._scheduler.close()  # no capture thread must wait for a loop that has ended
            self._in_flight.close()
            self._end()

    def _next_frame(self) -> Frame | None:
        """Return the next frame; None if the one under way is done before there is one, or if none comes any more."""
        if self._in_flight.is_empty:
            return self._scheduler.next_frame()
        if self._scheduler.may_overwrite:
            self._in_flight.wait_for_freshest()
        return self._scheduler.next_frame(self._in_flight.poll_s, lambda: self._in_flight.is_done)

    def _process(self, frame: Frame) -> None:
        if (trial := self._trial) is not None:
            self._answer_all()
            if not self._end_as_decided(trial, frame.ts):
                self._deliver(self._answer_on_trial(frame, trial))
                return
        elif self._scheduler.may_overwrite and self._is_answer_ready():
            self._answer_all()  # preprocessing this one first would only age that one
        others = self._scheduler.more_for_batch(self._batch.frames - 1, self._batch.wait_s, self._is_answer_ready)
        self._in_flight.submit([frame, *others], self._engine_id, self._engine)
        if self._in_flight.is_full:
            self._deliver(*self._in_flight.collect())

    def _is_answer_ready(self) -> bool:
        return not self._in_flight.is_empty and self._in_flight.is_done

    def _answer_all(self) -> None:
        while not self._in_flight.is_empty:
            self._deliver(*self._in_flight.collect())

    def _deliver(self, *answers: ServedFrame) -> None:
        for served in answers:
            self._last_ids[served.frame.camera] = served.frame.id
            for sink in self._sinks:
                sink(served)

    def _end_as_decided(self, trial: Trial, ts: float) -> bool:
        """Apply a commit or roll-back since the last frame; return whether there was one."""
        with self._trial_lock:
            is_committed, withdrawal = self._is_committed, self._withdrawal
        if withdrawal is not None:
            self._withdraw(trial, withdrawal, ts)
        elif is_committed:
            self._keep(trial)
        return withdrawal is not None or is_committed

    def _answer_on_trial(self, frame: Frame, trial: Trial) -> ServedFrame:
        """Let the candidate answer; in a rehearsal, and where the candidate fails, the previous engine."""
        frame_was_waiting = False
        try:
            frame_was_waiting = trial.rehearse(frame)
            served = trial.answer(frame) if frame_was_waiting else None
        except Exception as error:
            self._withdraw(trial, error, frame.ts, frame_was_waiting)
            served = None
        if served is not None:
            if not trial.is_live:
                trial.is_live = True
                trial.events.live(frame.ts, frame.id - self._last_ids.get(frame.camera, frame.id - 1) - 1)
            return served
        with self._engine_lock:
            result, geometry = self._task.infer(self._engine, frame.image)
        return ServedFrame(frame, self._engine_id, result, self._clock.monotonic_ns(), self._task.inferred_s, geometry)

    def _keep(self, trial: Trial) -> None:
        trial.finish()
        with self._engine_lock:
            previous, self._engine, self._engine_id = self._engine, trial.engine, trial.engine_id
            with self._trial_lock:
                self._trial, self._is_committed = None, False
            previous.close()

    def _withdraw(self, trial: Trial, error: Exception, ts: float | None, frame_was_waiting: bool = False) -> None:
        """Let the previous engine serve again; the arguments are those of TrialEvents.failed.

        Raises `error` if the candidate is committed, and there is no way back.
        """
        with self._trial_lock:
            if self._is_committed:
                raise error
            self._trial = None
        with self._engine_lock:
            pass  # another thread that uses the previous engine, as the observer does, has its answer first
        trial.close()
        if trial.is_stuck:
            self._left_behind = trial
        trial.events.failed(as_failure(error), ts, frame_was_waiting)

    def _end(self) -> None:
        """Close what is loaded, and end a trial; a rehearsal under way ends first, and may still fail."""
        with self._trial_lock:
            self._ended = True
            trial, is_committed, withdrawal = self._trial, self._is_committed, self._withdrawal
            if not is_committed:
                self._trial = None
        if trial is not None and is_committed:
            self._keep(trial)
        elif trial is not None and withdrawal is not None:
            self._withdraw(trial, withdrawal, None)
        elif trial is not None:
            try:
                trial.end_rehearsal()
            except Exception as error:
                self._withdraw(trial, error, None)
            else:
                trial.close()
                trial.events.ended()
        with self._engine_lock:
            self._engine.close()
