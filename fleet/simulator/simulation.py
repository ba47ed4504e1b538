"""A fleet of simulated boards, how it goes, and what becomes of it."""

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

_SPARE_FILES = 64 + DIALLERS  # beside the boards': the loop's, Python's, what is being dialled
_START_S = 0.005  # from one board's start to the next: about what a core needs for one
_TOLD_EVERY_S = 1.0
_MANY = 500  # boards, whose objects are not looked through for garbage
_YOUNG = 50_000  # objects, before the newest are
_NEVER = 2**30
_GOODBYE_S = 10.0


@dataclass
class SimulationOutcome:
    """dials, arrivals: seconds after the start at which a board wanted to connect, and at which a broker admitted one,
    each time. made, confirmed: rows of the
    boards' present epochs. results: final ones of commands by status."""

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
        """As the command line tells it."""
        told = {
            name: getattr(self, name) for name in ("devices", "connected", "made", "confirmed", "attempts", "starts")
        }
        return {**told, "admitted": len(self.arrivals), "results": dict(self.results)}


class Simulation:
    """`run` it once. outcome: how it stands, kept up while it runs."""

    def __init__(self, endpoint: Endpoint, wishes: SimulationOptions) -> None:
        """Raises ConfigError (`simulation.files`) for more boards than this process may have sockets."""
        self.outcome = SimulationOutcome(devices=wishes.devices)
        self._endpoint, self._wishes = endpoint, wishes
        self._boards: list[SimulatedBoard] = []
        self._started_s = 0.0
        self._counted_s = 0.0

    @property
    def made(self) -> dict[str, tuple[int, int]]:
        """By the names of boards: the present epoch of each, and how many rows it has made in that."""
        return {board.topics.device: board.last for board in self._boards if board.starts}

    def run(self, stopping: Callable[[], bool]) -> SimulationOutcome:
        """Until it is time to stop, asked several times a second. Then no board makes any more rows; what was made is
        waited for until a collector has confirmed it, if there is one; and all boards say goodbye."""
        long_lived = _long_lived() if self._wishes.devices >= _MANY else nullcontext()
        with tempfile.TemporaryDirectory(prefix="tared-simulated-") as folder, Loop() as loop, long_lived:
            self._prepare(loop, Path(folder))
            loop.run(lambda: self._is_over(stopping))
            started = [board for board in self._boards if board.starts]
            self._run_until_all(loop, started, SimulatedBoard.hush, lambda board: board.settled, self._wishes.settle_s)
            self._count()
            self._run_until_all(loop, started, SimulatedBoard.stop, lambda board: board.over, _GOODBYE_S)
            for board in started:
                board.close()
        return self.outcome

    def _is_over(self, stopping: Callable[[], bool]) -> bool:
        if time.monotonic() - self._counted_s >= _TOLD_EVERY_S:
            self._count()
            self._counted_s = time.monotonic()
        return stopping()

    def _run_until_all(
        self,
        loop: Loop,
        boards: list[SimulatedBoard],
        do: Callable[[SimulatedBoard], None],
        done: Callable[[SimulatedBoard], bool],
        most_s: float,
    ) -> None:
        """For at most so long."""
        waiting, by_s = list(boards), time.monotonic() + most_s
        for board in boards:
            do(board)

        def over() -> bool:
            while waiting and done(waiting[-1]):
                waiting.pop()
            return not waiting or time.monotonic() > by_s

        loop.run(over)

    def _prepare(self, loop: Loop, folder: Path) -> None:
        wishes = self._wishes
        self._started_s = time.monotonic()
        plan = BoardOptions(self._endpoint, wishes, board_config(wishes), folder, self._started_s)
        noted = self._noting(self.outcome.dials), self._noting(self.outcome.arrivals)
        self._boards = [SimulatedBoard(number, plan, loop, *noted) for number in range(wishes.devices)]
        allow_files(sum(board.files for board in self._boards))
        step_s = _START_S if wishes.ramp_s is None else wishes.ramp_s / wishes.devices
        for number, board in enumerate(self._boards):
            loop.at(self._started_s + number * step_s, board.start)
        for storm_s in wishes.storms:
            loop.at(self._started_s + storm_s, self._cut_all)

    def _count(self) -> None:
        outcome, up = self.outcome, [board for board in self._boards if board.starts]
        outcome.connected = sum(board.connected for board in up)
        outcome.made, outcome.confirmed = sum(board.last[1] for board in up), sum(board.confirmed for board in up)
        outcome.starts = sum(board.starts for board in up)
        outcome.attempts = sum(board.attempts for board in up)
        outcome.results = Counter()
        for board in up:
            outcome.results.update(board.results)

    def _noting(self, times: list[float]) -> Callable[[], None]:
        return lambda: times.append(time.monotonic() - self._started_s)

    def _cut_all(self) -> None:
        for board in self._boards:
            board.cut()


@contextmanager
def _long_lived() -> Iterator[None]:
    """Nearly all objects of thousands of boards live until the end, and the others are not in circles: who looks
    through them all for garbage, as Python does again and again, stands still for seconds, and brokers hang up."""
    before = gc.get_threshold()
    gc.set_threshold(_YOUNG, before[1], _NEVER)
    try:
        yield
    finally:
        gc.freeze()  # nor at the end of the process, which is near
        gc.set_threshold(*before)


def allow_files(wanted: int) -> None:
    """Let this process have so many sockets and files open. Raises ConfigError (`simulation.files`)."""
    wanted += _SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= wanted:
        return
    if hard < wanted:
        found, remedy = f"a limit of {hard} open files", "raise it (ulimit -Hn), or simulate fewer boards"
        raise ConfigError("simulation.files", found, f"{wanted} for the boards that are asked for", remedy)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
