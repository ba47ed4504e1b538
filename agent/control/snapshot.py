"""The board at one moment, as plain values: all that status, telemetry, history, metrics and displays are made of.

`take_snapshot` is the only reader of the parts that change. The supervisor takes one snapshot a turn, and one for each
answer to `status`. A snapshot never changes, so other threads get it whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import JsonValue

from agent.common.latency import LoopSample, LoopTotals
from agent.control.executor import Executor
from agent.core.due import stopped_by
from agent.core.state import State
from agent.labelling.accuracy import MeasuredAccuracy
from agent.monitoring.camera_monitor import CameraState, least_faithful
from agent.monitoring.estimates import Estimate
from agent.results.preview import Preview
from agent.results.writer import ResultsWriter
from agent.uplink.reporter import EventCounts
from calibrate.errors import TaredError


@dataclass(frozen=True)
class CameraSnapshot:
    """One camera.

    Args:
        last_ts: Capture time of the latest frame that was answered; 0 before the first.
        is_up, lost: As in Feed.
        state: What the observer has found.
        accuracy: By labels, of the engine that serves.
        answers_bytes: Memory of the answers that labels may still come for.
        totals: Its frames since the run began.
        served, published: Its frames since the previous telemetry, until they were answered, and until every output
            had them. None between two telemetries; `published` also without outputs.
    """

    last_ts: float
    is_up: bool
    lost: str
    state: CameraState
    accuracy: Estimate
    answers_bytes: int
    totals: LoopTotals
    served: LoopSample | None = None
    published: LoopSample | None = None


@dataclass(frozen=True)
class BoardSnapshot:
    """The whole board.

    Args:
        engine: Id of the artefact in service.
        backend: Name of the inference runtime.
        is_degraded: The float reference serves.
        is_raised: More layers are float than planned.
        state: On which decisions rest.
        stopped_by: Why no job starts by itself; empty where they do.
        unused: Why work that was made offline is not used; asked for only while the float reference serves.
        collected: Frames of the collection, and informative ones of those that judge.
        is_stuck: A candidate that was taken back still hangs.
        regimes: Ids of the artefacts of known regimes.
        policies: Policy by artefact; of masks their number.
        cameras: By name.
        totals: Frames of all cameras since the run began.
        measured: By labels of drawn frames; None without any.
        counts: Events so far.
        tolerance_db, reference_accuracy: As configured.
        results_dropped: Lines lost, by output.
        preview: State of the preview; None without one.
    """

    engine: str
    backend: str
    is_degraded: bool
    is_raised: bool
    state: State
    stopped_by: str
    unused: tuple[TaredError, ...]
    collected: tuple[int, int]
    is_stuck: bool
    regimes: tuple[str, ...]
    policies: Mapping[str, dict[str, JsonValue]]
    cameras: Mapping[str, CameraSnapshot]
    totals: LoopTotals
    measured: MeasuredAccuracy | None
    counts: EventCounts
    tolerance_db: float
    reference_accuracy: float | None
    results_dropped: Mapping[str, int] = field(default_factory=dict)
    preview: Mapping[str, JsonValue] | None = None

    @property
    def serving(self) -> str:
        """Id of the artefact that answers: the candidate's from its first answer on."""
        return self.state.candidate or self.engine

    @property
    def last_ts(self) -> float:
        """Capture time of the latest frame that was answered, of any camera."""
        return max(camera.last_ts for camera in self.cameras.values())

    @property
    def states(self) -> Mapping[str, CameraState]:
        """What the observer has found, by camera."""
        return {name: camera.state for name, camera in self.cameras.items()}

    @property
    def least_faithful(self) -> str:
        """Name of the camera that stands for the board."""
        return least_faithful(self.states)


def take_snapshot(
    executor: Executor,
    results: ResultsWriter | None = None,
    preview: Preview | None = None,
    *,
    for_telemetry: bool = False,
) -> BoardSnapshot:
    """Return the board as of now. Call it in the supervisor's thread.

    for_telemetry: Begin a new stretch of `served` and `published`.
    """
    service, pipeline, state, watch = executor.service, executor.pipeline, executor.state, executor.watch
    config, observer = executor.config, pipeline.observer
    outputs = results.latency if results is not None and for_telemetry else {}
    cameras = {
        name: CameraSnapshot(
            last_ts=feed.last_ts,
            is_up=feed.is_up,
            lost=feed.lost,
            state=found,
            accuracy=feed.accuracy.estimate,
            answers_bytes=feed.accuracy.answers.nbytes,
            totals=feed.run_meter.totals(),
            served=feed.meter.sample() if for_telemetry else None,
            published=outputs[name].sample() if name in outputs else None,
        )
        for name, found in observer.states().items()
        for feed in (pipeline.feeds[name],)
    }
    return BoardSnapshot(
        engine=service.serving.id,
        backend=service.backend.name,
        is_degraded=service.is_degraded,
        is_raised=service.is_precision_raised,
        state=state,
        stopped_by=stopped_by(executor.now, config, state),
        unused=tuple(executor.unused) if service.is_degraded else (),
        collected=observer.collection.counts,
        is_stuck=pipeline.loop.is_stuck,
        regimes=tuple(watch.regimes.artefacts),
        policies=watch.policies.summaries,
        cameras=cameras,
        totals=pipeline.run_meter.totals(),
        measured=observer.measured,
        counts=executor.reporter.counts.copy(),
        tolerance_db=config.drift.tolerance_db,
        reference_accuracy=config.model.reference_accuracy,
        results_dropped=results.dropped if results is not None else {},
        preview=preview.as_dict() if preview is not None else None,
    )
