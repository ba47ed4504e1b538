"""Report engines that are built at the start: on the terminal, in the log, over MQTT and to systemd."""

from __future__ import annotations

import time
from collections.abc import Callable

from agent.common.errors import AgentError
from agent.common.main_thread import RunInMainThread
from agent.jobs.job import RUNTIME, JobJournal, JobState, JobTracker
from agent.system.process import notify_service_manager
from agent.uplink.reporter import Reporter
from calibrate.errors import TaredError

_QUIET_S = 2.0  # nothing is reported before: an engine that is ready by then was only loaded
_PATIENCE_S = 300  # the longest that a builder takes for one step; after that it hangs


class StartupProgress:
    """The progress callback of one engine that is built at the start.

    Args:
        title: The engine's name for people.
        show: Called at every step with the percentage and the step.
        run_in_main_thread: For an engine that is built in another thread, beside the video. systemd no longer waits
            then, and its watchdog must not be put off. None: the engine is built in the reporter's thread.
    """

    def __init__(
        self,
        title: str,
        reporter: Reporter,
        show: Callable[[int, str], None],
        run_in_main_thread: RunInMainThread | None = None,
    ) -> None:
        self._title = title
        self._reporter = reporter
        self._show = show
        self._run_in_main_thread = run_in_main_thread
        self._started_s = time.monotonic()
        self._reported = -1  # tens of percent

    def __call__(self, fraction: float, doing: str) -> None:
        percent = round(100 * fraction)
        self._show(percent, f"{self._title}: {doing}")
        if time.monotonic() - self._started_s < _QUIET_S:
            return
        if self._run_in_main_thread is None:
            notify_service_manager(f"EXTEND_TIMEOUT_USEC={_PATIENCE_S * 1_000_000}")
        if percent // 10 == self._reported:
            return
        self._reported = percent // 10

        def report() -> None:
            self._reporter.event("job", trigger="start", step="BUILDING", percent=percent, engine=self._title)

        if self._run_in_main_thread is None:
            report()
        else:
            self._run_in_main_thread(report)


class RuntimeRebuildJob:
    """The job of a start after a change of the runtime: the engine is rebuilt from its own calibration."""

    def __init__(self, journal: JobJournal, reporter: Reporter, current: str) -> None:
        """current: id of the artefact that served before; empty without one."""
        self._journal = journal
        self._reporter = reporter
        self._request = {"instead_of": current}
        self._report: JobTracker | None = None
        self._error: TaredError | None = None
        self._refusal: AgentError | None = None  # of the journal, at the job's first step

    def on_error(self, error: TaredError) -> None:
        """Report an error that `EngineService.start` met; that of an artefact of another runtime starts the job."""
        self._reporter.error(error)
        self._error = error
        if error.code == "artefact.runtime" and self._report is None:
            try:
                self._report = JobTracker(RUNTIME, self._reporter, lambda _: None, None, self._journal, self._request)
                self._report.progress(JobState.BUILDING.value, 0)
            except AgentError as refusal:  # the engine is rebuilt all the same
                self._reporter.error(refusal)
                self._refusal = refusal

    def engine_started(self, artefact: str, degraded: bool) -> None:
        """End the job, if there is one: this artefact serves; degraded: it is the reference."""
        if self._report is None:
            return
        if degraded and self._error is not None:
            self._report.fail(self._error)
        elif self._report.state is JobState.BUILDING:
            self._report.succeed({"artefact": artefact})
        elif self._refusal is not None:
            self._report.fail(self._refusal)
