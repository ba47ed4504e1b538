"""What the frames of a run have shown, for its summary: of all cameras together, and of several of each."""

from __future__ import annotations

from agent.findings import least_faithful
from agent.pipeline import Pipeline
from agent.summary import CameraSummary, RunSummary


def sum_up(summary: RunSummary, pipeline: Pipeline) -> None:
    """Fidelity and what goes with it are those of the least faithful camera."""
    states, findings = pipeline.observer.states(), pipeline.observer.findings
    cameras = {
        name: CameraSummary(feed.run_meter.sample(), states[name].fidelity, feed.labelled)
        for name, feed in pipeline.feeds.items()
    }
    camera = least_faithful(states)
    summary.loop, summary.last_ts = pipeline.run_meter.sample(), pipeline.last_ts
    summary.fidelity, summary.fidelity_since = states[camera].fidelity, states[camera].fidelity_since
    summary.fidelity_history = findings[camera].history()
    summary.live_accuracy = cameras[camera].live_accuracy
    summary.cameras = cameras if len(cameras) > 1 else {}
