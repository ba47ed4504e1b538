"""How a job goes, told to the world and, where a command asked for it, to the operator."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from agent.commands import Report
from agent.recalibration import CANCELLED
from agent.reporting import Reporter
from calibrate.errors import TaredError


class JobReport:
    """A JobObserver. on_failure: of a job that was not just cancelled."""

    def __init__(
        self, trigger: str, reporter: Reporter, on_failure: Callable[[], None], command: Report | None
    ) -> None:
        self._trigger = trigger
        self._reporter = reporter
        self._on_failure = on_failure
        self._command = command
        self._step = ""

    def progress(self, step: str, percent: int) -> None:
        level = logging.DEBUG if step == self._step else logging.INFO
        self._step = step
        self._reporter.event("job", level, trigger=self._trigger, step=step, percent=percent)
        if self._command is not None:
            self._command.progress(step, percent)

    def succeed(self, result: dict[str, Any]) -> None:
        if self._command is not None:
            self._command.succeed(result)

    def fail(self, error: TaredError) -> None:
        if error.code == CANCELLED:
            self._reporter.event("job", trigger=self._trigger, step="CANCELLED", message=error.found)
        else:
            self._reporter.error(error, trigger=self._trigger)
            self._on_failure()
        if self._command is not None:
            self._command.fail(error)
