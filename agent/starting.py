"""What is built before the first frame, told on the terminal, in the log and over MQTT, and to systemd, which waits."""

from __future__ import annotations

import time

from agent.console import Task
from agent.health import notify_service_manager
from agent.reporting import Reporter

_QUIET_S = 2.0  # an engine that is there by then was only loaded, and that is no news
_PATIENCE_S = 300  # a builder may think this long about one step; after that it hangs


class Starting:
    """Progress of one engine of the start. `title` says which."""

    def __init__(self, title: str, reporter: Reporter, bar: Task) -> None:
        self._title = title
        self._reporter = reporter
        self._bar = bar
        self._started_s = time.monotonic()
        self._told = -1

    def __call__(self, fraction: float, doing: str) -> None:
        percent = round(100 * fraction)
        self._bar.update(percent, f"{self._title}: {doing}")
        if time.monotonic() - self._started_s < _QUIET_S:
            return
        notify_service_manager(f"EXTEND_TIMEOUT_USEC={_PATIENCE_S * 1_000_000}")
        if percent // 10 != self._told:
            self._told = percent // 10
            self._reporter.event("job", trigger="start", step="BUILDING", percent=percent, engine=self._title)
