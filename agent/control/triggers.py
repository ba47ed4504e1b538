"""What gives occasion to act: an uncalibrated engine, the clock, drift, low fidelity. What is done is for `Operations`.

Everything in here runs in the supervisor's thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agent.config import Config
from agent.drift import DriftState
from agent.errors import AgentError
from agent.findings import ObserverState, States
from agent.low_fidelity import Attempts, is_low
from agent.raising import Raising
from agent.restraint import Restraint
from agent.schedule import Schedule
from agent.service import Service
from agent.view import BLIND, FROZEN

_RANKED_WITHIN = 1.0 / 3.0  # of the time that a job may take: the build and the verdict are still to come


@dataclass(frozen=True)
class Occasion:
    """To start a job by this trigger, or with trigger switch to put the artefact `switch_to` in service.

    request: what the journal keeps of it.
    """

    trigger: str
    request: Mapping[str, Any] = field(default_factory=dict)
    switch_to: str = ""
    raising: Raising | None = None


class Occasions:
    """Looks at what the observer found; on_error hears of jobs that are too many, on_view of another view."""

    def __init__(
        self,
        config: Config,
        service: Service,
        restraint: Restraint,
        attempts: Attempts,
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

    def look(self, states: States, idle: bool) -> Occasion | None:
        """What there is to do now; None where nothing is, or where something is being done."""
        same_view = self._are_same_views(states)
        # Else there is nothing to collect.
        sees = any(not state.outage and state.view.trouble != FROZEN for state in states.values())
        if not (idle and sees and same_view and self._restraint.may_start):
            return None
        if self._service.degraded:
            return Occasion("first-start")
        if not self.config.recalibration.automatic:
            return None
        present = (state for state in states.values() if not state.absent)
        judged = [state for state in present if state.drift is not None and self._shows_the_scene(state)]
        return self._answer(judged) if judged else None

    def _answer(self, states: Sequence[ObserverState]) -> Occasion | None:
        """Do about the scenes what can be done, the quickest first."""
        drifts = [state.drift for state in states if state.drift is not None]
        switch_to = self._switch_to(drifts)
        if switch_to and self._restraint.may_switch:
            return Occasion("switch", {"artefact": switch_to}, switch_to=switch_to)
        if any(drift.state == "alarm" for drift in drifts):
            return Occasion("alarm") if self._may_start_job("an alarm") else None
        due = self._schedule.due(time.time())
        if due:
            return Occasion("schedule", {"due": due}) if self._may_start_job("a time of the schedule") else None
        return self._low_fidelity(states)

    def _switch_to(self, drifts: Sequence[DriftState]) -> str:
        """The regime that one camera's scene asks for, and that no other's would be left by; else empty."""
        tolerance_db = self.config.drift.tolerance_db
        for wanted in filter(None, (drift.switch_to for drift in drifts)):
            if not any(drift.is_left_by(wanted, tolerance_db) for drift in drifts):
                return wanted
        return ""

    def _low_fidelity(self, states: Sequence[ObserverState]) -> Occasion | None:
        recalibration, serving = self.config.recalibration, self._service.serving.id
        state = next((state for state in states if is_low(state, self.config)), None)
        if not recalibration.raise_precision or state is None:
            return None
        rung = self._attempts.next_rung(serving)
        if not rung or not self._may_start_job("low fidelity"):
            return None
        fidelity, budget_s = state.settled.interval.estimate, _RANKED_WITHIN * recalibration.timeout_s
        return Occasion("precision", {"rung": rung, "for": serving}, raising=Raising(rung, fidelity, budget_s))

    def _shows_the_scene(self, state: ObserverState) -> bool:
        """No scales cure the view's trouble: whoever is at the camera does, or the operator says that it is meant so.

        A covered lens shows nothing, whatever a classifier calls it; a dark street with cars is something to go by.
        """
        found = self.config.model.task == "detect" and state.telling > 0
        return not state.view.trouble or (state.view.trouble == BLIND and found)

    def _are_same_views(self, states: States) -> bool:
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
