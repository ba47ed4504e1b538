"""Swap engines: what happens to a candidate between its verdict and `current`.

1. `start` journals the job's state PROBATION and hands the engine to the frame path (agent.serving.trial).
2. The frame path rehearses the engine and answers its first frame with it: the swap is announced. From here on the
   candidate serves, but `current` still leads to the previous engine.
3. During the probation `tick` checks fidelity, latency and outputs of the candidate on live frames.
4. The candidate passes: `current` moves to it, and the job is COMMITTED. Or it fails, or the operator recalls it: the
   previous engine serves again, the candidate leaves the store, and the job is ROLLED_BACK.

An engine that has served before (triggers `switch` and `rollback`) is committed with its first answer. The float engine
of a new model is tried likewise; when it passes, the model takes its place in the place of `current`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from agent.commands.dispatcher import CANCELLED
from agent.common.clock import SYSTEM_CLOCK, Clock
from agent.common.errors import AgentError
from agent.common.main_thread import RunInMainThread
from agent.config import Config
from agent.contract.events import EventKind
from agent.control.policies import Policies
from agent.control.summary import Rollback, RunSummary, Swap
from agent.jobs.job import PROVEN, JobTracker
from agent.models.engine_service import EngineService, LoadedEngine
from agent.monitoring.camera_monitor import CameraStates
from agent.serving.pipeline import Pipeline
from agent.serving.trial import Probation, TrialEvents
from agent.uplink.reporter import Reporter
from agent.validation.verdict import Verdict
from calibrate.errors import TaredError

_RETRY_S = 60.0  # between attempts to make an engine `current` that the disk has refused


@dataclass
class SwapInProgress:
    """An engine on trial.

    Args:
        verdict: Verdict on the candidate; None for an engine that has served before.
        missed_before: Frames that nobody had taken when it began.
        on_commit: Puts a new model in its place; None: the engine becomes `current`.
        announced: Set with the engine's first answer.
        is_going_back: The frame path has been requested to go back to the previous engine.
        recall: The operator's rollback, if there is one.
    """

    loaded: LoadedEngine
    tracker: JobTracker
    verdict: Verdict | None
    probation: Probation
    missed_before: int
    on_commit: Callable[[], None] | None = None
    announced: Swap | None = None
    is_going_back: bool = False
    recall: JobTracker | None = None

    @property
    def is_proven(self) -> bool:
        """True if the engine has served before: its first answer is enough, and it stays in the store in any case."""
        return self.tracker.trigger in PROVEN


@dataclass
class EngineSwap:
    """The one swap in progress. Everything runs in the supervisor's thread.

    `current` moves when the engine is committed, and not before. Whatever ends the process during a probation, the
    previous engine serves after it.

    Args:
        on_engine_changed: Called with the candidate that serves, or None for the service's own engine, and the
            capture time from which on it serves, by camera.
        on_rolled_back: Called with the id of a candidate that failed its probation; not for one that was recalled or
            withdrawn.
        policies: What is shown of each engine's answers, which events report.
    """

    config: Config
    service: EngineService
    pipeline: Pipeline
    reporter: Reporter
    summary: RunSummary
    run_in_main_thread: RunInMainThread
    on_engine_changed: Callable[[LoadedEngine | None, Mapping[str, float]], None]
    on_rolled_back: Callable[[str], None]
    policies: Policies
    clock: Clock = SYSTEM_CLOCK
    _swap: SwapInProgress | None = field(default=None, init=False)
    # Its engine serves, but the disk has refused to make it current.
    _unsaved: SwapInProgress | None = field(default=None, init=False)
    _save_at_s: float = field(default=0.0, init=False)

    @property
    def is_active(self) -> bool:
        """True while an engine is on trial, or the frame path has yet to close the previous one."""
        return self._swap is not None or self.pipeline.loop.is_committing

    @property
    def candidate(self) -> str | None:
        """Id of the engine that serves on probation; None while the service's own engine serves."""
        return self._swap.loaded.artefact.id if self._swap is not None and self._swap.announced is not None else None

    def start(
        self,
        loaded: LoadedEngine,
        tracker: JobTracker,
        verdict: Verdict | None = None,
        max_loss: float | None = None,
        on_commit: Callable[[], None] | None = None,
    ) -> None:
        """Hand the engine to the frame path, once it is journaled that it may serve.

        Args:
            verdict: Verdict on the candidate; None for an engine that has served before.
            max_loss: Loss of fidelity that the operator accepts; None: as configured.
            on_commit: Puts a new model in its place, whose answers and latency are its own: probation looks for
                outputs that are broken, errors and hangs. None: the engine becomes `current`.
        """
        identity = loaded.artefact.id
        if max_loss is None:
            max_loss = self.config.max_loss
        probation = Probation(
            self.config.probation,
            self.pipeline.record,
            identity,
            self.service.serving.id,
            max_loss if on_commit is None else 1.0,
            first=self.service.is_degraded or on_commit is not None,
        )
        swap = SwapInProgress(loaded, tracker, verdict, probation, self.pipeline.dropped.total(), on_commit)
        try:
            tracker.enter_probation(identity)
        except AgentError as error:
            loaded.engine.close()
            self._fail(swap, error)
            return
        self._swap = swap
        run = self.run_in_main_thread
        events = TrialEvents(
            live=lambda ts, skipped: run(lambda: self._on_live(swap, ts, skipped)),
            failed=lambda error, ts, waited: run(lambda: self._on_failed(swap, error, ts, waited)),
            ended=lambda: run(lambda: self._on_end(swap)),
        )
        try:
            self.pipeline.start_trial(identity, loaded.engine, events, own_outputs=on_commit is not None)
        except AgentError as error:
            self._swap = None
            self._fail(swap, error)

    def tick(self, states: CameraStates) -> None:
        """Judge the candidate by the newest frames, and try again to save an engine that the disk has refused."""
        swap = self._swap
        if swap is not None and swap.announced is not None and not swap.is_going_back:
            objection = _objection(swap, states, is_last=swap.probation.is_finished)
            if objection is not None:
                self._go_back(swap, objection)
            elif swap.probation.is_finished:
                self._commit_if_serving(swap)
        if self._unsaved is not None and self.clock.monotonic_s() >= self._save_at_s:
            self._save(self._unsaved)

    @property
    def can_recall(self) -> bool:
        """True while a candidate is on probation that nobody has recalled yet."""
        swap = self._swap
        return swap is not None and not swap.is_proven and swap.recall is None

    def recall(self, tracker: JobTracker) -> None:
        """Take the candidate on probation back, before the next frame. Only where `can_recall`.

        tracker: the operator's rollback. It succeeds once the previous engine serves again, also where the frame path
        has gone back by itself.
        """
        assert self._swap is not None
        self._swap.recall = tracker
        self._go_back(self._swap, _recalled())

    def withdraw(self, tracker: JobTracker, reason: str) -> None:
        """Take the engine of this job back, if it is on probation, though nothing speaks against it."""
        swap = self._swap
        if swap is not None and swap.tracker is tracker:
            self._go_back(
                swap, AgentError(CANCELLED, reason, "a probation that runs to its end", "send the command again")
            )

    def give_up(self, error: AgentError) -> None:
        """Take the engine on trial back, or only end the swap where the frame path has gone back already."""
        swap = self._swap
        if swap is None:
            return
        self._go_back(swap, error)
        if not swap.is_going_back:
            self._swap = None
            self._fail(swap, error)

    def stop(self, reason: str) -> None:
        """End the probation, because the frame path is stopped: the candidate is not committed."""
        swap, self._swap = self._swap, None
        if swap is not None:
            self._fail(swap, AgentError(CANCELLED, reason, "a probation that runs to its end", "start the job again"))

    def _on_live(self, swap: SwapInProgress, ts: float, skipped: int) -> None:
        """The candidate has answered the frame of capture time `ts`."""
        if swap is not self._swap:
            return
        self._announce(swap, ts, skipped)
        if swap.is_proven or swap.probation.is_finished:
            self._commit_if_serving(swap)

    def _on_end(self, swap: SwapInProgress) -> None:
        """The frames have ended: the candidate is judged by those that it answered, or by its verdict alone."""
        if swap is not self._swap:
            return
        if self.pipeline.error is not None:
            self._swap = None
            found, expected = "the frame path has failed", "frames until the probation has ended"
            self._fail(swap, AgentError("swap.stopped", found, expected, "see the log for the cause"))
            return
        error = _recalled() if swap.recall is not None else None
        if error is None and swap.announced is not None:
            error = _objection(swap, self.pipeline.observer.states(), is_last=True)
        if error is not None:
            self._on_failed(swap, error, None, False)
            return
        if swap.announced is None:
            self._announce(swap, None, 0)
        self._commit(swap)

    def _on_failed(self, swap: SwapInProgress, error: AgentError, ts: float | None, waited: bool) -> None:
        """The previous engine serves again; ts, waited: as for TrialEvents.failed."""
        if swap is not self._swap:
            return
        self._swap = None
        if swap.announced is not None:
            self.on_engine_changed(None, self.pipeline.serving_since(ts))
        rollback = Rollback(
            ts,
            swap.loaded.artefact.id,
            swap.tracker.trigger,
            error.code,
            swap.probation.frames,
            swap.probation.affected_frames(error, waited),
            self.pipeline.dropped.total() - swap.missed_before,
        )
        self.summary.rollbacks.append(rollback)
        detail = _event_detail(rollback)
        policy = self.policies.taking_over(self.service.serving.id)
        self.reporter.event("rollback", logging.WARNING, **detail, **policy, message=str(error))
        self._reject(swap, {**detail, "found": error.found})
        swap.tracker.fail(error, rolled_back=True)
        self._answer_recall(swap)
        if error.code not in ("probation.recalled", CANCELLED):  # it has not failed by itself
            self.on_rolled_back(rollback.artefact)

    def _fail(self, swap: SwapInProgress, error: AgentError) -> None:
        """End a swap for a reason that is not the candidate's fault."""
        self._reject(swap, {"trigger": swap.tracker.trigger, "reason": error.code, "found": error.found})
        swap.tracker.fail(error)
        self._answer_recall(swap)

    def _reject(self, swap: SwapInProgress, rollback: dict[str, Any]) -> None:
        """Remove the candidate before the journal has the end: the next process would not come back to it."""
        if not swap.is_proven:
            with self.reporter.reporting_errors():
                self.service.reject(swap.loaded.artefact, rollback)

    def _answer_recall(self, swap: SwapInProgress) -> None:
        if swap.recall is not None:  # `current` has not moved
            swap.recall.succeed({"artefact": self.service.serving.id})

    def _announce(self, swap: SwapInProgress, ts: float | None, skipped: int) -> None:
        """Report that the candidate serves from the frame of capture time `ts` on, though it is not committed yet."""
        self.on_engine_changed(swap.loaded, self.pipeline.serving_since(ts))
        tracker, verdict = swap.tracker, swap.verdict
        swap.announced = Swap(
            ts,
            swap.loaded.artefact.id,
            tracker.trigger,
            round(self.clock.monotonic_s() - tracker.started_s, 2),
            verdict.fidelity if verdict else None,
            verdict.fidelity_serving if verdict else None,
            skipped,
            verdict.latency_ms if verdict else None,
            verdict.latency_float_ms if verdict else None,
        )
        kind: EventKind = "rollback" if tracker.trigger == "rollback" else "swap"
        policy = self.policies.taking_over(swap.announced.artefact)
        self.reporter.event(kind, **_event_detail(swap.announced), **policy)

    def _go_back(self, swap: SwapInProgress, error: AgentError) -> None:
        """Let the frame path go back, unless it has done so, or has ended: then one of its events follows."""
        swap.is_going_back = self.pipeline.loop.roll_back(error)

    def _commit_if_serving(self, swap: SwapInProgress) -> None:
        """Commit, unless the frame path has just gone back, or has ended: then one of its events follows."""
        loop = self.pipeline.loop
        if loop.commit() if swap.on_commit is None else loop.has_live_candidate:
            self._commit(swap)

    def _commit(self, swap: SwapInProgress) -> None:
        """Keep the engine in service, whatever the disk does, and make it current.

        That of a new model stays on trial until this run ends: what follows a commit has the shapes of the model of
        before.
        """
        self._swap = None
        assert swap.announced is not None, "an engine is committed once it serves"
        self.summary.swaps.append(swap.announced)
        self.summary.artefact = str(swap.loaded.artefact.path)
        if swap.on_commit is not None:
            swap.on_commit()
            return
        error = self._save(swap)
        if error is None:
            swap.tracker.succeed({"artefact": swap.announced.artefact, "fidelity": swap.announced.fidelity})
        else:
            swap.tracker.fail(error)

    def _save(self, swap: SwapInProgress) -> TaredError | None:
        """Make the engine current. If the disk refuses, try again later, unless another engine comes first."""
        self._unsaved = None
        before = self.service.serving.id
        try:
            self.service.commit(swap.loaded)
        except TaredError as error:
            self._unsaved, self._save_at_s = swap, self.clock.monotonic_s() + _RETRY_S
            remedy = f"{error.remedy}; the engine serves, tared tries again, and a restart starts the previous engine"
            return AgentError(error.code, error.found, error.expected, remedy)
        self.reporter.event(
            "commit",
            artefact=swap.loaded.artefact.id,
            trigger=swap.tracker.trigger,
            frames=swap.probation.frames,
            seconds=round(swap.probation.seconds, 1),
            late=swap.probation.late_frames,
            fidelity_frames=sum(state.fidelity.n for state in self.pipeline.observer.states().values()),
            p99_judged=swap.probation.judges_p99,
            **({} if swap.is_proven else self.policies.not_inherited(before, swap.loaded.artefact.id)),
        )
        return None


def _objection(swap: SwapInProgress, states: CameraStates, is_last: bool) -> AgentError | None:
    """Return what speaks against the candidate, by the cameras whose scene does not drift from what it was made for."""
    calm = [state for state in states.values() if state.drift is None or state.drift.state == "calm"]
    losses = [state.gain for state in calm if is_last and state.is_loss]
    return swap.probation.objection([state.gain for state in calm], losses)


def _recalled() -> AgentError:
    found, remedy = "the operator's rollback", "recalibrate from other frames"
    return AgentError("probation.recalled", found, "a probation that runs to its end", remedy)


def _event_detail(event: Swap | Rollback) -> dict[str, Any]:
    """Return the fields of an MQTT event, where `ts` is Unix time."""
    return {"capture_ts" if key == "ts" else key: value for key, value in asdict(event).items()}
