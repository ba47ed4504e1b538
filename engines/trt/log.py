"""Receive TensorRT's log: the only place where it says why something failed, and without a GPU the only list of layers.

TensorRT knows one logger per process: whichever was registered first gets every later message too.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from engines.errors import EngineError
from engines.trt.api import implement
from engines.trt.layers import LISTING
from engines.trt.release import TensorRtRelease

Made = TypeVar("Made")

log = logging.getLogger(__package__)

_MOST_MESSAGES = 200  # kept messages of each kind: a builder that fails again and again must not fill the memory


@dataclass
class LogRecord:
    """The messages of one recording: errors and warnings in order, and the last that lists an engine's layers."""

    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    listing: str = ""

    @property
    def last_error(self) -> str:
        """The last error, on one line; its cause usually stands there too."""
        return " ".join(self.errors[-1].split()) if self.errors else "no reason was given"


class Messages:
    """Receives the messages of one process and hands them to whoever listens. TensorRT calls from several threads."""

    def __init__(self, release: TensorRtRelease) -> None:
        self._records: list[LogRecord] = []
        self._lock = threading.Lock()
        self._name = release.name
        self.logger = implement(release.trt.ILogger, log=self.receive)

    @contextmanager
    def recorded(self) -> Iterator[LogRecord]:
        """Record messages for the length of a `with`."""
        record = LogRecord()
        with self._lock:
            self._records.append(record)
        try:
            yield record
        finally:
            with self._lock:
                self._records.remove(record)

    def create(self, factory: Callable[[Any], Made]) -> Made:
        """Return a Builder or a Runtime. Raises EngineError (`backend.cuda`) if CUDA does not start for it."""
        with self.recorded() as record:
            try:
                return factory(self.logger)
            except TypeError as error:  # the bindings' answer to the null pointer
                raise EngineError(
                    "backend.cuda",
                    f"{self._name} does not start: {record.last_error}",
                    "a GPU, and a driver as new as its CUDA",
                    "see what `tared doctor` finds; update JetPack or the driver",
                ) from error

    def receive(self, severity: Any, message: str) -> None:
        """Receive one message; severity is one of ILogger's constants."""
        kind = str(severity).rpartition(".")[2]
        is_error, is_warning = kind in ("ERROR", "INTERNAL_ERROR"), kind == "WARNING"
        if is_error or is_warning:
            log.debug("%s: %s", kind.lower(), message)  # the caller that it makes fail reports an error
        with self._lock:
            for record in self._records:
                if is_error:
                    record.errors[_MOST_MESSAGES:] = [message]
                elif is_warning:
                    record.warnings[_MOST_MESSAGES:] = [message]
                elif message.startswith(LISTING):
                    record.listing = message


@functools.cache
def messages(release: TensorRtRelease) -> Messages:
    """Return the log of this process, which lives as long as the process: engines call it until they are gone."""
    return Messages(release)
