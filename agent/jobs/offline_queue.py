"""Choose the offline work that the first calibration begins with, and try nothing twice in vain.

`OfflineQueue` reads what `start` and `calibration.file` name, once, when a first calibration is due. Files that cannot
be used are reported, and so is work whose candidate was refused; the board then calibrates by itself. The journal of
jobs remembers what was tried: an attempt is the content of the files together with the settings of the candidate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from agent.config import Config
from agent.jobs.job import JobJournal, JobState
from agent.jobs.limits import REFUSED
from agent.models.engine_service import EngineService
from agent.models.offline_work import CALIBRATION_FILE, START, OfflineWork
from calibrate.errors import TaredError
from engines.store.artefact import fingerprint


@dataclass(frozen=True)
class OfflineAttempt:
    """A first calibration that begins with offline work. id: fingerprint of its content and of the settings."""

    work: OfflineWork
    id: str

    @property
    def request(self) -> Mapping[str, str]:
        """The request as the journal keeps it."""
        return {"offline": self.work.setting, "path": str(self.work.path), "attempt": self.id}


class OfflineQueue:
    """The offline work that is still to be tried, `start` first. Runs in the supervisor's thread.

    Attributes:
        unused: By setting, the error that says why its work is not used.
    """

    def __init__(
        self, config: Config, service: EngineService, journal: JobJournal, report: Callable[[TaredError], None]
    ) -> None:
        """report: called once for each work that cannot be used, and for an engine that has to be built again."""
        self.unused: dict[str, TaredError] = {}
        self._service = service
        self._report = report
        paths = {START: config.start, CALIBRATION_FILE: config.calibration.file}
        self._works = [OfflineWork(setting, path) for setting, path in paths.items() if path is not None]
        self._contents: dict[OfflineWork, str] = {}
        self._vain = _attempts_in_vain(journal) if self._works else {}  # by attempt, its error

    def next(self, settings: str) -> OfflineAttempt | None:
        """Return the attempt that is due; None: the board calibrates by itself.

        settings: what the candidate depends on beside its work, as `settings_id` returns it.
        """
        for work in self._works:
            content = self._content(work)
            attempt = OfflineAttempt(work, fingerprint({"content": content, "settings": settings}))
            if content and attempt.id not in self._vain:
                self.unused.pop(work.setting, None)  # under other settings it was refused
                return attempt
            if content:
                self.unused[work.setting] = work.refusal(self._vain[attempt.id])
        return None

    def note_failure(self, attempt: str, error: TaredError) -> None:
        """Note that the attempt of this id ended with this error."""
        if _was_in_vain(JobState.FAILED, error):
            self._vain[attempt] = error

    def _content(self, work: OfflineWork) -> str:
        """Return what identifies a work; empty where it cannot be used. It is read once."""
        if work not in self._contents:
            service = self._service
            try:
                loaded = work.load(service.model, service.backend, service.store.key)
            except TaredError as error:
                self._contents[work], self.unused[work.setting] = "", work.refusal(error)
                self._report(self.unused[work.setting])
            else:
                self._contents[work] = loaded.content
                if loaded.misfit is not None:
                    self._report(loaded.misfit)
        return self._contents[work]


def _attempts_in_vain(journal: JobJournal) -> dict[str, TaredError]:
    """Return the attempts of earlier processes that are not made again, each with its error."""
    return {
        str(record.request["attempt"]): record.error
        for record in journal.records()
        if record.error is not None and "attempt" in record.request and _was_in_vain(record.state, record.error)
    }


def _was_in_vain(state: JobState, error: TaredError) -> bool:
    """Return True for a candidate that was refused, or that was on probation: its engine may have ended the daemon.

    Any other error, such as a full disk or short memory, may pass.
    """
    return state is JobState.ROLLED_BACK or (state is JobState.FAILED and error.code in REFUSED)
