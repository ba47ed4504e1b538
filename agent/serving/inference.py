"""Frames on their way through an engine: while it computes one, the one before is decoded and the next made ready."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from agent.camera.capture import Frame, FrameSlot
from agent.common.errors import AgentError
from agent.config import BatchConfig
from agent.serving.trial import Trial, as_failure
from agent.vision.decode import Prediction
from agent.vision.task import POLL_S, Outputs, PendingInference, ServedFrame, VisionTask
from engines.interface import Engine

_SLOWER, _FASTER = 0.1, 0.5  # weight of the newest frame in what a usual one takes, where it is slower and faster
_MARGIN_S = 1e-3  # a frame is taken so much sooner than it has to be, and in twice the time that it takes to make ready
_STOP_S = 10.0  # an engine that hangs in its runtime's code ends with the process


class InferenceThread(threading.Thread):
    """Runs inferences that block, one after the other; `on_end` is called in this thread after each."""

    def __init__(self, on_end: Callable[[], None]) -> None:
        super().__init__(name="engine", daemon=True)
        self._on_end = on_end
        self._work: queue.SimpleQueue[ThreadInference | None] = queue.SimpleQueue()

    def submit(self, run: Callable[[], Outputs]) -> ThreadInference:
        """Run this after what was submitted before."""
        inference = ThreadInference(run)
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


class ThreadInference:
    """An inference in another thread."""

    notifies = True

    def __init__(self, run: Callable[[], Outputs]) -> None:
        self._run = run
        self._under_way = threading.Lock()  # cheaper than an Event, of which each frame would have its own
        self._under_way.acquire()
        self.is_done = False
        self._outputs: Outputs = {}
        self._error: BaseException | None = None
        self._began_s = self._ended_s = 0.0

    def run(self) -> None:
        """What it raises, the one who waits for it hears."""
        self._began_s = time.monotonic()
        try:
            self._outputs = self._run()
        except BaseException as error:
            self._error = error
        self._ended_s = time.monotonic()
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
        return self._outputs, self._began_s, self._ended_s


class _UnderWay(NamedTuple):
    frames: Sequence[Frame]
    engine_id: str
    task: VisionTask
    begun: PendingInference


class InFlightFrames:
    """Two frames at most, or two batches of them, answered in the order in which they came.

    One thread uses it, the frame path's.
    """

    def __init__(self, tasks: Sequence[VisionTask], on_end: Callable[[], None]) -> None:
        """tasks: one for each frame under way, for its buffers. on_end: called in another thread when an engine is done
        with a frame, where it has no way of its own to compute beside this one."""
        self._free = deque(tasks)
        self._under_way: deque[_UnderWay] = deque()
        self._thread = InferenceThread(on_end)
        self._making_s = self._inferring_s = 0.0  # that a usual frame takes
        self._ended_s = 0.0  # monotonic, the last one

    def start(self) -> None:
        """Frames may begin."""
        self._thread.start()

    @property
    def is_empty(self) -> bool:
        return not self._under_way

    @property
    def is_full(self) -> bool:
        return not self._free

    @property
    def is_done(self) -> bool:
        """Whether the engine is known to be done with the first frame under way."""
        return self._under_way[0].begun.inference.is_done

    @property
    def poll_s(self) -> float | None:
        """How long to wait before `is_done` is asked again; None where `on_end` tells."""
        return None if self._under_way[0].begun.inference.notifies else POLL_S

    @property
    def _remaining_s(self) -> float:
        """How long the engine will need for the first frame under way, going by the frames before."""
        began_s = max(self._under_way[0].begun.started_s, self._ended_s)
        return max(0.0, began_s + self._inferring_s - time.monotonic())

    def wait_for_freshest(self) -> None:
        """Until it is time to take the next frame, for it to be ready when the engine is; one taken now would age."""
        spare_s = self._remaining_s - 2.0 * self._making_s - _MARGIN_S
        if spare_s > 0.0:
            self._under_way[0].begun.inference.wait(spare_s)

    def submit(self, frames: Sequence[Frame], engine_id: str, engine: Engine) -> None:
        """Make a frame ready, or several for one inference, and have the engine compute it after the one under way."""
        started_s = time.monotonic()
        task = self._free.popleft()
        begun = task.start(engine, [frame.image for frame in frames], self._thread.submit)
        self._under_way.append(_UnderWay(frames, engine_id, task, begun))
        self._making_s = _usual(self._making_s, time.monotonic() - started_s)

    def collect(self) -> list[ServedFrame]:
        """The answers of the first inference under way. Waits for the engine, and raises what that raises."""
        first = self._under_way.popleft()
        try:
            outputs, began_s, ended_s = first.begun.inference.result()
            inferred_s = ended_s - max(began_s, self._ended_s)
            self._ended_s = ended_s
            self._inferring_s = _usual(self._inferring_s, inferred_s)
            results = first.task.decode_batch(outputs, first.begun)
        finally:
            self._free.append(first.task)
        done_ns, each_s = time.monotonic_ns(), inferred_s / len(first.frames)
        rows = zip(first.frames, results, first.begun.geometries, strict=True)
        return [
            ServedFrame(frame, first.engine_id, result, done_ns, each_s, geometry, len(first.frames))
            for frame, result, geometry in rows
        ]

    def close(self) -> None:
        """No more frames; an inference under way comes to its end first."""
        self._thread.stop()


def _usual(known_s: float, newest_s: float) -> float:
    """What a usual frame takes, going by those before and by the newest."""
    weight = 1.0 if not known_s else _FASTER if newest_s < known_s else _SLOWER
    return known_s + weight * (newest_s - known_s)


class RoundRobinScheduler:
    """The slots of several cameras, from which one thread takes.

    Round robin over those in which a frame lies: the shares are max-min fair. A camera that delivers less than an
    equal share gets all of its frames answered, and the others share what is left alike. Source: Hahne, "Round-robin
    scheduling for max-min fairness in data networks" (IEEE JSAC 1991).
    """

    def __init__(self, keep_every: Sequence[bool]) -> None:
        """keep_every: of each camera, as for FrameSlot."""
        lock = threading.RLock()
        self._changed = threading.Condition(lock)
        self.slots = tuple(FrameSlot(each, lock, self._changed) for each in keep_every)
        self._next = self._picked = 0  # whose turn it is, and whose it was
        self._awaited = False

    @property
    def is_waiting(self) -> bool:
        """Whether somebody waits for a frame, with nothing else to do."""
        return self._awaited

    @property
    def is_finished(self) -> bool:
        """Whether no more frames come."""
        return all(slot.is_finished for slot in self.slots)

    @property
    def may_overwrite(self) -> bool:
        """Whether a frame that waits may be overwritten by a newer one."""
        return not all(slot.keep_every for slot in self.slots)

    def next_frame(self, timeout_s: float | None = None, until: Callable[[], bool] | None = None) -> Frame | None:
        """Wait for a frame; None where none comes in time, nor before `until`, which is asked anew at each `wake`, or
        where none comes any more."""
        with self._changed:
            if (frame := self._pick(range(len(self.slots)))) is not None:
                return frame
            self._awaited = until is None
            self._changed.wait_for(
                lambda: any(slot.is_full for slot in self.slots) or self.is_finished or (until is not None and until()),
                timeout_s,
            )
            self._awaited = False
            return self._pick(range(len(self.slots)))

    def more_for_batch(self, most: int, wait_s: float, until: Callable[[], bool] = lambda: False) -> list[Frame]:
        """After `next_frame`: the next frames of other cameras, one of each and `most` at most, that are there in `wait_s`.

        `until` ends the wait, as for `next_frame`. Nobody waits for a camera that has delivered nothing for two seconds.
        """
        if not most:
            return []
        others, found = set(range(len(self.slots))) - {self._picked}, list[Frame]()
        give_up_at = time.monotonic() + wait_s
        with self._changed:
            while len(found) < most:
                frame = self._pick(others)
                patience_s = give_up_at - time.monotonic()
                if frame is not None:
                    others.discard(self._picked)
                    found.append(frame)
                elif patience_s <= 0.0 or until() or not any(self.slots[other].delivers for other in others):
                    break
                else:
                    self._changed.wait(patience_s)
        return found

    def _pick(self, among: Collection[int]) -> Frame | None:
        """The frame of the camera whose turn it is, of those with these numbers that have one."""
        for turn in range(len(self.slots)):
            number = (self._next + turn) % len(self.slots)
            if number in among and (frame := self.slots[number].pop()) is not None:
                self._picked, self._next = number, (number + 1) % len(self.slots)
                return frame
        return None

    def wake(self) -> None:
        """Whoever waits is to look again; any thread may say so."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """No more frames: what waits in `put` goes on, and what lies in the slots can still be taken."""
        for slot in self.slots:
            slot.close()


Sink = Callable[[ServedFrame], None]  # must not block
ALONE = BatchConfig()


class FrameLoop(threading.Thread):
    """The inference thread.

    While the engine computes a frame, the one before it is decoded and handed on, and the next is made ready. Of
    cameras that do not wait that is taken as late as can be.

    A candidate is tried out while the engine before it stays loaded, a frame at a time. It rehearses on the next frame,
    which the engine before answers, as it does all others until that is over. Then the candidate answers, and the first
    frame it does not answer well, or in time, is answered by the engine before, as are all later ones. `start_trial`,
    `commit` and `roll_back` may be called from any thread. An exception of an engine that is not on trial is kept in
    `error` and ends the loop: without a loop there is no daemon, and systemd starts a new one.
    """

    def __init__(
        self,
        turns: RoundRobinScheduler,
        engine_id: str,
        engine: Engine,
        tasks: Sequence[VisionTask],
        sinks: Sequence[Sink],
        batch: BatchConfig = ALONE,
    ) -> None:
        """tasks: one for each inference under way; the first answers while a candidate is on trial. batch: how many
        frames are inferred at once, and how long one waits for others."""
        super().__init__(name="inference", daemon=True)
        self._turns = turns
        self._engine_id = engine_id
        self._engine = engine
        self._task = tasks[0]
        self._lanes = InFlightFrames(tasks, turns.wake)
        self._sinks = sinks
        self._batch = batch
        self._last_ids: dict[str, int] = {}  # by camera, of the last frame that was answered
        self._left_behind: Trial | None = None
        self._in_use = threading.Lock()  # guards the engine before, while another thread may ask it
        self._ended = False
        self._trial: Trial | None = None
        self._kept = False  # the one on trial is; from here on it is an engine like any other
        self._recall: AgentError | None = None  # why the one on trial is to go
        self._exchange = threading.Lock()  # guards the four above
        self.error: BaseException | None = None

    @property
    def is_stuck(self) -> bool:
        """Whether an engine that was on trial still hangs in its thread."""
        return self._left_behind is not None and self._left_behind.is_stuck

    @property
    def is_committing(self) -> bool:
        """Whether an engine that is to be kept waits for the next frame; until then none can be tried out."""
        with self._exchange:
            return self._trial is not None and self._kept

    def start_trial(self, trial: Trial) -> None:
        """Let a candidate rehearse, then answer frames; its events tell what comes of it.

        Where no frame comes any more, `is_done` is told at once. One at a time: RuntimeError while another is on trial.
        """
        trial.start()
        with self._exchange:
            if self._trial is not None:
                trial.close()
                raise RuntimeError("a trial while another one is on")
            if not self._ended:
                self._trial, self._kept, self._recall = trial, False, None
                return
        trial.close()
        trial.events.ended()

    def commit(self) -> bool:
        """The one on trial stays, and the engine before it is closed; False where it is on trial no more."""
        with self._exchange:
            self._kept = self._trial is not None and self._trial.is_live and self._recall is None
            return self._kept

    def roll_back(self, error: AgentError) -> bool:
        """From the next frame on the engine before serves again, for the reason given; False where none is on trial."""
        with self._exchange:
            if self._trial is None or self._kept:
                return False
            self._recall = self._recall or error
            return True

    def previous_prediction(self, served: ServedFrame, task: VisionTask) -> Prediction | None:
        """What the engine before says of a frame that the one on trial has answered; None where that is over.

        For another thread, with a task of its own. Where the frame path needs that engine itself meanwhile, because the
        one on trial has failed, it waits for this answer. Raises what the engine raises.
        """
        with self._in_use:
            with self._exchange:
                if self._trial is None or self._kept or self._trial.engine_id != served.engine_id:
                    return None
            return task.infer(self._engine, served.frame.image)[0]

    def run(self) -> None:
        self._lanes.start()
        try:
            while (frame := self._next()) is not None or not self._lanes.is_empty:
                if frame is None:
                    self._deliver(*self._lanes.collect())
                else:
                    self._take(frame)
        except BaseException as error:
            self.error = error
        finally:
            self._turns.close()  # no capture thread must wait for a loop that has ended
            self._lanes.close()
            self._end()

    def _next(self) -> Frame | None:
        """The next frame; None where the one under way is done before there is one, or where none comes any more."""
        if self._lanes.is_empty:
            return self._turns.next_frame()
        if self._turns.may_overwrite:
            self._lanes.wait_for_freshest()
        return self._turns.next_frame(self._lanes.poll_s, lambda: self._lanes.is_done)

    def _take(self, frame: Frame) -> None:
        if self._trial is not None:
            self._answer_all()
            trial = self._change(frame.ts)
            if trial is not None:
                self._deliver(self._answer(frame, trial))
                return
        elif self._turns.may_overwrite and self._is_due():
            self._answer_all()  # making this one ready would only age that one
        others = self._turns.more_for_batch(self._batch.frames - 1, self._batch.wait_s, self._is_due)
        self._lanes.submit([frame, *others], self._engine_id, self._engine)
        if self._lanes.is_full:
            self._deliver(*self._lanes.collect())

    def _is_due(self) -> bool:
        """Whether a frame is to be handed on."""
        return not self._lanes.is_empty and self._lanes.is_done

    def _answer_all(self) -> None:
        while not self._lanes.is_empty:
            self._deliver(*self._lanes.collect())

    def _deliver(self, *answers: ServedFrame) -> None:
        for served in answers:
            self._last_ids[served.frame.camera] = served.frame.id
            for sink in self._sinks:
                sink(served)

    def _answer(self, frame: Frame, trial: Trial) -> ServedFrame:
        asked = False
        try:
            asked = trial.rehearse(frame)
            served = trial.answer(frame) if asked else None
        except Exception as error:
            self._back(trial, error, frame.ts, asked)
        else:
            if served is not None:
                self._went_live(trial, frame)
                return served
        # Also the frame that a candidate has failed on, and those during its rehearsal.
        with self._in_use:
            result, geometry = self._task.infer(self._engine, frame.image)
        return ServedFrame(frame, self._engine_id, result, time.monotonic_ns(), self._task.inferred_s, geometry)

    def _went_live(self, trial: Trial, frame: Frame) -> None:
        if not trial.is_live:
            trial.is_live = True
            trial.events.live(frame.ts, frame.id - self._last_ids.get(frame.camera, frame.id - 1) - 1)

    def _change(self, ts: float) -> Trial | None:
        """Do what was asked for since the last frame; what is on trial then."""
        if self._trial is None:
            return None
        with self._exchange:
            trial, kept, recall = self._trial, self._kept, self._recall
        if recall is not None:
            self._back(trial, recall, ts)
            return None
        if kept:
            self._keep(trial)
            return None
        return trial

    def _keep(self, trial: Trial) -> None:
        trial.finish()
        with self._in_use:
            old, self._engine, self._engine_id = self._engine, trial.engine, trial.engine_id
            with self._exchange:
                self._trial, self._kept = None, False
            old.close()

    def _back(self, trial: Trial, error: Exception, ts: float | None, asked: bool = False) -> None:
        """The engine before serves again; as TrialEvents has it. Raises `error` where there is no way back any more."""
        with self._exchange:
            if self._kept:
                raise error
            self._trial = None
        with self._in_use:
            pass  # whoever asks the engine before, as the observer does, has its answer first
        trial.close()
        if trial.is_stuck:
            self._left_behind = trial
        trial.events.failed(as_failure(error), ts, asked)

    def _end(self) -> None:
        """Close what is loaded, and tell who has a candidate on trial."""
        with self._exchange:
            self._ended = True
            trial, kept, recall = self._trial, self._kept, self._recall
            if not kept:
                self._trial = None
        if trial is not None and kept:
            self._keep(trial)
        elif trial is not None and recall is not None:
            self._back(trial, recall, None)
        elif trial is not None:
            self._close(trial)
        with self._in_use:
            self._engine.close()

    def _close(self, trial: Trial) -> None:
        """Of one that no more frames come for; a rehearsal under way has its say."""
        try:
            trial.end_rehearsal()
        except Exception as error:
            self._back(trial, error, None)
        else:
            trial.close()
            trial.events.ended()
