"""Reads ahead: while one batch is being stored, the next is read."""

from __future__ import annotations

import queue
import threading
from contextlib import suppress

from agent.intake import Intake
from fleet.batch import Batch, Reader

_GATHER_S = 0.1  # and so long it waits for more
_WAIT_S = 0.2  # until it looks whether it is to end


class Reading:
    """Batches of what an intake has, in their order, made by a thread of its own; a context manager. One is ready
    at a time, and one more may be read already. batch_bytes: of messages, at most about so much in one."""

    def __init__(self, intake: Intake, reader: Reader, batch_bytes: int) -> None:
        self._intake = intake
        self._reader = reader
        self._batch_bytes = batch_bytes
        self._ready: queue.Queue[Batch | BaseException] = queue.Queue(1)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="reading", daemon=True)

    def __enter__(self) -> Reading:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        with suppress(queue.Empty):  # which it may be waiting to get rid of
            self._ready.get_nowait()
        self._thread.join()

    def next(self, wait_s: float) -> Batch | None:
        """The next one; None where there is none for so long. Raises what ended the thread, which is a bug."""
        try:
            batch = self._ready.get(timeout=wait_s)
        except queue.Empty:
            return None
        if isinstance(batch, BaseException):
            raise batch
        return batch

    def _run(self) -> None:
        try:
            while not self._ending.is_set():
                if arrivals := self._intake.take(self._batch_bytes, _WAIT_S, _GATHER_S):
                    self._ready.put(self._reader.read(arrivals))
        except BaseException as error:
            self._ready.put(error)
