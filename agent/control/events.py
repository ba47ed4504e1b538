"""Report each change of state that the observer notices once.

The changes are drift, low fidelity, a class that is lost, labels that have come, trouble with the view, and values that
are not finite.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass

from pydantic import JsonValue

from agent.config import Config
from agent.control.summary import Alarm
from agent.core.due import is_low
from agent.labelling.accuracy import MeasuredAccuracy, Scores
from agent.monitoring.audit import Mismatch
from agent.monitoring.camera_monitor import CameraState, CameraStates
from agent.monitoring.causes import Explanation
from agent.monitoring.class_losses import LostClass
from agent.monitoring.drift import DriftState
from agent.monitoring.view import ViewState
from agent.uplink.reporter import Reporter
from calibrate.statistics.evidence import Interval

_MOST_NAMED = 16  # classes, and engines, in an event


@dataclass
class _Reported:
    """The last report of one camera."""

    drift: str = "calm"
    low: bool = False
    trouble: str = ""
    lost_classes: frozenset[int] = frozenset()
    explanation: Explanation | None = None
    nonfinite: frozenset[str] = frozenset()


class StateChangeReporter:
    """Compares the observer's states with the last report, in the supervisor's thread.

    `alarms` receives every alarm that rises.
    """

    def __init__(self, reporter: Reporter, alarms: list[Alarm], config: Config) -> None:
        self._reporter = reporter
        self._alarms = alarms
        self.config = config
        self._reported: dict[str, _Reported] = {}
        self._labelled: tuple[Scores, str] | None = None

    def reset(self) -> None:
        """Forget drift and low fidelity, which were those of the previous engine."""
        for reported in self._reported.values():
            reported.drift, reported.low, reported.lost_classes = "calm", False, frozenset()

    def report_changes(self, states: CameraStates) -> None:
        """Report what has changed since the last call."""
        for camera, state in states.items():
            reported = self._reported.setdefault(camera, _Reported())
            fresh = sorted(set(state.nonfinite) - reported.nonfinite)
            if fresh:
                reported.nonfinite |= set(fresh)
                message = f"NaN or infinite values in {fresh}"
                self._reporter.event("error", logging.ERROR, code="observer.nonfinite", camera=camera, message=message)
            if state.drift is not None and state.drift.state != reported.drift:
                reported.drift = state.drift.state
                self._report_drift(camera, state.drift, state.drift_since, state.view)
            if not reported.low and is_low(state, self.config):
                reported.low = True
                self._report_low_fidelity(camera, state)
            if state.explanation != reported.explanation:
                reported.explanation = state.explanation
                if state.explanation is not None:
                    self._report_causes(camera, state.explanation)
            for lost in state.lost_classes:
                if lost.class_id not in reported.lost_classes:
                    reported.lost_classes |= {lost.class_id}
                    self._report_lost_class(camera, lost)
            if state.view.trouble != reported.trouble:
                reported.trouble = state.view.trouble
                self._report_view(camera, state.view, state.drift)

    def report_labelled(self, measured: MeasuredAccuracy | None) -> None:
        """Report the accuracy by labels of drawn frames, when labels have come or are in doubt."""
        if measured is None or (measured.overall, measured.doubt) == self._labelled:
            return
        self._labelled = measured.overall, measured.doubt
        self._reporter.event("labelled", **measured.document(_MOST_NAMED))

    def report_mismatch(self, mismatch: Mismatch) -> None:
        """Report that the reference does not compute what ONNX Runtime does: the output, the frame, by how much."""
        self._reporter.event(
            "reference",
            logging.ERROR,
            state="wrong",
            camera=mismatch.camera,
            frame=mismatch.frame,
            output=mismatch.output,
            tensor=mismatch.tensor or None,
            sqnr_db=round(max(mismatch.sqnr_db, -999.0), 1),  # JSON has no infinity
            allowed_db=round(mismatch.allowed_db, 1),
            in_batch=mismatch.is_in_batch,
            message="the float reference is not what ONNX Runtime computes; ONNX Runtime observes from now on",
        )

    def _report_drift(self, camera: str, drift: DriftState, since: float, view: ViewState) -> None:
        """Report the drift. An alarm names the view's trouble, which explains it, and why no job answers it."""
        detail: dict[str, JsonValue] = {
            "camera": camera,
            "capture_ts": since,
            "gain_db": round(drift.gain_db, 2),
            "gain": rounded_gain(drift.gain),
            "e_value": round(drift.e_value, 1),
            "clipping_share": round(drift.clipping_share, 2),
        }
        if drift.state != "alarm":
            self._reporter.event("drift", state=drift.state, **detail)
            return
        onset_ts = drift.onset_ts if drift.onset_ts is not None else since
        trouble: dict[str, JsonValue] = {"trouble": view.trouble, **_rounded(view)} if view.trouble else {}
        self._reporter.event("alarm", logging.WARNING, onset_ts=onset_ts, **detail, **trouble)
        gain = drift.gain.estimate if drift.gain is not None else None
        self._alarms.append(Alarm(since, onset_ts, drift.gain_db, drift.e_value, camera, gain))

    def _report_low_fidelity(self, camera: str, state: CameraState) -> None:
        """Report low fidelity, once for each engine in service; the gain says that a recalibration would not help."""
        self._reporter.event(
            "fidelity",
            logging.WARNING,
            camera=camera,
            state="low",
            since=state.settled.since,
            gain_db=round(state.drift.serving_db, 2) if state.drift is not None else None,
            accepted=1.0 - self.config.max_loss,
            **asdict(state.settled.interval),
        )

    def _report_causes(self, camera: str, why: Explanation) -> None:
        """Report what has changed in the view, and what each remedy for the alarm would gain."""
        self._reporter.event(
            "cause",
            camera=camera,
            changes=[{"cause": each.cause, "octaves": round(each.octaves, 2)} for each in why.changes],
            remedies=[
                {
                    "remedy": each.remedy,
                    "gain_db": round(each.gain_db, 2) if each.gain_db is not None else None,
                    "gain": rounded_gain(each.gain),
                    "detail": each.detail or None,
                }
                for each in why.remedies
            ],
        )

    def _report_lost_class(self, camera: str, lost: LostClass) -> None:
        """Report a class of which INT8 loses too much, once for each engine in service."""
        spec = self.config.model
        self._reporter.event(
            "class",
            logging.WARNING,
            camera=camera,
            name=spec.label(lost.class_id),
            instead=spec.label(lost.instead) if lost.instead is not None else None,
            loss=round(lost.loss, 3),
            tolerance=round(lost.tolerance, 3),
            examples=[
                {
                    "frame": example.frame,
                    "ts": example.ts,
                    "served": spec.label(example.served) if example.served is not None else None,
                }
                for example in lost.examples
            ],
        )

    def _report_view(self, camera: str, view: ViewState, drift: DriftState | None) -> None:
        """Report trouble that only somebody at the camera can cure; the gain says that a recalibration would not."""
        gain_db = round(drift.gain_db, 2) if drift is not None else None
        level = logging.WARNING if view.trouble else logging.INFO
        self._reporter.event("view", level, camera=camera, trouble=view.trouble, gain_db=gain_db, **_rounded(view))


def rounded_gain(gain: Interval | None) -> JsonValue:
    """Return an expected gain in fidelity as it is reported; None where that cannot be said."""
    if gain is None:
        return None
    return {"estimate": round(gain.estimate, 3), "low": round(gain.low, 3), "high": round(gain.high, 3), "n": gain.n}


def _rounded(view: ViewState) -> dict[str, float]:
    """Return the view's evidence, as it is reported."""
    return {name: round(figure, 3) for name, figure in view.evidence.items()}
