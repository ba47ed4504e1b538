"""Simulate one board: its power, its restarts, and what goes wrong with it."""

from __future__ import annotations

import shutil
from asyncio import TimerHandle
from collections.abc import Callable

from agent.common.clock import Clock
from agent.contract.topics import Topics
from fleet.simulator.context import BoardContext, board_name
from fleet.simulator.daemon import Daemon
from fleet.simulator.options import BoardOptions, rubbish

_RESTART_S = 1.0


class BoardClock(Clock):
    """The clock of a board that was just switched on: wrong by a constant, or started in 1970."""

    def __init__(self, context: BoardContext) -> None:
        self._context = context
        self._boot_s = self.monotonic_s()

    def wall_s(self) -> float:
        if self._context.no_clock:
            return self.monotonic_s() - self._boot_s
        return super().wall_s() + self._context.skew_s


class SimulatedBoard:
    """A board: `start` it once; from then on the loop drives it. starts: of its daemon, so far."""

    def __init__(self, number: int, options: BoardOptions) -> None:
        """number: of the board, from 0."""
        self.context = BoardContext(number, options)
        self.starts = 0
        self._simulation = options.simulation
        self._daemon: Daemon | None = None
        self._timers: dict[str, TimerHandle] = {}

    @property
    def files(self) -> int:
        """The number of files that stay open: three of an outbox on the disk, and a socket."""
        return 4 if self.context.on_disk else 1

    @property
    def connected(self) -> bool:
        """True if its daemon is connected."""
        return self._daemon is not None and self._daemon.client.connected

    @property
    def has_left(self) -> bool:
        """True if it has ended, after `stop`."""
        return self._daemon is None or self._daemon.client.has_left

    @property
    def attempts(self) -> int:
        """Attempts to connect, so far."""
        return self.context.attempts + (self._daemon.client.attempts if self._daemon is not None else 0)

    @property
    def newest_row(self) -> tuple[int, int]:
        """The present epoch, and the number of its newest row; zeros before the first start."""
        return self._daemon.outbox.last if self._daemon is not None else (0, 0)

    @property
    def confirmed(self) -> int:
        """The number of rows of the present epoch that a collector has confirmed."""
        return self._daemon.confirmed if self._daemon is not None else 0

    @property
    def is_confirmed(self) -> bool:
        """True if nothing is waited for.

        A collector has confirmed all rows of the present epoch, or none at all (there is none); or the power is off.
        """
        return not self.confirmed or self.confirmed >= self.newest_row[1] or self.has_left

    def start(self) -> None:
        """Start a daemon: the power comes on, or the service manager starts it again."""
        self.context.attempts = self.attempts
        self.starts += 1
        self._daemon = Daemon(self.context, BoardClock(self.context), self._restart)
        self._daemon.start()
        if self.context.on_disk:
            self._after(self.context.rng.expovariate(1.0 / self._simulation.faults.every_s), self._crash)
        if self.context.is_hostile:
            self._send_rubbish()

    def stop_producing(self) -> None:
        """End faults and jobs, and make no more rows; see `is_confirmed`."""
        self._cancel_timers()
        if self._daemon is not None and not self.has_left:
            self._daemon.stop_producing()

    def stop(self) -> None:
        """Say goodbye; see `has_left`."""
        if self._daemon is not None and not self.has_left:
            self._daemon.stop()

    def cut(self) -> None:
        """Cut its connection, as when the network or the broker fails."""
        if self._daemon is not None:
            self._daemon.client.cut()

    def close(self) -> None:
        """Close its files, at the end of the simulation and after `stop`."""
        if self._daemon is not None:
            self._daemon.close()

    def _crash(self) -> None:
        """Let the power fail; it comes back after a while."""
        self._cancel_timers()
        if self._daemon is not None:
            self._daemon.power_off()
            self._daemon.close()
        self._after(self.context.rng.uniform(*self._simulation.down_s), self._power_on)

    def _power_on(self) -> None:
        folder = self.context.folder
        backup = folder.with_suffix(".backup")
        if self.context.restores and backup.exists():
            shutil.rmtree(folder)
            shutil.copytree(backup, folder)
        elif self.context.restores:
            shutil.copytree(folder, backup)
        self.start()

    def _restart(self) -> None:
        """Restart the daemon; rows that lie in memory only are delivered first."""
        daemon = self._daemon
        if daemon is None:
            return
        if not self.context.on_disk and 0 < daemon.confirmed < daemon.outbox.last[1]:
            self._after(_RESTART_S, self._restart)
            return
        self._cancel_timers()
        daemon.stop()
        self._after(_RESTART_S, self._start_once_ended)

    def _start_once_ended(self) -> None:
        if not self.has_left:
            self._after(_RESTART_S, self._start_once_ended)
            return
        self.close()
        self.start()

    def _send_rubbish(self) -> None:
        victim = Topics(self._simulation.fleet, board_name(self.context.rng.randrange(self._simulation.devices)))
        if self._daemon is not None:
            for message in rubbish(self.context.topics, victim, self.newest_row[0], self.context.rng):
                self._daemon.client.publish(message)
        self._after(self.context.rng.expovariate(1.0 / self._simulation.faults.every_s), self._send_rubbish)

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        """Call an action later, unless the power fails before."""
        self._timers[action.__name__] = self.context.options.loop.call_later(seconds, action)

    def _cancel_timers(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
