"""Summarise one run of the daemon: kept while it runs, printed when it ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from agent.common.latency import LoopSample
from agent.jobs.ledger import JobSummary
from agent.monitoring.estimates import Estimate
from agent.vision.answer import MatchCounts
from calibrate.statistics.evidence import Interval


@dataclass(frozen=True)
class Period:
    """A stretch of the video under one light; capture times in seconds."""

    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Score:
    """The score of one engine on some frames: matches with the labels, and the sum of its fidelities."""

    matches: MatchCounts
    fidelity_sum: float
    frames: int

    def __add__(self, other: Score) -> Score:
        fidelity_sum = self.fidelity_sum + other.fidelity_sum
        return Score(self.matches + other.matches, fidelity_sum, self.frames + other.frames)

    def as_dict(self) -> dict[str, float]:
        """Return F1 against the labels, mean fidelity, and the number of frames."""
        fidelity_mean = self.fidelity_sum / self.frames
        return {"f1": round(self.matches.f1, 4), "fidelity": round(fidelity_mean, 4), "frames": self.frames}


@dataclass(frozen=True)
class Alarm:
    """A drift alarm: when it rose, and since when the gain had been above the tolerance; capture times in s.

    gain: The fidelity that a recalibration is expected to gain; None where that could not be said.
    """

    ts: float
    onset_ts: float
    gain_db: float
    e_value: float
    camera: str = "camera"
    gain: float | None = None


@dataclass(frozen=True)
class Swap:
    """A new engine in service.

    Args:
        ts: Capture time of its first frame; None: after the last frame.
        trigger: first-start, alarm, precision, schedule, switch, command or rollback.
        seconds: Wall time from the trigger to the swap.
        fidelity, fidelity_before: Of the new and of the previous engine, on the held-out frames of the job.
        skipped: Frames between the last one of the previous engine and the first one of the new, that nobody took.
        latency_ms, latency_float_ms: Medians in the job, of the new engine and of the float engine that had served, on
            the same frames in turn; None where INT8 had served.
    """

    ts: float | None
    artefact: str
    trigger: str
    seconds: float
    fidelity: float | None
    fidelity_before: float | None
    skipped: int = 0
    latency_ms: float | None = None
    latency_float_ms: float | None = None


@dataclass(frozen=True)
class Rollback:
    """A candidate that was taken out of service again.

    Args:
        ts: Capture time of the first frame of the previous engine; None: after the last frame.
        reason: Code of the error.
        frames: Frames that the candidate had answered.
        suffered: How many of them, and of the frame that ended the probation, were answered late or wrongly, or would
            have been.
        missed: Frames that nobody took during the probation.
    """

    ts: float | None
    artefact: str
    trigger: str
    reason: str
    frames: int
    suffered: int
    missed: int


@dataclass(frozen=True)
class CameraSummary:
    """The part of one camera in a run."""

    loop: LoopSample
    fidelity: Interval
    live_accuracy: Estimate | None

    def as_dict(self) -> dict[str, Any]:
        accuracy = {"live_accuracy": self.live_accuracy.as_dict()} if self.live_accuracy is not None else {}
        return {**self.loop.as_dict(), "fidelity": asdict(self.fidelity), **accuracy}


@dataclass
class RunSummary:
    """One run of the daemon.

    `stopped_by` names the signal that ended it. `loop` is of all cameras together. Fidelity and its history are of the
    least faithful camera. `degraded` and `held_back` are the sentences of agent.control.reasons, as of the end.
    """

    artefact: str
    degraded: str = ""
    held_back: str = ""
    backend: str = ""  # the runtime, and why faster ones were not taken
    stopped_by: str = ""
    last_ts: float = 0.0
    loop: LoopSample | None = None
    alarms: list[Alarm] = field(default_factory=list)
    swaps: list[Swap] = field(default_factory=list)  # swaps to candidates that were kept
    rollbacks: list[Rollback] = field(default_factory=list)
    fidelity: Interval | None = None
    fidelity_since: float = 0.0
    live_accuracy: Estimate | None = None  # since the last swap, by labels that were sent, or lie next to the recording
    fidelity_history: list[tuple[float, float]] = field(default_factory=list)
    accuracy: dict[str, dict[str, Score]] = field(default_factory=dict)
    jobs: Sequence[JobSummary] = ()
    results_dropped: Mapping[str, int] = field(default_factory=dict)  # lines, by the output that lost them
    cameras: Mapping[str, CameraSummary] = field(default_factory=dict)  # by name, where there are several

    def periods(self) -> list[Period]:
        """Return the two stretches to compare: under the first engine until its light ended, and under the last."""
        live = [swap for swap in self.swaps if swap.ts is not None]
        if not live:
            return []
        onset = self.alarms[0].onset_ts if self.alarms else self.last_ts
        periods = [Period("first light", live[0].ts or 0.0, onset)]
        if len(live) > 1:
            periods.append(Period("last light", live[-1].ts or 0.0, self.last_ts))
        return [period for period in periods if period.end_s > period.start_s]

    def as_dict(self) -> dict[str, Any]:
        """Return the object that `tared run --json` prints."""
        loop = self.loop.as_dict() if self.loop else {}
        return {
            **loop,
            "alarms": [asdict(alarm) for alarm in self.alarms],
            "swaps": [asdict(swap) for swap in self.swaps],
            "rollbacks": [asdict(rollback) for rollback in self.rollbacks],
            "fidelity": asdict(self.fidelity) if self.fidelity else {},
            **({"live_accuracy": self.live_accuracy.as_dict()} if self.live_accuracy is not None else {}),
            "accuracy": {
                period: {engine: score.as_dict() for engine, score in scores.items()}
                for period, scores in self.accuracy.items()
            },
            **({"results_dropped": dict(self.results_dropped)} if self.results_dropped else {}),
            **({"cameras": {name: each.as_dict() for name, each in self.cameras.items()}} if self.cameras else {}),
            "artefact": self.artefact,
            "backend": self.backend,
            "degraded": self.degraded or None,
            **({"held_back": self.held_back} if self.held_back else {}),
            "jobs": [asdict(job) for job in self.jobs],
        }
