"""Jobs by the clock: at each listed local time of each day, once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agent.common.errors import AgentError
from agent.config import Config
from agent.jobs.job import JobJournal
from agent.jobs.limits import AutomationLimits, PrecisionAttempts
from agent.models.engine_service import EngineService
from agent.monitoring.camera_monitor import CameraState, CameraStates
from agent.monitoring.drift import DriftState
from agent.monitoring.view import BLIND, FROZEN
from agent.planning.precision_raise import PrecisionRaise

_ENOUGH = 128  # frames: two minutes at the usual pace


def is_low(state: CameraState, config: Config) -> bool:
    """Whether what serves loses more than `recalibration.max_loss`, with 95 % confidence, and no recalibration helps.

    As many frames have to say so as make a calibration, or 128: neighbours are right and wrong together.
    """
    drift, settled = state.drift, state.settled.interval
    scales_fit = drift is not None and drift.state == "calm" and drift.serving_db <= config.drift.tolerance_db
    sees = not state.outage and not state.view.trouble
    enough = settled.n >= min(config.calibration.frames, _ENOUGH)
    return scales_fit and sees and enough and settled.high < 1.0 - config.recalibration.max_loss


_LATE_S = 3600.0  # within which a time still counts: the daemon was busy, or not there
_DAY_S = 86_400.0
_SET_S = 1_735_689_600.0  # 1 January 2025, UTC: a clock before that has not been set since the board has power


def answered_times(journal: JobJournal) -> list[str]:
    """What earlier processes answered, as `Schedule.due` named it."""
    try:
        records = journal.records()
    except AgentError:  # told of when it was opened, and no job begins that cannot be journaled
        return []
    return [str(record.request.get("due")) for record in records if record.trigger == "schedule"]


class Schedule:
    """Local times of day as HH:MM. `fired` is what earlier processes answered, as `due` named it.

    A time is named with its day, so that a clock that is set back finds it answered, and one that is set forward finds
    each time at most once. A time that summer time leaves out is taken an hour later; one that comes twice counts once.
    """

    def __init__(self, times: Sequence[str], fired: Iterable[str] = ()) -> None:
        self._times = [(int(hour), int(minute)) for hour, minute in (each.split(":") for each in times)]
        self._fired = set(fired)

    def due(self, now_s: float) -> str:
        """The latest time that waits for an answer at this wall-clock time, as `2026-01-31 03:00`; empty for none."""
        if now_s < _SET_S:
            return ""
        found = [
            (began_s, name)
            for day_s in (now_s, now_s - _DAY_S)  # shortly after midnight an evening's time may still wait
            for began_s, name in self._of_day(time.localtime(day_s))
            if 0.0 <= now_s - began_s < _LATE_S and name not in self._fired
        ]
        return max(found)[1] if found else ""

    def answered(self, name: str) -> None:
        """A job was begun for it."""
        self._fired.add(name)

    def _of_day(self, day: time.struct_time) -> list[tuple[float, str]]:
        return [
            (
                time.mktime((day.tm_year, day.tm_mon, day.tm_mday, hour, minute, 0, 0, 0, -1)),
                f"{day.tm_year:04}-{day.tm_mon:02}-{day.tm_mday:02} {hour:02}:{minute:02}",
            )
            for hour, minute in self._times
        ]


_RANKED_WITHIN = 1.0 / 3.0  # of the time that a job may take: the build and the verdict are still to come


@dataclass(frozen=True)
class Trigger:
    """To start a job by this trigger, or with trigger switch to put the artefact `switch_to` in service.

    request: what the journal keeps of it.
    """

    trigger: str
    request: Mapping[str, Any] = field(default_factory=dict)
    switch_to: str = ""
    raising: PrecisionRaise | None = None


class Triggers:
    """Looks at what the observer found; on_error hears of jobs that are too many, on_view of another view."""

    def __init__(
        self,
        config: Config,
        service: EngineService,
        restraint: AutomationLimits,
        attempts: PrecisionAttempts,
        schedule: Schedule,
        on_error: Callable[[AgentError], None],
        on_view: Callable[[], None],
    ) -> None:
        self.config = config
        self._service = service
        self._restraint = restraint
        self._attempts = attempts
        self._schedule = schedule
        self._on_error = on_error
        self._on_view = on_view
        self._capped = False  # and told so
        self._troubles: dict[str, str] = {}  # with each camera's view, when it was last looked at

    def look(self, states: CameraStates, idle: bool) -> Trigger | None:
        """What there is to do now; None where nothing is, or where something is being done."""
        same_view = self._are_same_views(states)
        # Else there is nothing to collect.
        sees = any(not state.outage and state.view.trouble != FROZEN for state in states.values())
        if not (idle and sees and same_view and self._restraint.may_start):
            return None
        if self._service.degraded:
            return Trigger("first-start")
        if not self.config.recalibration.automatic:
            return None
        present = (state for state in states.values() if not state.absent)
        judged = [state for state in present if state.drift is not None and self._shows_the_scene(state)]
        return self._answer(judged) if judged else None

    def _answer(self, states: Sequence[CameraState]) -> Trigger | None:
        """Do about the scenes what can be done, the quickest first."""
        drifts = [state.drift for state in states if state.drift is not None]
        switch_to = self._switch_to(drifts)
        if switch_to and self._restraint.may_switch:
            return Trigger("switch", {"artefact": switch_to}, switch_to=switch_to)
        if any(drift.state == "alarm" for drift in drifts):
            return Trigger("alarm") if self._may_start_job("an alarm") else None
        due = self._schedule.due(time.time())
        if due:
            return Trigger("schedule", {"due": due}) if self._may_start_job("a time of the schedule") else None
        return self._low_fidelity(states)

    def _switch_to(self, drifts: Sequence[DriftState]) -> str:
        """The regime that one camera's scene asks for, and that no other's would be left by; else empty."""
        tolerance_db = self.config.drift.tolerance_db
        for wanted in filter(None, (drift.switch_to for drift in drifts)):
            if not any(drift.is_left_by(wanted, tolerance_db) for drift in drifts):
                return wanted
        return ""

    def _low_fidelity(self, states: Sequence[CameraState]) -> Trigger | None:
        recalibration, serving = self.config.recalibration, self._service.serving.id
        state = next((state for state in states if is_low(state, self.config)), None)
        if not recalibration.raise_precision or state is None:
            return None
        rung = self._attempts.next_rung(serving)
        if not rung or not self._may_start_job("low fidelity"):
            return None
        fidelity, budget_s = state.settled.interval.estimate, _RANKED_WITHIN * recalibration.timeout_s
        return Trigger("precision", {"rung": rung, "for": serving}, raising=PrecisionRaise(rung, fidelity, budget_s))

    def _shows_the_scene(self, state: CameraState) -> bool:
        """No scales cure the view's trouble: whoever is at the camera does, or the operator says that it is meant so.

        A covered lens shows nothing, whatever a classifier calls it; a dark street with cars is something to go by.
        """
        found = self.config.model.task == "detect" and state.telling > 0
        return not state.view.trouble or (state.view.trouble == BLIND and found)

    def _are_same_views(self, states: CameraStates) -> bool:
        """Else what was collected is of other ones, and no cure for these, nor a sign that something is seen now."""
        troubles = {camera: state.view.trouble for camera, state in states.items()}
        changed = {
            camera: trouble
            for camera, trouble in troubles.items()
            if trouble not in (self._troubles.get(camera, ""), FROZEN)  # of a frozen one nothing is collected
        }
        if not changed:
            return True
        self._troubles |= changed
        self._on_view()
        return False

    def _may_start_job(self, why: str) -> bool:
        """Unless jobs were too many today, which is told once: a scene that never settles is for people to look at."""
        if self._restraint.has_job_left:
            self._capped = False
            return True
        if self._capped:
            return False
        self._capped = True
        per_day = self.config.recalibration.per_day
        found, remedy = f"{why} after {per_day} jobs in a day", "look at the scene, or raise the cap"
        self._on_error(AgentError("recalibration.cap", found, "a scene that settles", remedy))
        return False
