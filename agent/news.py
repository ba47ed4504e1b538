"""What the observer has found, told once when it changes: drift, trouble with the view, values that are no numbers."""

from __future__ import annotations

import logging

from agent.drift import DriftState
from agent.findings import ObserverState
from agent.reporting import Reporter
from agent.summary import Alarm
from agent.view import ViewState


class News:
    """Compares what the observer says with what was told before. alarms: takes every alarm that rises."""

    def __init__(self, reporter: Reporter, alarms: list[Alarm]) -> None:
        self._reporter = reporter
        self._alarms = alarms
        self._drift = "calm"
        self._trouble = ""
        self._nonfinite: frozenset[str] = frozenset()

    def serves_anew(self) -> None:
        """Another engine serves: what drifted from the one before is old."""
        self._drift = "calm"

    def tell(self, state: ObserverState) -> None:
        """Report what is new in a state."""
        fresh = sorted(set(state.nonfinite) - self._nonfinite)
        if fresh:
            self._nonfinite |= set(fresh)
            message = f"NaN or infinite values in {fresh}"
            self._reporter.event("error", logging.ERROR, code="observer.nonfinite", message=message)
        if state.drift is not None and state.drift.state != self._drift:
            self._tell_drift(state.drift, state.drift_since)
        if state.view.trouble != self._trouble:
            self._tell_view(state.view, state.drift)

    def _tell_drift(self, drift: DriftState, since: float) -> None:
        self._drift = drift.state
        detail = {"capture_ts": since, "gain_db": round(drift.gain_db, 2), "e_value": round(drift.e_value, 1)}
        if drift.state != "alarm":
            self._reporter.event("drift", state=drift.state, **detail)
            return
        onset_ts = drift.onset_ts if drift.onset_ts is not None else since
        self._reporter.event("alarm", logging.WARNING, onset_ts=onset_ts, **detail)
        self._alarms.append(Alarm(since, onset_ts, drift.gain_db, drift.e_value))

    def _tell_view(self, view: ViewState, drift: DriftState | None) -> None:
        """Of what only somebody at the camera can cure; the gain says that a recalibration would not."""
        self._trouble = view.trouble
        evidence = {name: round(figure, 3) for name, figure in view.evidence.items()}
        gain_db = round(drift.gain_db, 2) if drift is not None else None
        level = logging.WARNING if view.trouble else logging.INFO
        self._reporter.event("view", level, trouble=view.trouble, gain_db=gain_db, **evidence)
