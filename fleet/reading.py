"""Reads ahead: while one batch is being stored, the next is read."""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

from agent.intake import Intake
from fleet.batch import Batch, Reader

_WAIT_S = 0.2  # until it looks whether it is to end


class Read(NamedTuple):
    """batch: what so many arrivals are, the next ones that this intake had."""

    batch: Batch
    intake: Intake
    arrivals: int

    def settle(self) -> None:
        """None of it need come again."""
        self.intake.settle(self.arrivals)


class Reading:
    """Batches of what each of these intakes has, in its order, made by a thread for each; a context manager. One is
    ready at a time, and one more of each may be read already. gather_s: by intake, how long it waits for more.
    batch_bytes: of messages, at most about so much in one."""

    def __init__(self, gather_s: Mapping[Intake, float], reader: Reader, batch_bytes: int) -> None:
        self._reader = reader
        self._batch_bytes = batch_bytes
        self._ready: queue.Queue[Read | BaseException] = queue.Queue(1)
        self._ending = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=each, name="reading", daemon=True) for each in gather_s.items()
        ]

    def __enter__(self) -> Reading:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join()

    def next(self, wait_s: float) -> Read | None:
        """The next one; None where there is none for so long. Raises what ended a thread, which is a bug."""
        try:
            read = self._ready.get(timeout=wait_s)
        except queue.Empty:
            return None
        if isinstance(read, BaseException):
            raise read
        return read

    def _run(self, intake: Intake, gather_s: float) -> None:
        try:
            while not self._ending.is_set():
                if arrivals := intake.take(self._batch_bytes, _WAIT_S, gather_s):
                    self._offer(Read(self._reader.read(arrivals), intake, len(arrivals)))
        except BaseException as error:
            self._offer(error)

    def _offer(self, read: Read | BaseException) -> None:
        """Nobody may be there any more to take it."""
        while not self._ending.is_set():
            with suppress(queue.Full):
                self._ready.put(read, timeout=_WAIT_S)
                return
