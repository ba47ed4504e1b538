"""What is to be simulated, and what a board has to know of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agent.config import Config
from agent.endpoint import Endpoint
from fleet.simulator.faults import Bad, Faults
from fleet.simulator.scene import Drift


@dataclass(frozen=True)
class Wishes:
    """What is to be simulated. commit_s: as `mqtt.outbox.commit_s`. ramp_s: over which boards are switched on; None: as
    fast as one core can. settle_s: how long, at the end, a collector is waited for. storms: seconds after the start at
    which all connections are cut at once. automatic: whether boards answer alarms by themselves. operator_keys: whose
    signed commands count; none: everybody's do. job_s: what a job takes, in the median; failures: the share of those
    that fail. clock_skew_s: the deviation of boards' clocks. down_s: how long a board is without power, at least and at
    most.
    """

    devices: int
    fleet: str = "default"
    period_s: float = 5.0
    commit_s: float = 5.0
    ramp_s: float | None = None
    drift: Drift = field(default_factory=Drift)
    faults: Faults = field(default_factory=Faults)
    bad: Bad = field(default_factory=Bad)
    settle_s: float = 60.0
    storms: Sequence[float] = ()
    clock_skew_s: float = 0.0
    down_s: tuple[float, float] = (2.0, 20.0)
    job_s: float = 60.0
    failures: float = 0.02
    automatic: bool = True
    operator_keys: Sequence[Path] = ()
    seed: int = 0


@dataclass(frozen=True)
class Plan:
    """What all boards have in common. config: a board's, as `board_config` makes it. folder: for the disks of boards
    that need one. started_s: monotonic."""

    endpoint: Endpoint
    wishes: Wishes
    config: Config
    folder: Path
    started_s: float

    def now_s(self) -> float:
        """Seconds since the simulation's start."""
        return time.monotonic() - self.started_s


def board_config(wishes: Wishes) -> Config:
    """A board's config.yaml, of which `mqtt`, `recalibration` and `commands` count."""
    content = {
        "model": {"path": Path("simulated.onnx"), "task": "detect", "decoder": "yolox"},
        "camera": {"source": "csi:0"},
        "mqtt": {"fleet": wishes.fleet, "telemetry_period_s": wishes.period_s, "outbox": {"commit_s": wishes.commit_s}},
        "recalibration": {"automatic": wishes.automatic},
        "commands": {"operator_keys": tuple(wishes.operator_keys)},
    }
    return Config.model_validate(content)
