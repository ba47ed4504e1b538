"""Model what a simulated camera sees over a day; all figures of its telemetry follow from that.

A scene has two lights, day and night, and may drift away from the calibration. It drifts in groups of boards, one after
the other, as when a season, a cleaner or a software update reaches one site after another. An engine remembers how far
the scene had moved when it was made. The predicted gain is how far it has moved since; fidelity falls with it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from agent.common.errors import AgentError
from agent.contract.board_status import DriftStatus
from agent.contract.messages import CameraTelemetry, FidelityReport, Latency, Observing

CAMERA = "camera"  # the camera's name
TOLERANCE_DB = 3.0  # gain that raises an alarm; half of it raises a warning
_FPS = 30.0
_OBSERVED_PER_S = 0.6  # frames: one in fifty also runs through the reference
_LOSS_PER_DB = 0.03
_BAD_LOSS = 0.35
_BAD_SLOWDOWN = 1.4
_ERROR = 0.05  # probability that a confidence interval misses the true value


def check_range(names: str, values: Sequence[float], least: float, most: float = math.inf) -> None:
    """Raise AgentError (`cli.arguments`) if a value is not finite, or not within `least` and `most`."""
    for value in values:
        if not (math.isfinite(value) and least <= value <= most):
            expected = f"{names} of {least:g} and more" if most == math.inf else f"{names} from {least:g} to {most:g}"
            raise AgentError("cli.arguments", f"{value:g}", expected, "correct it")


@dataclass(frozen=True)
class Drift:
    """The way in which scenes leave their calibration.

    Args:
        db: How far, in dB; 0: not at all.
        after_s: When the first group of boards starts to drift.
        spread_s: How much later the last group starts.
        ramp_s: How long a scene takes.
        groups: Of boards.
        day_s: How long a day is.
    """

    db: float = 0.0
    after_s: float = 60.0
    spread_s: float = 300.0
    ramp_s: float = 60.0
    groups: int = 8
    day_s: float = 86_400.0

    def __post_init__(self) -> None:
        """Raise AgentError (`cli.arguments`) for values that no scene could have."""
        check_range("db, after_s, spread_s, ramp_s", (self.db, self.after_s, self.spread_s, self.ramp_s), 0.0)
        check_range("groups", (self.groups,), 1.0)
        check_range("day_s", (self.day_s,), 1e-3)


@dataclass(frozen=True)
class SimulatedEngine:
    """An engine of a simulated board.

    Args:
        light: The light in which it was calibrated.
        db: How far the scene had moved by then.
        bad: It has a fault that only fidelity and latency show.
    """

    id: str
    light: str
    db: float = 0.0
    bad: bool = False


class SimulatedScene:
    """The scene of one board of a group; groups count from 0. Times are seconds since the simulation's start."""

    def __init__(self, drift: Drift, group: int, rng: random.Random) -> None:
        self._drift = drift
        self._rng = rng
        step_s = drift.spread_s / max(1, drift.groups - 1)
        self._onset_s = drift.after_s + group * step_s + rng.uniform(0.0, 0.1 * step_s)
        self._longitude = group / drift.groups + rng.uniform(0.0, 0.01)  # a share of the day
        self._p50_ms = rng.uniform(9.0, 16.0)
        self._fidelity = rng.uniform(0.97, 0.995)

    def light(self, t_s: float) -> str:
        """Return "day" or "night"."""
        return "day" if math.sin(2.0 * math.pi * (t_s / self._drift.day_s + self._longitude)) >= 0.0 else "night"

    def moved_db(self, t_s: float) -> float:
        """Return how far the scene has moved since the start, in dB."""
        return self._drift.db * min(1.0, max(0.0, (t_s - self._onset_s) / max(self._drift.ramp_s, 1e-9)))

    def gain_db(self, engine: SimulatedEngine, t_s: float) -> float:
        """Return what a recalibration would gain now, in dB."""
        return max(0.0, self.moved_db(t_s) - engine.db)

    def fidelity(self, engine: SimulatedEngine, since_s: float, t_s: float) -> FidelityReport:
        """Return the fidelity of an engine that serves since `since_s`, with the interval of the observed frames."""
        true = self._fidelity - _LOSS_PER_DB * self.gain_db(engine, t_s) - _BAD_LOSS * engine.bad
        n = max(1, round(_OBSERVED_PER_S * (t_s - since_s)))
        half = math.sqrt(math.log(2.0 / _ERROR) / (2.0 * n))  # Hoeffding's
        estimate = min(1.0, max(0.0, self._rng.gauss(true, 0.1 * half)))
        return FidelityReport(estimate=estimate, low=max(0.0, estimate - half), high=min(1.0, estimate + half), n=n)

    def sample(self, engine: SimulatedEngine, since_s: float, t_s: float) -> CameraTelemetry:
        """Return the camera's part of telemetry."""
        p50 = self._p50_ms * (_BAD_SLOWDOWN if engine.bad else 1.0) * self._rng.uniform(0.98, 1.02)
        fidelity = self.fidelity(engine, since_s, t_s)
        return CameraTelemetry(
            fps=round(min(_FPS, 1000.0 / p50) * self._rng.uniform(0.995, 1.0), 2),
            up=True,
            dropped={"slow": 1} if self._rng.random() < 0.01 else {},
            latency_ms=Latency(p50=round(p50, 2), p99=round(1.6 * p50, 2)),
            drift=self.drift(engine, t_s).in_telemetry(TOLERANCE_DB),
            fidelity=fidelity,
            fidelity_hour=fidelity,
            observing=Observing(share=0.02, debt_s=0.0, state_bytes=3_000_000),
        )

    def drift(self, engine: SimulatedEngine, t_s: float) -> DriftStatus:
        """Return the drift, as `status` reports it."""
        gain_db = round(self.gain_db(engine, t_s), 2)
        return DriftStatus(
            judged=True,
            gain_db=gain_db,
            serving_db=gain_db,
            clipping_share=0.1,
            e_value=round(10.0 ** min(gain_db, 12.0), 1),
            state=drift_state(gain_db),
            onset_ts=None,
            switch_to="",
            closely=False,
            gains_db={engine.id: gain_db},
            gain=None,
        )


def drift_state(gain_db: float) -> str:
    """Return "calm", "warning" or "alarm"."""
    return "alarm" if gain_db >= TOLERANCE_DB else "warning" if gain_db >= TOLERANCE_DB / 2.0 else "calm"
