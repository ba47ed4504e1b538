"""How much the outbox keeps, and for how long."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable

from agent.clock import unix_s
from agent.mqtt_config import OutboxConfig
from agent.outbox_rows import Rows

log = logging.getLogger(__name__)

NO_CLOCK_S = 1_704_067_200.0  # 2024: a board that says less has not heard what time it is
RANGE = "range"  # the kind of a run that was itself forgotten
_ROOM = 0.9  # of the bound is left when it is reached, so that not every row after that drops one
_STEP = 0.05  # of it are dropped, before it is looked again what the runs take that come of it
_MOST_RUNS = 0.25  # of it may be runs of epochs that have no rows any more; the rest is for rows
_DAY_S = 86400.0
_AGED_EVERY_S = 3600.0
_CLOCK_JUMP_S = 60.0  # between two commits: somebody has set the clock


class Bounds:
    """In bytes and in days; one thread's."""

    def __init__(self, config: OutboxConfig, clock: Callable[[], float] = unix_s) -> None:
        """clock: Unix time as the board has it."""
        self._config = config
        self._clock = clock
        self._aged_s = 0.0
        self._clocks = clock(), time.monotonic()

    def keep(self, rows: Rows, epoch: int) -> Counter[str]:
        """Drop what is too much, or too old; by kind. epoch: the one that goes on."""
        dropped: Counter[str] = Counter()
        if time.monotonic() >= self._aged_s:
            self._aged_s = time.monotonic() + _AGED_EVERY_S
            if self._clock() > NO_CLOCK_S:  # nobody can say how old it is: it counts from now on
                rows.date(NO_CLOCK_S, self._clock())
            dropped += rows.drop_older(self._clock() - self._config.days * _DAY_S)
        if rows.size_bytes() > self._config.bytes:
            dropped += self._make_room(rows, epoch)
        return dropped

    def set_dates(self, rows: Rows) -> None:
        """A board without a battery for its clock starts in 1970, and all it has would seem too old once the clock is
        set: what is dated before the jump is of as long ago as the board has known since."""
        wall, monotonic = self._clocks
        self._clocks = self._clock(), time.monotonic()
        passed_s = self._clocks[1] - monotonic
        jump_s = self._clocks[0] - wall - passed_s
        if jump_s > _CLOCK_JUMP_S:
            rows.redate(wall + passed_s, jump_s)  # the latest that the clock can have said before

    def _make_room(self, rows: Rows, epoch: int) -> Counter[str]:
        """Each row that goes may leave a run behind: so neither takes the place of the other."""
        dropped: Counter[str] = Counter()
        while True:
            if forgotten := rows.runs.forget_epochs(epoch, round(_MOST_RUNS * self._config.bytes)):
                log.warning("outbox=forgotten ranges=%d: more starts without a broker than it can tell of", forgotten)
                dropped[RANGE] += forgotten
            size, enough = rows.size_bytes(), round(_ROOM * self._config.bytes)
            gone = rows.drop_oldest(max(enough, size - round(_STEP * self._config.bytes)))
            if not gone:
                return dropped
            dropped += gone
