"""What there is of a simulated board whether its power is on or not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from agent.contract.topics import Topics
from fleet.simulator.engines import Engines
from fleet.simulator.event_loop import Loop
from fleet.simulator.options import BoardOptions
from fleet.simulator.scene import SimulatedScene


@dataclass
class BoardContext:
    """Its daemons find it as the one before has left it.

    number: from 0. folder: its disk; on_disk: whether outbox and commands lie there, as they have to where the power
    fails, or in memory. confirmed: up to which number of each epoch a collector said to have all. results: final ones
    of commands, by status. drift: as it was told last. attempts: to connect. on_dial, on_admitted: as of LightClient.
    """

    number: int
    plan: BoardOptions
    loop: Loop
    topics: Topics
    rng: Random
    scene: SimulatedScene
    engines: Engines
    folder: Path
    on_disk: bool
    on_dial: Callable[[], None]
    on_admitted: Callable[[], None]
    confirmed: dict[int, int] = field(default_factory=dict)
    results: Counter[str] = field(default_factory=Counter)
    drift: str = "calm"
    attempts: int = 0
