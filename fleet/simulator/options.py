"""What goes wrong with simulated boards, and the network between; and with their engines."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agent.config import Config
from agent.contract.topics import Topics
from agent.contract.wire import MAX_PAYLOAD_BYTES
from agent.mqtt.endpoint import Endpoint
from agent.mqtt.message import Message
from fleet.simulator.scene import Drift, check_range

_LATEST_S = 3.0  # a message that is delayed comes within so long


@dataclass(frozen=True)
class Faults:
    """Shares of boards: `crash`, whose power fails now and then; `restore`, that then start from an older copy of their
    disk; `no_clock`, that start in 1970 each time; `hostile`, that send rubbish, and under the names of others. Shares
    of messages: `duplicate`, `delay`. every_s: the mean time between two crashes, or two pieces of rubbish, of a board.
    """

    crash: float = 0.0
    restore: float = 0.0
    no_clock: float = 0.0
    hostile: float = 0.0
    duplicate: float = 0.0
    delay: float = 0.0
    every_s: float = 60.0

    def __post_init__(self) -> None:
        """Raises AgentError (`cli.arguments`) for shares that are none."""
        shares = self.crash, self.restore, self.no_clock, self.hostile, self.duplicate, self.delay
        check_range("shares", shares, 0.0, 1.0)
        check_range("every_s", (self.every_s,), 1e-3)

    def garbled(self, rng: random.Random) -> tuple[int, float]:
        """How often one message is sent, and how late, in s."""
        times = 2 if rng.random() < self.duplicate else 1
        return times, rng.uniform(0.0, _LATEST_S) if rng.random() < self.delay else 0.0


@dataclass(frozen=True)
class BadEngines:
    """Which new engines turn out bad: those of what is named, by a model's sha256, a recalibration's method or a
    regime's id; those of boards `first` to `last`, by their numbers from 0; where both are given, those of both."""

    named: str = ""
    first: int = 0
    last: int = -1

    def hits(self, number: int, asked: object) -> bool:
        """The board of this number was asked for this."""
        if self.named and asked != self.named:
            return False
        return self.first <= number <= self.last if self.last >= self.first else bool(self.named)


def rubbish(topics: Topics, victim: Topics, epoch: int, rng: random.Random) -> Iterator[Message]:
    """What a hostile board sends: what no collector can read, what lies about its number, or its name.

    epoch: of the board's own, which it replays. victim: another board's topics.
    """
    event = {"epoch": epoch, "seq": 1, "ts": 0.0, "kind": "alarm", "lie": rng.random()}
    payloads = [
        rng.randbytes(rng.randrange(1, 200)),
        b"[" * rng.randrange(20, 20_000),
        b'{"epoch": 1, "seq": "first", "ts": "yesterday", "kind": []}',
        b'{"epoch": 9223372036854775807, "seq": 9223372036854775807, "ts": 1e308, "kind": "alarm"}',
        b'{"epoch": 99999999999999999999999, "seq": -1, "ts": 0, "kind": "alarm"}',
        b"x" * (MAX_PAYLOAD_BYTES + 1),
        b"",
        json.dumps(event).encode(),
    ]
    topic = rng.choice([topics.event, topics.telemetry, topics.status, topics.birth, topics.reported])
    yield Message(topic, rng.choice(payloads))
    yield Message(victim.event, json.dumps({**event, "epoch": epoch + 10**6}).encode())


@dataclass(frozen=True)
class SimulationOptions:
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
    bad: BadEngines = field(default_factory=BadEngines)
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
class BoardOptions:
    """What all boards have in common. config: a board's, as `board_config` makes it. folder: for the disks of boards
    that need one. started_s: monotonic."""

    endpoint: Endpoint
    wishes: SimulationOptions
    config: Config
    folder: Path
    started_s: float

    def now_s(self) -> float:
        """Seconds since the simulation's start."""
        return time.monotonic() - self.started_s


def board_config(wishes: SimulationOptions) -> Config:
    """A board's config.yaml, of which `mqtt`, `recalibration` and `commands` count."""
    content = {
        "model": {"path": Path("simulated.onnx"), "task": "detect", "decoder": "yolox"},
        "camera": {"source": "csi:0"},
        "mqtt": {"fleet": wishes.fleet, "telemetry_period_s": wishes.period_s, "outbox": {"commit_s": wishes.commit_s}},
        "recalibration": {"automatic": wishes.automatic},
        "commands": {"operator_keys": tuple(wishes.operator_keys)},
    }
    return Config.model_validate(content)
