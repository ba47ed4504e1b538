"""One simulated board: what lasts of it, its power, and what goes wrong with it."""

from __future__ import annotations

import random
import shutil
import time
from collections import Counter
from collections.abc import Callable

from agent.contract.topics import Topics
from agent.system.clock import unix_s
from fleet.simulator.context import BoardContext
from fleet.simulator.daemon import Daemon
from fleet.simulator.engines import Engines
from fleet.simulator.event_loop import Loop, Timer
from fleet.simulator.options import BoardOptions, rubbish
from fleet.simulator.scene import SimulatedScene

_RESTART_S = 1.0


class SimulatedBoard:
    """`start` it once; from then on the loop drives it. starts: of its daemon, so far."""

    def __init__(
        self, number: int, plan: BoardOptions, loop: Loop, on_dial: Callable[[], None], on_admitted: Callable[[], None]
    ) -> None:
        """number: from 0. on_dial, on_admitted: called each time it wants to connect, and a broker has admitted it."""
        self.topics = Topics(plan.wishes.fleet, board_name(number))
        self.starts = 0
        self._plan, self._loop = plan, loop
        self._rng = rng = random.Random(f"{plan.wishes.seed}/{number}")
        self._skew_s = rng.gauss(0.0, plan.wishes.clock_skew_s)
        faults = plan.wishes.faults
        self._restores, self._no_clock = rng.random() < faults.restore, rng.random() < faults.no_clock
        self._crashes = rng.random() < faults.crash or self._restores
        self._hostile = rng.random() < faults.hostile
        scene = SimulatedScene(plan.wishes.drift, number % plan.wishes.drift.groups, rng)
        engines = Engines(loop, scene, plan, rng)
        folder = plan.folder / self.topics.device
        told = on_dial, on_admitted
        self._site = BoardContext(number, plan, loop, self.topics, rng, scene, engines, folder, self._crashes, *told)
        self._daemon: Daemon | None = None
        self._timers: dict[str, Timer] = {}

    @property
    def files(self) -> int:
        """How many stay open: three of an outbox on the disk, and a socket."""
        return 4 if self._crashes else 1

    @property
    def connected(self) -> bool:
        """Whether it is on the air."""
        return self._daemon is not None and self._daemon.connected

    @property
    def over(self) -> bool:
        """Whether it has left, after `stop`."""
        return self._daemon is None or self._daemon.client.over

    @property
    def attempts(self) -> int:
        """To connect, so far."""
        return self._site.attempts + (self._daemon.client.attempts if self._daemon is not None else 0)

    @property
    def last(self) -> tuple[int, int]:
        """The present epoch, and its greatest number so far; zeros before the first start."""
        return self._daemon.outbox.last if self._daemon is not None else (0, 0)

    @property
    def confirmed(self) -> int:
        """How many rows of the present epoch a collector has, as far as is known."""
        return self._daemon.confirmed if self._daemon is not None else 0

    @property
    def results(self) -> Counter[str]:
        """Final ones of commands, by status."""
        return self._site.results

    @property
    def settled(self) -> bool:
        """Whether nothing is waited for: a collector has all of the present epoch, or there never was one; a board
        whose power is off has nothing to wait with."""
        return not self.confirmed or self.confirmed >= self.last[1] or self.over

    def start(self) -> None:
        """Power on, or the service manager starts a daemon once more."""
        boot_s = time.monotonic()

        def clock() -> float:
            return time.monotonic() - boot_s if self._no_clock else unix_s() + self._skew_s

        self._site.attempts = self.attempts
        self.starts += 1
        self._daemon = Daemon(self._site, clock, self._restart)
        self._daemon.start()
        if self._crashes:
            self._after(self._rng.expovariate(1.0 / self._plan.wishes.faults.every_s), self._crash)
        if self._hostile:
            self._send_rubbish()

    def hush(self) -> None:
        """No more rows, faults or jobs from now on; see `settled`."""
        self._cancel_timers()
        if self._daemon is not None and not self.over:
            self._daemon.hush()

    def stop(self) -> None:
        """Say goodbye; see `over`."""
        if self._daemon is not None and not self.over:
            self._daemon.stop()

    def cut(self) -> None:
        """Its connection, as when the network or the broker has gone."""
        if self._daemon is not None:
            self._daemon.client.cut()

    def close(self) -> None:
        """At the end of the simulation, after `stop`."""
        if self._daemon is not None:
            self._daemon.close()

    def _crash(self) -> None:
        """The power fails; it is back after a while."""
        self._cancel_timers()
        if self._daemon is not None:
            self._daemon.power_off()
            self._daemon.close()
        self._after(self._rng.uniform(*self._plan.wishes.down_s), self._come_back)

    def _come_back(self) -> None:
        folder = self._site.folder
        backup = folder.with_suffix(".backup")
        if self._restores and backup.exists():
            shutil.rmtree(folder)
            shutil.copytree(backup, folder)
        elif self._restores:
            shutil.copytree(folder, backup)
        self.start()

    def _restart(self) -> None:
        """The daemon's, which says goodbye. What lies in memory alone is not to be lost by that."""
        daemon = self._daemon
        if daemon is None:
            return
        if not self._crashes and 0 < daemon.confirmed < daemon.made:
            self._after(_RESTART_S, self._restart)
            return
        self._cancel_timers()
        daemon.stop()
        self._after(_RESTART_S, self._start_again)

    def _start_again(self) -> None:
        if not self.over:
            self._after(_RESTART_S, self._start_again)
            return
        self.close()
        self.start()

    def _send_rubbish(self) -> None:
        victim = Topics(self._plan.wishes.fleet, board_name(self._rng.randrange(self._plan.wishes.devices)))
        if self._daemon is not None:
            for message in rubbish(self.topics, victim, self.last[0], self._rng):
                self._daemon.client.publish(message)
        self._after(self._rng.expovariate(1.0 / self._plan.wishes.faults.every_s), self._send_rubbish)

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        """Unless the power fails before."""
        self._timers[action.__name__] = self._loop.at(time.monotonic() + seconds, action)

    def _cancel_timers(self) -> None:
        for timer in self._timers.values():
            timer.cancel()


def board_name(number: int) -> str:
    """Of the board of this number: names sort as numbers do."""
    return f"sim-{number:06d}"
