"""CUDA's order of things on the CPU: what is queued on a stream happens when somebody waits for it, and no earlier.

A GPU may be that late. Code may read a result without waiting, or change what a queued copy has to read. Here it gets
wrong values every time, and not once a month. Copies of memory that is not page-locked are late, too. CUDA never
promises less.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fake_pycuda import FakePycuda


class Queue:
    """The work of one stream, in order. It is kept when the stream is dropped: CUDA finishes it, too.

    captured: what is put while the stream is captured as a graph, and then not done; None when it is not.
    """

    def __init__(self) -> None:
        self.queued = 0
        self.captured: list[Callable[[], object]] | None = None
        self._done = 0
        self._work: deque[Callable[[], object]] = deque()
        self._lock = threading.RLock()

    def put(self, work: Callable[[], object]) -> None:
        if self.captured is not None:
            self.captured.append(work)
            return
        self._work.append(work)
        self.queued += 1

    def is_done(self, until: int) -> bool:
        return self._done >= until

    def run(self, until: int | None = None) -> None:
        """Do the work up to the given count, all of it by default."""
        with self._lock:
            while self._work and (until is None or self._done < until):
                self._done += 1
                self._work.popleft()()


class Stream:
    """pycuda.driver.Stream"""

    def __init__(self, fake: FakePycuda, flags: int = 0) -> None:
        fake.work("stream", flags)
        self._fake = fake
        self.handle = fake.add_stream()

    def synchronize(self) -> None:
        self._fake.work("synchronize", self)
        self._fake.queue(self.handle).run()


class Event:
    """pycuda.driver.Event"""

    def __init__(self, fake: FakePycuda, flags: int = 0) -> None:
        fake.work("event", flags)
        self._fake = fake
        self._queue = fake.queue(0)
        self._mark = 0
        fake.watch(self, "an event")

    def record(self, stream: Stream | None = None) -> Event:
        self._fake.work("record", stream)
        self._queue = self._fake.queue(0 if stream is None else stream.handle)
        self._mark = self._queue.queued
        return self

    def query(self) -> bool:
        return self._queue.is_done(self._mark)

    def synchronize(self) -> Event:
        self._fake.work("event_synchronize", None)
        self._queue.run(self._mark)
        return self
