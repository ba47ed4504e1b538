"""A recording that ends while a job collects: the job goes on with what there is, and no other begins."""

from __future__ import annotations

from dataclasses import replace

import pytest
from executor_bench import snapshot_of
from job_bench import JobDeskBench, ScriptedChild, job_desk, two_engines

from agent.collection.collection import SharedCollection
from agent.common.errors import AgentError
from agent.control.reasons import explain
from agent.jobs.child_process import JobOutcome

__all__ = ["job_desk", "two_engines"]  # fixtures


@pytest.fixture
def collecting(job_desk: JobDeskBench) -> JobDeskBench:
    """A first start that waits for 512 frames, and has 100."""
    job_desk.service.calibration = None
    job_desk.state = replace(job_desk.state, drift=None)
    look(job_desk)
    assert job_desk.executor.state.job is not None
    return job_desk


def look(at: JobDeskBench) -> None:
    at.executor.tick({"camera": at.state})


def test_a_job_goes_on_with_the_frames_there_are_and_says_so(
    collecting: JobDeskBench, caplog: pytest.LogCaptureFixture
) -> None:
    at = collecting
    with caplog.at_level("INFO"):
        for _ in range(3):
            assert at.executor.end_collection()
            look(at)
    assert caplog.text.count("the recording has ended: the job continues with 100 of 512 frames") == 1
    assert at.executor.state.job is not None
    assert at.executor.state.job.child_since_s is not None
    ScriptedChild.latest.ends_with(JobOutcome(artefact=at.other.path))
    look(at)
    assert at.service.serving.id == at.other.id
    assert not at.executor.end_collection()


@pytest.mark.parametrize("counts", [(0, 0), (100, 3)])
def test_too_few_for_a_verdict_end_with_the_recording(
    collecting: JobDeskBench, monkeypatch: pytest.MonkeyPatch, counts: tuple[int, int]
) -> None:
    monkeypatch.setattr(SharedCollection, "counts", counts)
    assert not collecting.executor.end_collection()
    (record,) = collecting.journal.records()
    assert record.error is not None
    assert (record.state.value, record.error.code) == ("FAILED", "recalibration.frames")
    why = explain(snapshot_of(collecting.executor, {"camera": collecting.state})).degraded
    assert "the recording has ended" in why
    assert "camera.loop: true" in why


def test_after_the_end_no_job_begins(collecting: JobDeskBench) -> None:
    at = collecting
    at.executor.end_collection()
    look(at)
    at.configure(cooldown_s=0.0)
    ScriptedChild.latest.ends_with(
        JobOutcome(error=AgentError("recalibration.disk", "a full disk", "room", "free some"))
    )
    look(at)
    assert at.executor.state.job is None
    assert not at.executor.end_collection()
