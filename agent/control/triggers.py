"""Decide which job is due: the triggers of jobs, what holds them back, and the schedule.

`Triggers.next_due` is polled with the observer's states. It answers with the first of these that nothing holds back:

1. a first calibration, while the float reference serves: with what was made offline, or else of the board's own frames;
2. a switch to a known regime, whose scales fit a scene that has drifted;
3. a recalibration, after the reference was found wrong, with which the last one was made;
4. a recalibration, for a drift alarm;
5. a recalibration, for a time of the schedule;
6. a raise of precision, where `is_low` says that the fidelity is too low although the scales fit the scene: then INT8
   itself costs the fidelity. PrecisionAttempts (agent.jobs.limits) says with which rung to begin.

A `Hindrance` holds a trigger back: limits, a view that shows nothing, or a refusal since which nothing has changed.
A time of the schedule is the owner's word, so no refusal holds it back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta
from typing import Any

from agent.common.clock import SYSTEM_CLOCK, Clock
from agent.common.errors import AgentError
from agent.config import Config
from agent.jobs.job import JobJournal
from agent.jobs.limits import ROLLBACK_LOOP, AutomationLimits, PrecisionAttempts
from agent.jobs.offline_queue import OfflineAttempt, OfflineQueue
from agent.jobs.refusal import RefusalMemory
from agent.models.engine_service import EngineService
from agent.monitoring.camera_monitor import CameraState, CameraStates
from agent.monitoring.drift import DriftState
from agent.monitoring.view import BLIND, FROZEN
from agent.planning.raising import EXHAUSTED, PrecisionRaise
from agent.vision.tasks.opening import open_task


@dataclass(frozen=True)
class Trigger:
    """The reason for a job that is due.

    Args:
        kind: first-start, switch, reference, alarm, schedule or precision.
        request: What the journal keeps of it; of kind switch, the artefact to put in service.
        raising: Of kind precision: by how much it is raised; None where nothing is left to try, and it is held back.
        offline: Of kind first-start: the offline work that it begins with; None for frames of the board's own.
    """

    kind: str
    request: Mapping[str, Any] = field(default_factory=dict)
    raising: PrecisionRaise | None = None
    offline: OfflineAttempt | None = None


@dataclass(frozen=True)
class Hindrance:
    """The reason why a job that is due does not start by itself.

    Args:
        code: For programs: a configuration key, or an error code.
        found: The reason, as a clause.
        remedy: As in an error.
    """

    code: str
    found: str
    remedy: str


_CAUSES = {
    "first-start": "a first start",
    "reference": "a reference that was wrong",
    "alarm": "an alarm",
    "schedule": "a time of the schedule",
    "precision": "low fidelity",
}


@dataclass
class Triggers:
    """Decides by the observer's states and the configured rules which job is due.

    Args:
        config: May be replaced.
        on_error: Called once when a job is due after too many in a day.
        on_view_changed: Called when a camera's view has changed, so that the collected frames are of another one.

    `is_reference_new` is true from the moment that a reference took the place of a wrong one, until a job has started.
    `held_back` says why the most urgent trigger of the latest poll starts nothing; None where there is none.
    """

    config: Config
    service: EngineService
    limits: AutomationLimits
    attempts: PrecisionAttempts
    schedule: Schedule
    refusals: RefusalMemory
    offline: OfflineQueue
    on_error: Callable[[AgentError], None]
    on_view_changed: Callable[[], None]
    clock: Clock = SYSTEM_CLOCK
    is_reference_new: bool = field(default=False, init=False)
    held_back: Hindrance | None = field(default=None, init=False)
    _is_cap_reported: bool = field(default=False, init=False)
    # The view's trouble at the last poll, by camera.
    _troubles: dict[str, str] = field(default_factory=dict, init=False)

    def next_due(self, states: CameraStates, idle: bool) -> Trigger | None:
        """Return the trigger that is due now; None if there is none, or the daemon is not idle."""
        same_view = self._are_same_views(states)
        self.held_back = None
        for trigger in self._wanted(states) if idle else ():
            hindrance = self._hindrance(trigger, states)
            if hindrance is None:
                return trigger if same_view else None
            self.held_back = self.held_back or hindrance
        return None

    def _wanted(self, states: CameraStates) -> Iterator[Trigger]:
        """Yield what asks for a job or a switch, the most urgent first."""
        if self.service.is_degraded:
            offline = self.offline.next(self.refusals.settings)
            yield Trigger("first-start", offline.request if offline is not None else {}, offline=offline)
        alarming = [state for state in states.values() if _alarms(state)]
        judged = [
            state
            for state in states.values()
            if not state.absent and state.drift is not None and self._shows_scene(state)
        ]
        switch_to = self._switch_to([state.drift for state in judged if state.drift is not None])
        if switch_to:
            yield Trigger("switch", {"artefact": switch_to})
        if self.is_reference_new:
            yield Trigger("reference")
        if alarming:
            yield Trigger("alarm")
        due = self.schedule.due(self.clock.wall_s()) if judged or self.service.is_degraded else ""
        if due:
            yield Trigger("schedule", {"due": due})
        raising = self._raise_precision(judged)
        if raising is not None:
            yield raising

    def _hindrance(self, trigger: Trigger, states: CameraStates) -> Hindrance | None:
        """Return what holds this trigger back; None where it may start."""
        recalibration, kind = self.config.recalibration, trigger.kind
        if not recalibration.automatic and kind != "first-start":
            return Hindrance("recalibration.automatic", "recalibration.automatic is false", "recalibrate by command")
        outage = outage_hindrance(states)
        if outage is not None:
            return outage
        if not any(not state.outage and state.view.trouble != FROZEN for state in states.values()):
            return _trouble(states.values())
        is_own = kind in ("first-start", "alarm") and trigger.offline is None
        vain = self._refused_before(states) if is_own else None
        if vain is not None:
            return vain
        if kind == "precision" and trigger.raising is None:
            serving = self.service.serving.id
            found = f"fidelity is low, and the plans that raise the precision of {serving} were tried, or taken back"
            remedy = "retrain the layers that refused/ names, or accept more with recalibration.max_loss"
            return Hindrance(EXHAUSTED, found, remedy)
        if not self.limits.may_start:
            return _pause(self.limits)
        if kind == "switch":
            found, remedy = "regimes were switched a moment ago", f"wait {self.config.regimes.cooldown_s:g} s"
            return None if self.limits.may_switch else Hindrance("regimes.cooldown", found, remedy)
        alarming = [state for state in states.values() if _alarms(state)]
        if kind == "alarm" and not any(self._shows_scene(state) for state in alarming):
            return _trouble(alarming)
        return self._cap(kind)

    def _refused_before(self, states: CameraStates) -> Hindrance | None:
        """Return a hindrance if a job was refused, and neither the settings nor what the cameras show has changed."""
        refusal = self.refusals.standing
        if refusal is None:
            return None
        changed = [state for state in states.values() if _has_changed(state)]
        if changed:
            return None if any(self._shows_scene(state) for state in changed) else _trouble(changed)
        found = f"a candidate was refused, and nothing has changed since: {refusal.error.found}"
        remedy = f"{refusal.error.remedy}; or change the settings, or recalibrate by command"
        return Hindrance("recalibration.unchanged", found, remedy)

    def _switch_to(self, drifts: Sequence[DriftState]) -> str:
        """Return the regime that one camera's scene needs, if no other camera's scene is worse under it; else empty."""
        tolerance_db = self.config.drift.tolerance_db
        for regime in filter(None, (drift.switch_to for drift in drifts)):
            # A scene is worse under it than under the engine in service, and not well.
            if not any(drift.gains_db.get(regime, 0.0) > max(tolerance_db, drift.serving_db) for drift in drifts):
                return regime
        return ""

    def _raise_precision(self, states: Sequence[CameraState]) -> Trigger | None:
        """Decide that precision is raised, from the first rung not tried in vain for the engine in service."""
        recalibration, serving = self.config.recalibration, self.service.serving.id
        state = next((state for state in states if is_low(state, self.config)), None)
        if not recalibration.raise_precision or state is None:
            return None
        rung, fidelity = self.attempts.next_rung(serving), state.settled.interval.estimate
        raising = PrecisionRaise(rung, fidelity) if rung else None  # None: held back, as nothing is left to try
        return Trigger("precision", {"rung": rung, "for": serving}, raising=raising)

    def _shows_scene(self, state: CameraState) -> bool:
        """Return False while the view is in trouble, which no scales cure, but only somebody at the camera.

        A covered lens shows nothing, whatever a classifier makes of it. A dark street with detected cars counts.
        """
        detects = open_task(self.config.model).finds_objects and state.informative > 0
        return not state.view.trouble or (state.view.trouble == BLIND and detects)

    def _are_same_views(self, states: CameraStates) -> bool:
        """Return False, and call on_view_changed, if a camera's view has changed since the last poll."""
        troubles = {camera: state.view.trouble for camera, state in states.items()}
        changed = {
            camera: trouble
            for camera, trouble in troubles.items()
            if trouble not in (self._troubles.get(camera, ""), FROZEN)  # a frozen view adds nothing to the collection
        }
        if not changed:
            return True
        self._troubles |= changed
        self.on_view_changed()
        return False

    def _cap(self, kind: str) -> Hindrance | None:
        """Return a hindrance, and report it once, if there were too many jobs today: the scene needs a person."""
        if self.limits.below_daily_cap:
            self._is_cap_reported = False
            return None
        found = f"{_CAUSES[kind]} after {self.config.recalibration.per_day} jobs in a day"
        hindrance = Hindrance("recalibration.cap", found, "check the scene, or raise recalibration.per_day")
        if not self._is_cap_reported:
            self._is_cap_reported = True
            self.on_error(AgentError(hindrance.code, hindrance.found, "a scene that settles", hindrance.remedy))
        return hindrance


def outage_hindrance(states: CameraStates) -> Hindrance | None:
    """Return the hindrance of an observer that observes nothing; None while it observes a camera."""
    outages = [state.outage for state in states.values() if state.outage]
    if not outages or len(outages) < len(states):
        return None
    return Hindrance("observer", f"no frame is observed: {outages[0]}", "wait, or see the observer's error")


def _alarms(state: CameraState) -> bool:
    return not state.absent and state.drift is not None and state.drift.state == "alarm"


def _has_changed(state: CameraState) -> bool:
    """Return True if this camera's scene is not that of the refused job any more, by an alarm's evidence."""
    return not state.absent and state.since_refusal is not None and state.since_refusal.state == "alarm"


def _trouble(states: Iterable[CameraState]) -> Hindrance:
    """Return the hindrance of views of which none shows the scene."""
    trouble = next(state.view.trouble for state in states if state.view.trouble)
    remedy = "check the camera; if the view is intended, recalibrate by command"
    return Hindrance(f"view.{trouble}", f"the view is {trouble}", remedy)


def _pause(limits: AutomationLimits) -> Hindrance:
    """Return the hindrance of limits under which nothing may start now."""
    if limits.in_rollback_loop:
        found = "too many candidates were rolled back in a day"
        return Hindrance(
            ROLLBACK_LOOP, found, "see the rollback events; recalibrate by command once their cause is gone"
        )
    found = f"a job failed less than {limits.job_pause_s:g} s ago"
    return Hindrance("recalibration.cooldown", found, "wait for recalibration.cooldown_s to pass")


_ENOUGH = 128  # frames: two minutes at the usual pace of observation


def is_low(state: CameraState, config: Config) -> bool:
    """Return True if the engine loses more than `recalibration.max_loss`, with 95 % confidence, and its scales fit.

    The confidence needs as many frames as a calibration, or 128, because neighbouring frames are right and wrong
    together. Where the scales fit, no recalibration would help.
    """
    drift, settled = state.drift, state.settled.interval
    scales_fit = drift is not None and drift.state == "calm" and drift.serving_db <= config.drift.tolerance_db
    sees = not state.outage and not state.view.trouble
    enough = settled.n >= min(config.calibration.frames, _ENOUGH)
    return scales_fit and sees and enough and settled.high < 1.0 - config.max_loss


_LATE_S = 3600.0  # a time of the schedule still counts for so long: the daemon was busy, or not running
_SET_S = 1_735_689_600.0  # 1 January 2025, UTC: a clock before that has not been set since the board was powered


def answered_times(journal: JobJournal) -> list[str]:
    """Return the times that earlier processes answered, as `Schedule.due` names them."""
    return [str(record.request.get("due")) for record in journal.records() if record.trigger == "schedule"]


class Schedule:
    """Local times of day as HH:MM, each of which starts one job a day.

    A time is named with its day. So a clock that is set back finds it answered, and one that is set forward finds each
    time at most once. A time that daylight saving leaves out counts an hour later; one that comes twice counts once.
    """

    def __init__(self, times: Sequence[str], answered: Iterable[str] = ()) -> None:
        """answered: the times that earlier processes answered, as `due` names them."""
        self._times = [time.fromisoformat(each) for each in times]
        self._answered = set(answered)

    def due(self, now_s: float) -> str:
        """Return the latest time that is due at this wall-clock time, as `2026-01-31 03:00`; empty for none."""
        if now_s < _SET_S:
            return ""
        today = date.fromtimestamp(now_s)
        waiting = [
            (due.timestamp(), f"{due:%Y-%m-%d %H:%M}")
            for day in (today, today - timedelta(days=1))  # shortly after midnight an evening's time may still wait
            for due in (datetime.combine(day, each) for each in self._times)
        ]
        counting = [each for each in waiting if 0.0 <= now_s - each[0] < _LATE_S and each[1] not in self._answered]
        return max(counting)[1] if counting else ""

    def mark_answered(self, name: str) -> None:
        """Note that a job was started for this time."""
        self._answered.add(name)
