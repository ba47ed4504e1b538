"""Where jobs begin: one at a time, each in the journal before anything of it is done."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from agent.commands import Report
from agent.errors import AgentError
from agent.heap import give_back
from agent.housekeeping import Housekeeping
from agent.job import MODEL
from agent.job_journal import JobJournal
from agent.job_report import JobReport
from agent.job_states import JobState
from agent.reporting import Reporter
from agent.restraint import Restraint
from calibrate.errors import TaredError
from engines.backend import Engine

_JOINABLE = (JobState.REQUESTED, JobState.COLLECTING)


class JobDesk:
    """What a job leaves in the store, and in memory, is tidied up when it is over."""

    def __init__(
        self, reporter: Reporter, journal: JobJournal, restraint: Restraint, housekeeping: Housekeeping
    ) -> None:
        self._reporter = reporter
        self._journal = journal
        self._restraint = restraint
        self._housekeeping = housekeeping
        self._latest: JobReport | None = None
        self._untidy = True  # the start may have left something, and so may the process before

    @property
    def job(self) -> JobReport | None:
        """The running one, on probation too."""
        return self._latest if self._latest is not None and not self._latest.over else None

    def begin(
        self,
        trigger: str,
        request: Mapping[str, Any],
        command: Report | None = None,
        on_failure: Callable[[TaredError], None] | None = None,
    ) -> JobReport:
        """A job, of which none runs. on_failure hears why it came to nothing, unless it was just cancelled.

        What failed by itself may pass, but is not tried again at once. Raises AgentError (`journal.write`).
        """

        def failed(error: TaredError) -> None:
            if command is None and trigger != MODEL:
                self._restraint.pause_jobs()
            if on_failure is not None:
                on_failure(error)

        self._latest = JobReport(trigger, self._reporter, failed, command, self._journal, request)
        self._untidy = True
        return self._latest

    def begin_with(
        self, engine: Engine, trigger: str, request: Mapping[str, Any], command: Report | None = None
    ) -> JobReport:
        """As `begin`, for an engine that is loaded already, and closed where there is no job."""
        try:
            return self.begin(trigger, request, command)
        except AgentError:
            engine.close()
            raise

    def recall(self, serving: str, command: Report) -> JobReport:
        """The operator's rollback of what is on probation, journaled beside the job that it ends.

        It is done as soon as `serving`, the artefact that is current, serves again: also by another process, which must
        not take the repeated command for one to go back further. Raises AgentError (`journal.write`).
        """
        report = JobReport("rollback", self._reporter, lambda _: None, command, self._journal, {"op": "rollback"})
        report.probation(serving)
        return report

    def joins(self, request: Mapping[str, Any], command: Report) -> bool:
        """Whether the running job is to do just that, with frames of now; it then carries out this command, too. Raises
        AgentError (`journal.write`)."""
        if self.job is None or self.job.request != request or self.job.state not in _JOINABLE:
            return False
        self.job.join(command)
        return True

    def tidy(self) -> None:
        """Once after each job; nothing may be running. A recalibration that the operator wanted and that stays is the
        word that jobs may start by themselves again."""
        if self._untidy:
            self._untidy = False
            latest = self._latest
            if latest is not None and (latest.trigger, latest.state) == ("command", JobState.COMMITTED):
                self._restraint.clear_rollbacks()
            self._housekeeping.tidy()
            give_back()
