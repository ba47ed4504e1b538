"""What is built at the start, told on the terminal, in the log and over MQTT, and to systemd while that waits."""

from __future__ import annotations

import time
from collections.abc import Callable

from agent.common.errors import AgentError
from agent.jobs.job import RUNTIME, JobJournal, JobState
from agent.jobs.report import JobTracker
from agent.system.process import notify_service_manager
from agent.uplink.reporter import Reporter
from calibrate.errors import TaredError

_QUIET_S = 2.0  # an engine that is there by then was only loaded, and that is no news
_PATIENCE_S = 300  # a builder may think this long about one step; after that it hangs


class StartupProgress:
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


class RuntimeRebuildJob:
    """The job that a change of the runtime makes of a start: what serves is built anew from its own calibration."""

    def __init__(self, journal: JobJournal, reporter: Reporter, current: str) -> None:
        """current: id of what served; empty where nothing did."""
        self._journal = journal
        self._reporter = reporter
        self._request = {"instead_of": current}
        self._report: JobTracker | None = None
        self._error: TaredError | None = None
        self._refusal: AgentError | None = None  # of the journal, at the job's first step

    def on_error(self, error: TaredError) -> None:
        """What `Service.start` meets."""
        self._reporter.error(error)
        self._error = error
        if error.code == "artefact.runtime" and self._report is None:
            try:
                self._report = JobTracker(RUNTIME, self._reporter, lambda _: None, None, self._journal, self._request)
                self._report.progress(JobState.BUILDING.value, 0)
            except AgentError as refusal:  # the engine is wanted all the same
                self._reporter.error(refusal)
                self._refusal = refusal

    def serves(self, artefact: str, degraded: bool) -> None:
        """It has started: with this artefact, or with the reference for want of one."""
        if self._report is None:
            return
        if degraded and self._error is not None:
            self._report.fail(self._error)
        elif self._report.state is JobState.BUILDING:
            self._report.succeed({"artefact": artefact})
        elif self._refusal is not None:
            self._report.fail(self._refusal)
