"""Hold the parts of a simulated board that outlive its daemons, and what was drawn for it."""

from __future__ import annotations

import random
from collections import Counter

from agent.contract.topics import Topics
from fleet.simulator.engines import Engines
from fleet.simulator.options import BoardOptions
from fleet.simulator.scene import SimulatedScene


class BoardContext:
    """The parts of a board that each daemon finds as the previous one has left them.

    Attributes:
        number: Of the board, from 0.
        folder: Its disk.
        skew_s: By how much its clock is wrong.
        no_clock: Its clock starts in 1970 each time.
        on_disk: Its power fails, so outbox and commands lie on the disk; else in memory.
        restores: After a power failure it starts from an older copy of its disk.
        is_hostile: It sends rubbish.
        confirmed: By epoch, the number up to which a collector has confirmed all rows.
        results: Final results of commands, by status.
        drift: The drift state that was reported last.
        attempts: To connect, of daemons that have ended.
    """

    def __init__(self, number: int, options: BoardOptions) -> None:
        simulation, faults = options.simulation, options.simulation.faults
        self.number, self.options = number, options
        self.topics = Topics(simulation.fleet, board_name(number))
        self.folder = options.folder / self.topics.device
        self.rng = rng = random.Random(f"{simulation.seed}/{number}")
        self.skew_s = rng.gauss(0.0, simulation.clock_skew_s)
        self.restores, self.no_clock = rng.random() < faults.restore, rng.random() < faults.no_clock
        self.on_disk = rng.random() < faults.crash or self.restores
        self.is_hostile = rng.random() < faults.hostile
        self.scene = SimulatedScene(simulation.drift, number % simulation.drift.groups, rng)
        self.engines = Engines(options, self.scene, rng)
        self.confirmed: dict[int, int] = {}
        self.results: Counter[str] = Counter()
        self.drift = "calm"
        self.attempts = 0


def board_name(number: int) -> str:
    """Return the name of a board; names sort as numbers do."""
    return f"sim-{number:06d}"
