"""Look at the work that the owner has made offline, which a first calibration begins with.

`OfflineQueue` reads what `start` and `calibration.file` name, once. An attempt is the content of the files together
with the settings of the candidate; the journal of jobs remembers which were made in vain.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

from agent.config import Config
from agent.core.causes import Cause, cause_of
from agent.core.facts import Offline
from agent.core.state import JobState
from agent.models.engine_service import EngineService
from agent.models.offline_work import CALIBRATION_FILE, START, OfflineWork
from calibrate.errors import TaredError
from engines.store.artefact import fingerprint

if TYPE_CHECKING:
    from agent.jobs.job import JobRecord


class OfflineQueue:
    """The offline work that config.yaml names, `start` first. Runs in the supervisor's thread."""

    def __init__(self, config: Config, service: EngineService, report: Callable[[TaredError], None]) -> None:
        """report: called once for each work that cannot be used, and for an engine that has to be built again."""
        self._service = service
        self._report = report
        paths = {START: config.start, CALIBRATION_FILE: config.calibration.file}
        self._works = [OfflineWork(setting, path) for setting, path in paths.items() if path is not None]
        self._contents: dict[OfflineWork, str] = {}
        self._unusable: dict[OfflineWork, TaredError] = {}

    def works(self, settings: str, vain: Collection[str]) -> list[Offline]:
        """Return it as far as the first that can be tried; what comes after that is not read yet.

        Args:
            settings: What a candidate depends on beside its work, as `settings_id` returns it.
            vain: Attempts that were made in vain.
        """
        found: list[Offline] = []
        for work in self._works:
            found.append(Offline(work.setting, str(work.path), self._attempt(work, settings)))
            if found[-1].attempt and found[-1].attempt not in vain:
                break
        return found

    def unused(self, settings: str, vain: Mapping[str, TaredError]) -> list[TaredError]:
        """Return why work is not used. vain: as in State."""
        return [
            work.refusal(error)
            for work in self._works
            if work in self._contents
            and (error := self._unusable.get(work) or vain.get(self._attempt(work, settings))) is not None
        ]

    def _attempt(self, work: OfflineWork, settings: str) -> str:
        content = self._content(work)
        return fingerprint({"content": content, "settings": settings}) if content else ""

    def _content(self, work: OfflineWork) -> str:
        """Return what identifies a work; empty where it cannot be used. It is read once."""
        if work not in self._contents:
            service = self._service
            try:
                loaded = work.load(service.model, service.backend, service.store.key)
            except TaredError as error:
                self._contents[work], self._unusable[work] = "", error
                self._report(work.refusal(error))
            else:
                self._contents[work] = loaded.content
                if loaded.misfit is not None:
                    self._report(loaded.misfit)
        return self._contents[work]


def attempts_in_vain(records: list[JobRecord]) -> dict[str, TaredError]:
    """Return the attempts of earlier processes that are not made again, each with its error.

    So are a candidate's that was refused, or that was on probation: its engine may have ended the daemon.
    """
    return {
        str(record.request["attempt"]): record.error
        for record in records
        if record.error is not None
        and "attempt" in record.request
        and (
            record.state is JobState.ROLLED_BACK
            or (record.state is JobState.FAILED and cause_of(record.error) is Cause.REFUSED)
        )
    }
