"""A change of engine under way: why, and what has come of it so far."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

from agent.errors import AgentError
from agent.findings import States
from agent.job import PROVEN, JobObserver
from agent.probation import Probation
from agent.service import Loaded
from agent.summary import Rollback, Swap
from agent.verdict import Verdict


@dataclass(frozen=True)
class Cause:
    """Why an engine is put in service, since when (monotonic s) that is wanted, and who hears of it.

    max_loss: what the operator accepts, None as configured.
    """

    trigger: str
    since_s: float
    report: JobObserver
    verdict: Verdict | None = None
    max_loss: float | None = None


@dataclass
class Change:
    """An engine on trial. swap: since its first answer. recall: the operator's, who wants it taken back."""

    loaded: Loaded
    cause: Cause
    probation: Probation
    dropped_before: int
    swap: Swap | None = None
    is_going: bool = False
    recall: JobObserver | None = None

    @property
    def proven(self) -> bool:
        """Whether the engine has served before: its first answer is enough, and it stays in the store in any case."""
        return self.cause.trigger in PROVEN

    def complaint(self, states: States) -> AgentError | None:
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

    def is_kept(self, states: States) -> dict[str, Any]:
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
