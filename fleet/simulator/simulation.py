"""Simulate a fleet of boards, and count what becomes of it."""

from __future__ import annotations

import gc
import resource
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent.common.errors import ConfigError
from agent.mqtt.endpoint import Endpoint
from fleet.simulator.board import SimulatedBoard
from fleet.simulator.event_loop import DIALLERS, Loop
from fleet.simulator.options import BoardOptions, SimulationOptions, board_config

_SPARE_FILES = 64 + DIALLERS  # besides the boards': of the loop, of Python, of connections being dialled
_START_S = 0.005  # from one board's start to the next: about what a core needs for one
_COUNTED_EVERY_S = 1.0
_MANY = 500  # boards, from which on the garbage collector leaves old objects alone
_YOUNG = 50_000  # new objects before the garbage collector searches them
_NEVER = 2**30
_GOODBYE_S = 10.0


@dataclass
class SimulationOutcome:
    """The counts of a simulation.

    Args:
        made: Rows of the boards' present epochs.
        confirmed: Those that a collector has confirmed.
        results: Final results of commands, by status.
        dials: Seconds after the start of each time a board wanted to connect.
        arrivals: Seconds after the start of each time a broker admitted a board.
    """

    devices: int = 0
    connected: int = 0
    made: int = 0
    confirmed: int = 0
    attempts: int = 0
    starts: int = 0
    results: Counter[str] = field(default_factory=Counter)
    dials: list[float] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return the object that the command line prints."""
        names = ("connected", "made", "confirmed", "attempts", "starts")
        counts = {name: getattr(self, name) for name in names}
        return {"device_count": self.devices, **counts, "admitted": len(self.arrivals), "results": dict(self.results)}


class Simulation:
    """A simulated fleet: `run` it once. outcome: the counts so far, kept up while it runs."""

    def __init__(self, endpoint: Endpoint, options: SimulationOptions) -> None:
        self.outcome = SimulationOutcome(devices=options.devices)
        self._endpoint, self._options = endpoint, options
        self._boards: list[SimulatedBoard] = []
        self._counted_s = 0.0

    @property
    def made(self) -> dict[str, tuple[int, int]]:
        """By board name: the present epoch, and how many rows the board has made in it."""
        return {board.context.topics.device: board.newest_row for board in self._boards if board.starts}

    def run(self, stopping: Callable[[], bool]) -> SimulationOutcome:
        """Run until `stopping` returns True, which is called several times a second.

        Then no board makes any more rows. If there is a collector, the simulation waits until it has confirmed them;
        at last all boards say goodbye.

        Raises ConfigError: `simulation.files`  this process may not have as many sockets as there are boards.
        """
        settle_s = self._options.settle_s
        long_lived = _long_lived() if self._options.devices >= _MANY else nullcontext()
        with tempfile.TemporaryDirectory(prefix="tared-simulated-") as folder, Loop() as loop, long_lived:
            self._prepare(loop, Path(folder))
            loop.run_until(lambda: self._is_stopped(stopping))
            started = [board for board in self._boards if board.starts]
            _run_until_all(loop, started, SimulatedBoard.stop_producing, lambda board: board.is_confirmed, settle_s)
            self._count()
            _run_until_all(loop, started, SimulatedBoard.stop, lambda board: board.has_left, _GOODBYE_S)
            for board in started:
                board.close()
        return self.outcome

    def _is_stopped(self, stopping: Callable[[], bool]) -> bool:
        if time.monotonic() - self._counted_s >= _COUNTED_EVERY_S:
            self._count()
            self._counted_s = time.monotonic()
        return stopping()

    def _prepare(self, loop: Loop, folder: Path) -> None:
        """Make the boards, and time their starts and the storms."""
        options, started_s = self._options, time.monotonic()
        common = started_s, loop, self.outcome.dials, self.outcome.arrivals
        of_boards = BoardOptions(self._endpoint, options, board_config(options), folder, *common)
        self._boards = [SimulatedBoard(number, of_boards) for number in range(options.devices)]
        allow_files(sum(board.files for board in self._boards))
        step_s = _START_S if options.ramp_s is None else options.ramp_s / options.devices
        starts = iter(enumerate(self._boards, 1))

        def start_next() -> None:  # one at a time: brokers wait for answers meanwhile
            number, board = next(starts)
            board.start()
            if number < options.devices:
                loop.call_at(started_s + number * step_s, start_next)

        loop.call_soon(start_next)
        for storm_s in options.storms:
            for board in self._boards:
                loop.call_at(started_s + storm_s, board.cut)

    def _count(self) -> None:
        outcome, up = self.outcome, [board for board in self._boards if board.starts]
        outcome.connected = sum(board.connected for board in up)
        outcome.made, outcome.confirmed = sum(board.newest_row[1] for board in up), sum(board.confirmed for board in up)
        outcome.starts = sum(board.starts for board in up)
        outcome.attempts = sum(board.attempts for board in up)
        outcome.results = Counter()
        for board in up:
            outcome.results.update(board.context.results)


def _run_until_all(
    loop: Loop,
    boards: list[SimulatedBoard],
    action: Callable[[SimulatedBoard], None],
    is_done: Callable[[SimulatedBoard], bool],
    most_s: float,
) -> None:
    """Call `action` for each board, and run the loop until all are done, or `most_s` have passed."""
    waiting, give_up_s = list(boards), time.monotonic() + most_s
    for board in boards:
        action(board)

    def is_finished() -> bool:
        while waiting and is_done(waiting[-1]):
            waiting.pop()
        return not waiting or time.monotonic() > give_up_s

    loop.run_until(is_finished)


@contextmanager
def _long_lived() -> Iterator[None]:
    """Keep the garbage collector from searching all objects while the block runs.

    Nearly all objects of thousands of boards live until the end, and the others form no circles. A full search takes
    seconds, during which the loop stands still and brokers hang up.
    """
    previous = gc.get_threshold()
    gc.set_threshold(_YOUNG, previous[1], _NEVER)
    try:
        yield
    finally:
        gc.freeze()  # so that the end of the process, which is near, does not search them either
        gc.set_threshold(*previous)


def allow_files(count: int) -> None:
    """Let this process have so many sockets and files open. Raises ConfigError (`simulation.files`)."""
    needed = count + _SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= needed:
        return
    if hard < needed:
        found, remedy = f"a limit of {hard} open files", "raise it (ulimit -Hn), or simulate fewer boards"
        raise ConfigError("simulation.files", found, f"{needed} for the boards that are asked for", remedy)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
