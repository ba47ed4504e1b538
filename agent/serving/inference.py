"""The frame path: take a frame, infer, decode, hand the result on. It owns the engine and changes it between frames."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from agent.capture import Frame
from agent.config import BatchConfig
from agent.decode import Prediction
from agent.errors import AgentError
from agent.findings import Served
from agent.lanes import Lanes
from agent.trial import Trial, as_failure
from agent.turns import Turns
from agent.vision import VisionTask
from engines.backend import Engine

Sink = Callable[[Served], None]  # must not block
ALONE = BatchConfig()


class FrameLoop(threading.Thread):
    """The inference thread.

    While the engine computes a frame, the one before it is decoded and handed on, and the next is made ready. Of
    cameras that do not wait that is taken as late as can be.

    A candidate is tried out while the engine before it stays loaded, a frame at a time. It rehearses on the next frame,
    which the engine before answers, as it does all others until that is over. Then the candidate answers, and the first
    frame it does not answer well, or in time, is answered by the engine before, as are all later ones. `try_out`,
    `keep` and `go_back` may be called from any thread. An exception of an engine that is not on trial is kept in
    `error` and ends the loop: without a loop there is no daemon, and systemd starts a new one.
    """

    def __init__(
        self,
        turns: Turns,
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
        self._lanes = Lanes(tasks, turns.nudge)
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
    def stuck(self) -> bool:
        """Whether an engine that was on trial still hangs in its thread."""
        return self._left_behind is not None and self._left_behind.stuck

    @property
    def keeping(self) -> bool:
        """Whether an engine that is to be kept waits for the next frame; until then none can be tried out."""
        with self._exchange:
            return self._trial is not None and self._kept

    def try_out(self, trial: Trial) -> None:
        """Let a candidate rehearse, then answer frames; its events tell what comes of it.

        Where no frame comes any more, `ended` is told at once. One at a time: RuntimeError while another is on trial.
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

    def keep(self) -> bool:
        """The one on trial stays, and the engine before it is closed; False where it is on trial no more."""
        with self._exchange:
            self._kept = self._trial is not None and self._trial.live and self._recall is None
            return self._kept

    def go_back(self, error: AgentError) -> bool:
        """From the next frame on the engine before serves again, for the reason given; False where none is on trial."""
        with self._exchange:
            if self._trial is None or self._kept:
                return False
            self._recall = self._recall or error
            return True

    def before(self, served: Served, task: VisionTask) -> Prediction | None:
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
            while (frame := self._next()) is not None or not self._lanes.empty:
                if frame is None:
                    self._deliver(*self._lanes.end())
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
        if self._lanes.empty:
            return self._turns.get()
        if self._turns.age:
            self._lanes.wait_for_freshest()
        return self._turns.get(self._lanes.patience_s, lambda: self._lanes.ended)

    def _take(self, frame: Frame) -> None:
        if self._trial is not None:
            self._answer_all()
            trial = self._change(frame.ts)
            if trial is not None:
                self._deliver(self._answer(frame, trial))
                return
        elif self._turns.age and self._is_due():
            self._answer_all()  # making this one ready would only age that one
        others = self._turns.beside(self._batch.frames - 1, self._batch.wait_s, self._is_due)
        self._lanes.begin([frame, *others], self._engine_id, self._engine)
        if self._lanes.full:
            self._deliver(*self._lanes.end())

    def _is_due(self) -> bool:
        """Whether a frame is to be handed on."""
        return not self._lanes.empty and self._lanes.ended

    def _answer_all(self) -> None:
        while not self._lanes.empty:
            self._deliver(*self._lanes.end())

    def _deliver(self, *answers: Served) -> None:
        for served in answers:
            self._last_ids[served.frame.camera] = served.frame.id
            for sink in self._sinks:
                sink(served)

    def _answer(self, frame: Frame, trial: Trial) -> Served:
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
        return Served(frame, self._engine_id, result, time.monotonic_ns(), self._task.inferred_s, geometry)

    def _went_live(self, trial: Trial, frame: Frame) -> None:
        if not trial.live:
            trial.live = True
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
        if trial.stuck:
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
