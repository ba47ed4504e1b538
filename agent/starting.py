"""What is built at the start, told on the terminal, in the log and over MQTT, and to systemd while that waits."""

from __future__ import annotations

import time
from collections.abc import Callable

from agent.health import notify_service_manager
from agent.reporting import Reporter

_QUIET_S = 2.0  # an engine that is there by then was only loaded, and that is no news
_PATIENCE_S = 300  # a builder may think this long about one step; after that it hangs


class Starting:
    """Progress of one engine of the start. `title` says which; show(percent, doing) is called at every step.

    post: for an engine that is built in another thread, beside the video; it runs a function in the reporter's thread.
    systemd waits no longer then, and its watchdog must not be put off.
    """

    def __init__(
        self,
        title: str,
        reporter: Reporter,
        show: Callable[[int, str], None],
        post: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        self._title = title
        self._reporter = reporter
        self._show = show
        self._post = post
        self._started_s = time.monotonic()
        self._told = -1

    def __call__(self, fraction: float, doing: str) -> None:
        percent = round(100 * fraction)
        self._show(percent, f"{self._title}: {doing}")
        if time.monotonic() - self._started_s < _QUIET_S:
            return
        if self._post is None:
            notify_service_manager(f"EXTEND_TIMEOUT_USEC={_PATIENCE_S * 1_000_000}")
        if percent // 10 == self._told:
            return
        self._told = percent // 10
        if self._post is None:
            self._tell(percent)
        else:
            self._post(lambda: self._tell(percent))

    def _tell(self, percent: int) -> None:
        self._reporter.event("job", trigger="start", step="BUILDING", percent=percent, engine=self._title)
