"""The job of a start with a changed runtime: whatever is begun ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.common.errors import AgentError
from agent.contract.messages import Birth
from agent.jobs.job import JobJournal, JobState
from agent.jobs.recovery import CrashRecovery
from agent.uplink.reporter import Reporter


@pytest.mark.parametrize(("refuses", "end"), [(True, JobState.FAILED), (False, JobState.COMMITTED)])
def test_a_job_ends_though_its_first_step_cannot_be_journaled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuses: bool, end: JobState
) -> None:
    past = CrashRecovery(tmp_path, Reporter(None, Birth(agent_version="0")))

    def refuse(*_: object, **__: object) -> None:
        raise AgentError("journal.write", "a full disk", "", "")

    with monkeypatch.context() as patched:
        if refuses:
            patched.setattr(JobJournal, "enter", refuse)
        past.on_start_error(AgentError("artefact.runtime", "another", "this one", ""))
    past.engine_started("0123", degraded=False)
    assert [record.state for record in past.journal.records()] == [end]
