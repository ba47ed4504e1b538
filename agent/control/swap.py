"""A change of engine under way: why, and what has come of it so far."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from agent.commands.dispatcher import CANCELLED
from agent.common.errors import AgentError
from agent.common.main_thread import RunInMainThread
from agent.config import Config
from agent.control.summary import Rollback, RunSummary, Swap
from agent.jobs.job import PROVEN, JobObserver
from agent.models.engine_service import EngineService, LoadedEngine
from agent.monitoring.camera_monitor import CameraStates
from agent.serving.pipeline import Pipeline
from agent.serving.trial import Probation, TrialEvents
from agent.uplink.reporter import Reporter
from agent.validation.verdict import Verdict
from calibrate.errors import TaredError


@dataclass(frozen=True)
class SwapRequest:
    """Why an engine is put in service, since when (monotonic s) that is wanted, and who hears of it.

    max_loss: what the operator accepts, None as configured.
    """

    trigger: str
    since_s: float
    report: JobObserver
    verdict: Verdict | None = None
    max_loss: float | None = None


@dataclass
class SwapInProgress:
    """An engine on trial. swap: since its first answer. recall: the operator's, who wants it taken back."""

    loaded: LoadedEngine
    cause: SwapRequest
    probation: Probation
    dropped_before: int
    swap: Swap | None = None
    is_going: bool = False
    recall: JobObserver | None = None

    @property
    def proven(self) -> bool:
        """Whether the engine has served before: its first answer is enough, and it stays in the store in any case."""
        return self.cause.trigger in PROVEN

    def complaint(self, states: CameraStates) -> AgentError | None:
        """What speaks against the engine.

        While a camera's scene drifts, its fidelity there does not: it was made for another light.
        """
        calm = (state for state in states.values() if state.drift is None or state.drift.state == "calm")
        return self.probation.complaint([state.gain for state in calm])

    def goes_live(self, ts: float | None, skipped: int) -> dict[str, Any]:
        """It serves from the frame of capture time `ts` on, though it is not kept yet; what to tell of it."""
        cause, verdict = self.cause, self.cause.verdict
        self.swap = Swap(
            ts,
            self.loaded.artefact.id,
            cause.trigger,
            round(time.monotonic() - cause.since_s, 2),
            verdict.fidelity if verdict else None,
            verdict.fidelity_serving if verdict else None,
            skipped,
        )
        return _told(self.swap)

    def is_kept(self, states: CameraStates) -> dict[str, Any]:
        """It is current; what to tell of that."""
        return {
            "artefact": self.loaded.artefact.id,
            "trigger": self.cause.trigger,
            "frames": self.probation.frames,
            "seconds": round(self.probation.seconds, 1),
            "late": self.probation.late,
            "fidelity_frames": sum(state.fidelity.n for state in states.values()),
            "p99_judged": self.probation.judges_p99,
        }

    def is_rolled_back(
        self, error: AgentError, ts: float | None, asked: bool, missed: int
    ) -> tuple[Rollback, dict[str, Any]]:
        """The engine before serves again, as TrialEvents has it; what to keep and to tell of that.

        missed: frames that nobody took meanwhile.
        """
        suffered = self.probation.suffered(error, asked)
        identity, trigger = self.loaded.artefact.id, self.cause.trigger
        rollback = Rollback(ts, identity, trigger, error.code, self.probation.frames, suffered, missed)
        return rollback, _told(rollback)


def recalled() -> AgentError:
    """Why a candidate goes that the operator wants taken back."""
    found, remedy = "the operator's rollback", "recalibrate from other frames"
    return AgentError("probation.recalled", found, "a probation to its end", remedy)


def _told(event: Swap | Rollback) -> dict[str, Any]:
    """The fields of an MQTT event, where `ts` is Unix time."""
    return {"capture_ts" if key == "ts" else key: value for key, value in asdict(event).items()}


_AGAIN_S = 60.0  # between attempts to make current what the disk has refused to


@dataclass(frozen=True)
class Witnesses:
    """Who hears what serves, and what does no more.

    serves(candidate, since): from capture time `since` on, by camera; None for what the service had before.
    rolled_back(artefact) hears of a candidate that was taken back for what it did, and not because somebody wanted it.
    """

    serves: Callable[[LoadedEngine | None, Mapping[str, float]], None]
    rolled_back: Callable[[str], None]


class EngineSwap:
    """At most one at a time. Everything in here runs in the supervisor's thread.

    `current` moves when the engine is kept, and not before: whatever ends the process during a probation, the engine
    before serves after it. A candidate that is not kept leaves the store.
    """

    def __init__(
        self,
        config: Config,
        service: EngineService,
        pipeline: Pipeline,
        reporter: Reporter,
        summary: RunSummary,
        post: RunInMainThread,
        witnesses: Witnesses,
    ) -> None:
        self.config = config
        self._service = service
        self._pipeline = pipeline
        self._reporter = reporter
        self._summary = summary
        self._post = post
        self._witnesses = witnesses
        self._change: SwapInProgress | None = None
        self._unsaved: SwapInProgress | None = None  # its engine serves, and the disk has refused to make it current
        self._save_at_s = 0.0

    @property
    def under_way(self) -> bool:
        """Whether an engine is on trial, or about to be, or the frame path has yet to part with the one before."""
        return self._change is not None or self._pipeline.loop.keeping

    def start(self, loaded: LoadedEngine, cause: SwapRequest) -> None:
        """Hand the engine to the frame path, once it is written down that it may serve."""
        identity = loaded.artefact.id
        probation = Probation(
            self.config.probation,
            self._pipeline.record,
            identity,
            self._service.serving.id,
            self.config.recalibration.max_loss if cause.max_loss is None else cause.max_loss,
            first=self._service.degraded,
        )
        change = SwapInProgress(loaded, cause, probation, self._pipeline.dropped.total())
        try:
            cause.report.probation(identity)
        except AgentError as error:
            loaded.engine.close()
            self._fail(change, error)
            return
        self._change = change
        events = TrialEvents(
            live=lambda ts, skipped: self._post(lambda: self._on_live(change, ts, skipped)),
            failed=lambda error, ts, asked: self._post(lambda: self._on_failed(change, error, ts, asked)),
            ended=lambda: self._post(lambda: self._on_end(change)),
        )
        try:
            self._pipeline.try_out(identity, loaded.engine, events)
        except AgentError as error:
            self._change = None
            self._fail(change, error)

    def tick(self, states: CameraStates) -> None:
        """Look at the candidate, and once more at a disk that has refused."""
        change = self._change
        if change is not None and change.swap is not None and not change.is_going:
            self._judge(change, states)
        if self._unsaved is not None and time.monotonic() >= self._save_at_s:
            self._save(self._unsaved)

    @property
    def recallable(self) -> bool:
        """Whether a candidate is on probation that nobody has taken back yet."""
        change = self._change
        return change is not None and not change.proven and change.recall is None

    def recall(self, report: JobObserver) -> bool:
        """Take the candidate on probation back, before the next frame; False where it is not `recallable`.

        report: hears of it once the engine before serves again, also where the frame path has been quicker.
        """
        change = self._change
        if change is None or not self.recallable:
            return False
        change.recall = report
        self._go_back(change, recalled())
        return True

    def stop(self, reason: str) -> None:
        """The frame path ends by somebody's will: what is on probation then is not kept."""
        change, self._change = self._change, None
        if change is not None:
            self._fail(change, AgentError(CANCELLED, reason, "a probation to its end", "start it again"))
            self._answer_recall(change)

    def _on_live(self, change: SwapInProgress, ts: float, skipped: int) -> None:
        """The candidate has answered the frame of capture time `ts`."""
        if change is not self._change:
            return
        self._announce(change, ts, skipped)
        if change.proven or change.probation.is_over:
            self._keep(change)

    def _on_end(self, change: SwapInProgress) -> None:
        """Frames have ended: what they have shown has to do, and without any the verdict."""
        if change is not self._change:
            return
        if self._pipeline.error is not None:
            self._change = None
            self._fail(change, AgentError("swap.stopped", "the frame path has failed", "frames", "see the log"))
            self._answer_recall(change)
            return
        if change.recall is not None:
            self._on_failed(change, recalled(), None, False)
            return
        if change.swap is None:
            self._announce(change, None, 0)
        elif (complaint := change.complaint(self._pipeline.observer.states())) is not None:
            self._on_failed(change, complaint, None, False)
            return
        self._commit(change)

    def _on_failed(self, change: SwapInProgress, error: AgentError, ts: float | None, asked: bool) -> None:
        """The engine before serves again, as TrialEvents has it."""
        if change is not self._change:
            return
        self._change = None
        if change.swap is not None:
            self._witnesses.serves(None, self._pipeline.since(ts))
        missed = self._pipeline.dropped.total() - change.dropped_before
        rollback, detail = change.is_rolled_back(error, ts, asked, missed)
        self._summary.rollbacks.append(rollback)
        self._reporter.event("rollback", logging.WARNING, **detail, message=str(error))
        self._reject(change, {**detail, "found": error.found})
        change.cause.report.roll_back(error)
        self._answer_recall(change)
        if error.code != "probation.recalled":
            self._witnesses.rolled_back(rollback.artefact)

    def _fail(self, change: SwapInProgress, error: AgentError) -> None:
        """It came to nothing without having done anything wrong."""
        self._reject(change, {"trigger": change.cause.trigger, "reason": error.code, "found": error.found})
        change.cause.report.fail(error)

    def _reject(self, change: SwapInProgress, why: dict[str, Any]) -> None:
        """Before the journal has the end: a process that is killed between would never come back to it."""
        if change.proven:
            return
        try:
            self._service.reject(change.loaded.artefact, why)
        except TaredError as error:
            self._reporter.error(error)

    def _answer_recall(self, change: SwapInProgress) -> None:
        """What is current has not moved."""
        if change.recall is not None:
            change.recall.succeed({"artefact": self._service.serving.id})

    def _announce(self, change: SwapInProgress, ts: float | None, skipped: int) -> None:
        """It serves, though it is not kept yet."""
        self._witnesses.serves(change.loaded, self._pipeline.since(ts))
        detail = change.goes_live(ts, skipped)
        self._reporter.event("rollback" if change.cause.trigger == "rollback" else "swap", **detail)

    def _judge(self, change: SwapInProgress, states: CameraStates) -> None:
        complaint = change.complaint(states)
        if complaint is not None:
            self._go_back(change, complaint)
        elif change.probation.is_over:
            self._keep(change)

    def _go_back(self, change: SwapInProgress, error: AgentError) -> None:
        """Unless the frame path has done so already, or has ended: it tells."""
        change.is_going = self._pipeline.loop.go_back(error)

    def _keep(self, change: SwapInProgress) -> None:
        """Unless the frame path has just taken it back, or has ended: it tells."""
        if self._pipeline.loop.keep():
            self._commit(change)

    def _commit(self, change: SwapInProgress) -> None:
        """It stays in service, whatever the disk says, and becomes current."""
        self._change = None
        assert change.swap is not None, "an engine is kept once it serves"
        self._summary.swaps.append(change.swap)
        self._summary.artefact = str(change.loaded.artefact.path)
        error = self._save(change)
        if error is None:
            change.cause.report.succeed({"artefact": change.swap.artefact, "fidelity": change.swap.fidelity})
        else:
            change.cause.report.fail(error)

    def _save(self, change: SwapInProgress) -> TaredError | None:
        """Make it current, and tell so; what a disk refuses is tried again later, unless another engine comes first."""
        self._unsaved = None
        try:
            self._service.commit(change.loaded)
        except TaredError as error:
            self._unsaved, self._save_at_s = change, time.monotonic() + _AGAIN_S
            remedy = f"{error.remedy}; it serves, is tried again, and a restart starts the engine before"
            return AgentError(error.code, error.found, error.expected, remedy)
        self._reporter.event("commit", **change.is_kept(self._pipeline.observer.states()))
        return None
