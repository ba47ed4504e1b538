"""Read the fleet's store for pages, and write what they order, without holding up any other page.

The store is opened again for each reading, in a thread: a server that changed hands or a file that was moved is noticed
at once. All viewers share the readings, which happen only while there are viewers. If one fails, the page keeps the one
before, and says why.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import math
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from agent.common.clock import SYSTEM_CLOCK, Clock
from agent.common.errors import CommandError
from agent.common.heap import release_free_memory
from calibrate.errors import TaredError
from fleet.store.opening import open_existing
from fleet.store.transaction import FleetStore

T = TypeVar("T")

_THREADS = 2
_PATIENCE_S = 3.0  # for which a page waits for a reading
_REST = 9.0  # times as long as a reading takes: the pause after it
_MOST_KEPT = 8
_CACHE_KIB = 1024


@dataclass(frozen=True)
class Reading:
    """A part of a page, as the store had it.

    html: empty before the first reading. digest: of the html. at: when it was read, Unix time in s. trouble: why there
    is nothing newer, in one sentence; empty if the newest reading went well.
    """

    html: str = ""
    digest: str = ""
    at: float | None = None
    trouble: str = ""


@dataclass
class _Kept:
    reading: Reading = Reading()
    next_s: float = -math.inf  # when it may be read again; monotonic
    task: asyncio.Task[None] | None = None


class FleetRoom:
    """The store of a fleet. A context manager.

    fleet: its name. files: the folder of the models and calibrations that rollouts may send; None: none. clock: that of
    its pages.
    """

    def __init__(self, db: str, fleet: str, files: Path | None = None, clock: Clock = SYSTEM_CLOCK) -> None:
        """db: as `open_existing`."""
        self.fleet, self.files, self.clock = fleet, files, clock
        self._db = db
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._pool = ThreadPoolExecutor(_THREADS, "store")

    def __enter__(self) -> FleetRoom:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def read(self, key: str, make: Callable[[FleetStore], str], every_s: float) -> Reading:
        """Return a part of a page, of the newest reading; it is read again if that is `every_s` old.

        Args:
            key: Names the part.
            make: Reads it, in a thread.
        """
        kept = self._kept.setdefault(key, _Kept())
        self._kept.move_to_end(key)
        while len(self._kept) > _MOST_KEPT:
            self._kept.popitem(last=False)
        if kept.task is None and self.clock.monotonic_s() >= kept.next_s:
            kept.task = asyncio.create_task(self._renew(kept, make, every_s))
        if (task := kept.task) is not None:
            await asyncio.wait({task}, timeout=_PATIENCE_S)
            if task.done():
                task.result()  # raises what is no TaredError: a bug
        return kept.reading

    async def write(self, act: Callable[[FleetStore], T]) -> T:
        """Change the store in a thread, and let every part be read again. Raises AgentError as the store does."""
        try:
            return await self._run(act)
        finally:
            for kept in self._kept.values():
                kept.next_s = -math.inf

    async def _renew(self, kept: _Kept, make: Callable[[FleetStore], str], every_s: float) -> None:
        begun_s, now = self.clock.monotonic_s(), self.clock.wall_s()
        kept.next_s = math.inf
        try:
            html = await self._run(make)
        except TaredError as error:
            subject = "" if isinstance(error, CommandError) else "The fleet's store cannot be read: "
            trouble = f"{subject}{error.found}; expected {error.expected}; {error.remedy}."
            kept.reading = Reading(kept.reading.html, kept.reading.digest, kept.reading.at, trouble)
        else:
            digest = hashlib.blake2s(html.encode(), digest_size=8).hexdigest()
            kept.reading = Reading(html, digest, now)
        finally:
            kept.task = None
            if kept.next_s == math.inf:  # else something was written meanwhile
                ended_s = self.clock.monotonic_s()
                kept.next_s = ended_s + max(every_s, _REST * (ended_s - begun_s))

    async def _run(self, act: Callable[[FleetStore], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, functools.partial(self._opened, act))

    def _opened(self, act: Callable[[FleetStore], T]) -> T:
        try:
            with open_existing(self._db, _CACHE_KIB) as store:
                return act(store)
        finally:
            release_free_memory()  # rows of thirty days are megabytes
