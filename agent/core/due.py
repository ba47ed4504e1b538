"""Which job is due, and what holds it back.

`find_due` looks for these, the most urgent first:

1. a first calibration, while the float reference serves: with what was made offline, or else of the board's own frames;
2. a switch to a known regime, whose scales fit a scene that has drifted;
3. a recalibration, after the reference was found wrong, with which the last one was made;
4. a recalibration, for a drift alarm;
5. a recalibration, for a time of the schedule;
6. a raise of precision, where the fidelity is too low although the scales fit the scene: then INT8 itself costs it.

A `Hindrance` holds one back: the settings, limits, a view that shows nothing, or a refusal since which nothing has
changed. A time of the schedule is the owner's word, so no refusal holds it back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from typing import TYPE_CHECKING

from agent.core.facts import BoardFacts, Now
from agent.core.kinds import (
    DriftAlarm,
    FirstStart,
    Kind,
    OfflineStart,
    RaisedPrecision,
    Scheduled,
    Switch,
    Trigger,
    WrongReference,
)
from agent.core.state import Hindrance, State
from agent.monitoring.view import BLIND, FROZEN
from agent.planning.raising import EXHAUSTED

if TYPE_CHECKING:
    from agent.config import Config
    from agent.monitoring.camera_monitor import CameraState, CameraStates
    from agent.monitoring.drift import DriftState

ROLLBACK_LOOP = "recalibration.rollback_loop"
CAP = "recalibration.cap"

_CAUSES = {
    Trigger.FIRST_START: "a first start",
    Trigger.REFERENCE: "a reference that was wrong",
    Trigger.ALARM: "an alarm",
    Trigger.SCHEDULE: "a time of the schedule",
    Trigger.PRECISION: "low fidelity",
}
_ENOUGH = 128  # frames: two minutes at the usual pace of observation
_LATE_S = 3600.0  # a time of the schedule still counts for so long: the daemon was busy, or not running
_SET_S = 1_735_689_600.0  # 1 January 2025, UTC: a clock before that has not been set since the board was powered


@dataclass(frozen=True)
class Due:
    """The kind of job that may start now, or else what holds back the most urgent one; neither where none is due.

    capped: The hindrance of one for which there were too many jobs today.
    """

    kind: Kind | None = None
    held_back: Hindrance | None = None
    capped: Hindrance | None = None


def find_due(now: Now, settings: Config, state: State, facts: BoardFacts) -> Due:
    """Return the most urgent job that nothing holds back."""
    held_back: Hindrance | None = None
    capped: Hindrance | None = None
    for kind in _wanted(now, settings, state, facts):
        hindrance = _hindrance(kind, now, settings, state, facts)
        if hindrance is None:
            return Due(kind, held_back, capped)
        held_back = held_back or hindrance
        capped = hindrance if hindrance.code == CAP else capped
    return Due(None, held_back, capped)


def _wanted(now: Now, settings: Config, state: State, facts: BoardFacts) -> Iterator[Kind]:
    """Yield what asks for a job, the most urgent first."""
    if facts.is_degraded:
        offline = next((each for each in facts.offline if each.attempt and each.attempt not in state.vain), None)
        yield OfflineStart(offline.setting, offline.path, offline.attempt) if offline is not None else FirstStart()
    states = list(facts.cameras.values())
    judged = [each for each in states if not each.absent and each.drift is not None and shows_scene(each, facts)]
    switch_to = _switch_to([each.drift for each in judged if each.drift is not None], settings.drift.tolerance_db)
    if switch_to:
        yield Switch(switch_to)
    if state.reference_is_new:
        yield WrongReference()
    if any(map(_alarms, states)):
        yield DriftAlarm()
    times = settings.recalibration.schedule
    due = scheduled(times, state.answered, now.wall_s) if judged or facts.is_degraded else ""
    if due:
        yield Scheduled(due)
    low = next((each for each in judged if is_low(each, settings)), None)
    if settings.recalibration.raise_precision and low is not None:
        rung = state.memory.next_rung(facts.serving)
        yield RaisedPrecision(rung, low.settled.interval.estimate, facts.serving)


def _hindrance(kind: Kind, now: Now, settings: Config, state: State, facts: BoardFacts) -> Hindrance | None:
    """Return what holds this kind back; None where it may start."""
    is_first, states = facts.is_degraded and kind.trigger is Trigger.FIRST_START, facts.cameras.values()
    if not settings.recalibration.automatic and not is_first:
        return Hindrance("recalibration.automatic", "recalibration.automatic is false", "recalibrate by command")
    outage = outage_hindrance(facts.cameras)
    if outage is not None:
        return outage
    if not any(not each.outage and each.view.trouble != FROZEN for each in states):
        return _trouble(states)
    if isinstance(kind, (FirstStart, DriftAlarm)) and (vain := _refused_before(state, facts)) is not None:
        return vain
    if isinstance(kind, RaisedPrecision) and not kind.rung:
        found = f"fidelity is low, and the plans that raise the precision of {facts.serving} were tried, or taken back"
        remedy = "retrain the layers that refused/ names, or accept more with recalibration.max_loss"
        return Hindrance(EXHAUSTED, found, remedy)
    return (
        _pause(now, settings, state)
        or (_too_soon(now, settings, state) if isinstance(kind, Switch) else None)
        or (_unseen(facts) if isinstance(kind, DriftAlarm) else None)
        or (_cap(kind, now, settings, state) if not isinstance(kind, Switch) else None)
    )


def stopped_by(now: Now, settings: Config, state: State) -> str:
    """Return why no job starts by itself: a configuration key or an error code; empty where jobs may start."""
    if not settings.recalibration.automatic:
        return "recalibration.automatic"
    return ROLLBACK_LOOP if is_looping(now, settings, state) else ""


def is_looping(now: Now, settings: Config, state: State) -> bool:
    """Return True after too many rollbacks within a day: then nothing starts by itself."""
    return state.memory.restraint.is_looping(now.monotonic_s, settings.probation.rollbacks_per_day)


def _pause(now: Now, settings: Config, state: State) -> Hindrance | None:
    if is_looping(now, settings, state):
        found = "too many candidates were rolled back in a day"
        return Hindrance(
            ROLLBACK_LOOP, found, "see the rollback events; recalibrate by command once their cause is gone"
        )
    pause_s = settings.recalibration.cooldown_s
    if now.monotonic_s - state.memory.restraint.failed_s >= pause_s:
        return None
    found = f"a job failed less than {pause_s:g} s ago"
    return Hindrance("recalibration.cooldown", found, "wait for recalibration.cooldown_s to pass")


def _too_soon(now: Now, settings: Config, state: State) -> Hindrance | None:
    pause_s = settings.regimes.cooldown_s
    if now.monotonic_s - state.memory.restraint.switched_s >= pause_s:
        return None
    return Hindrance("regimes.cooldown", "regimes were switched a moment ago", f"wait {pause_s:g} s")


def _unseen(facts: BoardFacts) -> Hindrance | None:
    """Return the hindrance of an alarm that only views raise which show nothing."""
    alarming = list(filter(_alarms, facts.cameras.values()))
    return None if any(shows_scene(each, facts) for each in alarming) else _trouble(alarming)


def _cap(kind: Kind, now: Now, settings: Config, state: State) -> Hindrance | None:
    per_day = settings.recalibration.per_day
    if state.memory.restraint.is_below_cap(now.monotonic_s, per_day):
        return None
    found = f"{_CAUSES[kind.trigger]} after {per_day} jobs in a day"
    return Hindrance(CAP, found, "check the scene, or raise recalibration.per_day")


def _refused_before(state: State, facts: BoardFacts) -> Hindrance | None:
    """Return a hindrance if a job was refused, and neither the settings nor what the cameras show has changed."""
    refusal = state.refusal(facts.settings)
    if refusal is None:
        return None
    changed = [each for each in facts.cameras.values() if _has_changed(each)]
    if changed:
        return None if any(shows_scene(each, facts) for each in changed) else _trouble(changed)
    found = f"a candidate was refused, and nothing has changed since: {refusal.error.found}"
    remedy = f"{refusal.error.remedy}; or change the settings, or recalibrate by command"
    return Hindrance("recalibration.unchanged", found, remedy)


def _switch_to(drifts: Sequence[DriftState], tolerance_db: float) -> str:
    """Return the regime that one camera's scene needs, if no other camera's scene is worse under it; else empty."""
    for regime in filter(None, (drift.switch_to for drift in drifts)):
        # A scene is worse under it than under the engine in service, and not well.
        if not any(drift.gains_db.get(regime, 0.0) > max(tolerance_db, drift.serving_db) for drift in drifts):
            return regime
    return ""


def outage_hindrance(cameras: CameraStates) -> Hindrance | None:
    """Return the hindrance of an observer that observes nothing; None while it observes a camera."""
    outages = [each.outage for each in cameras.values() if each.outage]
    if not outages or len(outages) < len(cameras):
        return None
    return Hindrance("observer", f"no frame is observed: {outages[0]}", "wait, or see the observer's error")


def _trouble(states: Iterable[CameraState]) -> Hindrance:
    """Return the hindrance of views of which none shows the scene."""
    trouble = next(each.view.trouble for each in states if each.view.trouble)
    remedy = "check the camera; if the view is intended, recalibrate by command"
    return Hindrance(f"view.{trouble}", f"the view is {trouble}", remedy)


def shows_scene(camera: CameraState, facts: BoardFacts) -> bool:
    """Return False while the view is in trouble, which no scales cure, but only somebody at the camera.

    A covered lens shows nothing, whatever a classifier makes of it. A dark street with detected cars counts.
    """
    finds = facts.detects and camera.informative > 0
    return not camera.view.trouble or (camera.view.trouble == BLIND and finds)


def _alarms(camera: CameraState) -> bool:
    return not camera.absent and camera.drift is not None and camera.drift.state == "alarm"


def _has_changed(camera: CameraState) -> bool:
    """Return True if this camera's scene is not that of the refused job any more, by an alarm's evidence."""
    return not camera.absent and camera.since_refusal is not None and camera.since_refusal.state == "alarm"


def is_low(camera: CameraState, settings: Config) -> bool:
    """Return True if the engine loses more than `recalibration.max_loss`, with 95 % confidence, and its scales fit.

    The confidence needs as many frames as a calibration, or 128, because neighbouring frames are right and wrong
    together. Where the scales fit, no recalibration would help.
    """
    drift, settled = camera.drift, camera.settled.interval
    scales_fit = drift is not None and drift.state == "calm" and drift.serving_db <= settings.drift.tolerance_db
    sees = not camera.outage and not camera.view.trouble
    enough = settled.n >= min(settings.calibration.frames, _ENOUGH)
    return scales_fit and sees and enough and settled.high < 1.0 - settings.max_loss


def scheduled(times: Sequence[str], answered: Collection[str], now_s: float) -> str:
    """Return the latest time that is due at this wall-clock time, as `2026-01-31 03:00`; empty for none.

    A time is named with its day. So a clock that is set back finds it answered, and one that is set forward finds each
    time at most once. A time that daylight saving leaves out counts an hour later; one that comes twice counts once.

    Args:
        times: Local times of day as HH:MM, each of which starts one job a day.
        answered: The times for which a job was started.
    """
    if now_s < _SET_S:
        return ""
    today = date.fromtimestamp(now_s)
    waiting = [
        (due.timestamp(), f"{due:%Y-%m-%d %H:%M}")
        for day in (today, today - timedelta(days=1))  # shortly after midnight an evening's time may still wait
        for due in (datetime.combine(day, time.fromisoformat(each)) for each in times)
    ]
    counting = [each for each in waiting if 0.0 <= now_s - each[0] < _LATE_S and each[1] not in answered]
    return max(counting)[1] if counting else ""
