"""Hold the parts of a simulated board that outlive its daemons."""

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
    """The parts of a board that each daemon finds as the previous one has left them.

    Args:
        number: Of the board, from 0.
        folder: Its disk.
        on_disk: Outbox and commands lie on the disk, as they must where the power fails; else in memory.
        on_dial, on_admitted: As of LightClient.
        confirmed: By epoch, the number up to which a collector has confirmed all rows.
        results: Final results of commands, by status.
        drift: The drift state that was reported last.
        attempts: To connect, of daemons that have ended.
    """

    number: int
    options: BoardOptions
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
