"""Define the agent's errors; each carries a stable code, what was found, what was expected, and the remedy."""

from __future__ import annotations

import errno
import logging
import traceback

from calibrate.errors import TaredError

_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN)


class AgentError(TaredError):
    """Base of everything the agent reports to its user."""


class ConfigError(AgentError):
    """config.yaml or a model spec that cannot be used."""

    @property
    def lines(self) -> list[str]:
        """The errors that it lists; one if it lists none."""
        first, *listed = self.found.rstrip().split("\n  ")
        return listed or [f"{first}; expected {self.expected}"]


class CameraError(AgentError):
    """A source that cannot be opened, or that ends where it should not."""


class DatasetError(AgentError):
    """A labelled data set that cannot be evaluated."""


class CommandError(AgentError):
    """A command from the operator that is refused."""


class FaultLog:
    """Log exceptions that a part survives, with their traceback: once for each place and kind."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._logged: set[tuple[object, ...]] = set()

    def note(self, caught: str, error: Exception) -> None:
        """Log an exception, unless one of its kind was raised at the same line and caught there before.

        caught: a name of the place that caught it.
        """
        raised = traceback.extract_tb(error.__traceback__)[-1:]
        fault = caught, type(error), *((each.filename, each.lineno) for each in raised)
        if fault not in self._logged:
            self._logged.add(fault)
            self._log.error("event=fault place=%s", caught, exc_info=error)


def fault_remedy(error: Exception) -> str:
    """Return the remedy for an exception that nobody expected: room, the disk, or a report to the authors."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in _NO_ROOM):
        return "check what else uses memory, descriptors or threads on this machine"
    if isinstance(error, OSError):
        return "check the disk and the rights to its files"
    return "report it, with the traceback from the log"
