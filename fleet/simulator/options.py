"""Say what is simulated: how many boards, their options, and what goes wrong with them and the network."""

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
from fleet.simulator.event_loop import Loop
from fleet.simulator.scene import Drift, check_range

_LONGEST_DELAY_S = 3.0  # before a message is sent


@dataclass(frozen=True)
class Faults:
    """Faults to simulate, in shares from 0 to 1.

    Args:
        crash: Boards whose power fails now and then.
        restore: Boards whose power fails, and that then start from an older copy of their disk.
        no_clock: Boards whose clock starts in 1970 each time.
        hostile: Boards that send rubbish, also under the names of others.
        duplicate: Messages that arrive twice.
        delay: Messages that arrive late, by up to 3 s.
        every_s: Mean time between two crashes, or two pieces of rubbish, of one board.
    """

    crash: float = 0.0
    restore: float = 0.0
    no_clock: float = 0.0
    hostile: float = 0.0
    duplicate: float = 0.0
    delay: float = 0.0
    every_s: float = 60.0

    def __post_init__(self) -> None:
        """Raise AgentError (`cli.arguments`) for values out of range."""
        shares = self.crash, self.restore, self.no_clock, self.hostile, self.duplicate, self.delay
        check_range("shares", shares, 0.0, 1.0)
        check_range("every_s", (self.every_s,), 1e-3)

    def draw_delivery(self, rng: random.Random) -> tuple[int, float]:
        """Draw how many times one message is sent, and how late, in s."""
        times = 2 if rng.random() < self.duplicate else 1
        return times, rng.uniform(0.0, _LONGEST_DELAY_S) if rng.random() < self.delay else 0.0


@dataclass(frozen=True)
class BadEngines:
    """New engines that turn out bad; if both a name and boards are given, both must apply.

    Args:
        named: Engines of this model (sha256), recalibration method or regime (id); empty: of all.
        first, last: Engines of these boards, by their numbers from 0; `last` below `first`: of all boards.
    """

    named: str = ""
    first: int = 0
    last: int = -1

    def includes(self, number: int, requested: object) -> bool:
        """Return True if a new engine of this board turns out bad; requested: its model, method or regime."""
        if self.named and requested != self.named:
            return False
        return self.first <= number <= self.last if self.last >= self.first else bool(self.named)


def rubbish(topics: Topics, victim: Topics, epoch: int, rng: random.Random) -> Iterator[Message]:
    """Yield the messages of a hostile board: unreadable ones, and ones with a false number or name.

    Args:
        topics: The board's own.
        victim: Topics of another board, under whose name it also sends.
        epoch: The board's own, which it replays.
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
    """Options of a simulation.

    Args:
        devices: The number of boards.
        period_s: Between two telemetry messages of a board.
        commit_s: As `mqtt.outbox.commit_s`.
        ramp_s: Time over which the boards are switched on; None: as fast as one core can.
        settle_s: How long to wait, at the end, for a collector.
        storms: Seconds after the start at which all connections are cut at once.
        clock_skew_s: Standard deviation of the boards' clocks.
        down_s: How long a board is without power, at least and at most.
        job_s: The median time of a job.
        failures: The share of jobs that fail.
        automatic: Boards answer alarms by themselves.
        operator_keys: Public keys whose signed commands count; none: unsigned commands count.
        seed: Everything that is drawn follows from it.
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
    """Options that all boards have in common.

    Args:
        config: Of a board, as `board_config` makes it.
        folder: For the disks of boards that need one.
        started_s: Start of the simulation, monotonic.
        loop: Drives them.
        dials, arrivals: As in `SimulationOutcome`; the boards fill them.
    """

    endpoint: Endpoint
    simulation: SimulationOptions
    config: Config
    folder: Path
    started_s: float
    loop: Loop
    dials: list[float]
    arrivals: list[float]

    def now_s(self) -> float:
        """Return the seconds since the simulation's start."""
        return time.monotonic() - self.started_s


def board_config(options: SimulationOptions) -> Config:
    """Return a board's configuration, of which `mqtt`, `recalibration` and `commands` count."""
    outbox = {"commit_s": options.commit_s}
    content = {
        "model": {"path": Path("simulated.onnx"), "task": "detect", "decoder": "yolox"},
        "camera": {"source": "csi:0"},
        "mqtt": {"fleet": options.fleet, "telemetry_period_s": options.period_s, "outbox": outbox},
        "recalibration": {"automatic": options.automatic},
        "commands": {"operator_keys": tuple(options.operator_keys)},
    }
    return Config.model_validate(content)
