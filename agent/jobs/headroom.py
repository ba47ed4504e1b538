"""Decide whether the board can afford a job now: before its process starts, and while it runs.

Before the start all limits of `recalibration.headroom` count: memory, temperature, power and throttling. A running
process is paused with more tolerance: by low memory, heat and throttling.
"""

from __future__ import annotations

from collections.abc import Iterator

from agent.common.clock import SYSTEM_CLOCK, Clock
from agent.common.errors import AgentError
from agent.config import HeadroomConfig
from agent.system.board import BoardReading, BoardState

_READ_EVERY_S = 1.0  # rails are measured over I2C; callers may call more often
_HYSTERESIS_C = 5.0
_CALM_S = 10.0  # without a reason, before a paused process goes on
_LOW_MEMORY = 0.25  # share of the memory that must be free at the start: below this the process is paused
_ENOUGH_MEMORY = 0.5  # from here on it goes on


class Headroom:
    """The headroom of one job, with the time that it has waited and paused. Called from one thread.

    Attributes:
        paused_s: Seconds that the process has been paused so far, which do not count against its time limit.
    """

    def __init__(self, limits: HeadroomConfig, board: BoardState, clock: Clock = SYSTEM_CLOCK) -> None:
        self._limits = limits
        self._board = board
        self._clock = clock
        self._reading: BoardReading | None = None
        self._read_s = 0.0
        self._events: int | None = None
        self._over_current = False
        self._refused_s: float | None = None
        self._pause = ""
        self._troubled_s = 0.0
        self._checked_s: float | None = None
        self.paused_s = 0.0

    def reason_to_wait(self) -> str:
        """Return why the process must not start yet; empty if it may.

        Raises AgentError (`headroom.delay`) once it has had to wait for longer than max_delay_s.
        """
        reason = "; ".join(self._against_start(self._now()))
        if not reason:
            return ""
        now_s = self._clock.monotonic_s()
        if self._refused_s is None:
            self._refused_s = now_s
        most_s = self._limits.max_delay_s
        if most_s is not None and now_s - self._refused_s > most_s:
            raise AgentError(
                "headroom.delay",
                f"{reason}, for more than {most_s:.0f} s",
                "a board with headroom for a job",
                "cool the board, end other work on it, or change recalibration.headroom",
            )
        return reason

    def reason_to_pause(self) -> str:
        """Return why the process must pause; empty if it may run. A pause lasts until nothing was amiss for 10 s.

        Raises AgentError (`headroom.pause`) once all pauses together take longer than max_pause_s.
        """
        reading, now_s = self._now(), self._clock.monotonic_s()
        if self._pause and self._checked_s is not None:
            self.paused_s += now_s - self._checked_s
        self._checked_s = now_s
        reason = "; ".join(self._against_running(reading))
        if reason:
            self._pause, self._troubled_s = reason, now_s
        elif now_s - self._troubled_s >= _CALM_S:
            self._pause = ""
        most_s = self._limits.max_pause_s
        if self._pause and most_s is not None and self.paused_s > most_s:
            raise AgentError(
                "headroom.pause",
                f"{self._pause}, and pauses of more than {most_s:.0f} s together",
                "a board that can afford the job",
                "cool the board, free memory, or change recalibration.headroom",
            )
        return self._pause

    def _now(self) -> BoardReading:
        """Return the board's state, at most a second old."""
        now_s = self._clock.monotonic_s()
        if self._reading is None or now_s - self._read_s >= _READ_EVERY_S:
            self._reading, self._read_s = self._board.read(), now_s
            events = self._reading.over_current_events
            self._over_current = events is not None and self._events is not None and events > self._events
            self._events = events
        return self._reading

    def _against_start(self, reading: BoardReading) -> Iterator[str]:
        limits = self._limits
        if limits.memory_bytes is not None:
            yield from _short(reading, limits.memory_bytes)
        if limits.temperature_margin_c is not None:
            yield from self._hot(reading, limits.temperature_margin_c)
        for rail in reading.rails:
            if limits.power_share is not None and rail.share is not None and rail.share > limits.power_share:
                yield f"{rail.name} at {100 * rail.share:.0f} % of its limit"
        yield from self._throttled(reading)

    def _against_running(self, reading: BoardReading) -> Iterator[str]:
        """Yield the reasons to pause. Power is none, because the process itself takes it; throttling by it is one."""
        limits = self._limits
        if limits.memory_bytes is not None:
            yield from _short(reading, limits.memory_bytes * (_ENOUGH_MEMORY if self._pause else _LOW_MEMORY))
        if limits.temperature_margin_c is not None:
            yield from self._hot(reading, _HYSTERESIS_C if self._pause else 0.0)
        yield from self._throttled(reading)

    def _hot(self, reading: BoardReading, margin_c: float) -> Iterator[str]:
        """Yield the zones above their limit. Where no limit is known, a Jetson's is assumed on a Jetson only."""
        assumed_c = self._limits.temperature_limit_c if reading.is_jetson else None
        for zone in reading.zones:
            limit_c = zone.limit_c if zone.limit_c is not None else assumed_c
            if limit_c is not None and zone.temperature_c > limit_c - margin_c:
                yield f"{zone.name} at {zone.temperature_c:.0f} C, limit {limit_c:.0f} C"

    def _throttled(self, reading: BoardReading) -> Iterator[str]:
        if not self._limits.throttling:
            return
        if reading.throttling:
            yield f"throttled by {' '.join(reading.throttling)}"
        if self._over_current:
            yield "throttled for over-current"


def _short(reading: BoardReading, least_bytes: float) -> Iterator[str]:
    available_bytes = reading.memory_available_bytes
    if available_bytes is not None and available_bytes < least_bytes:
        yield f"{_mib(available_bytes)} of memory available, {_mib(least_bytes)} needed"


def _mib(size_bytes: float) -> str:
    return f"{size_bytes / 2**20:.0f} MiB"
