"""One engine for another, between two frames; committed once the new one has served."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from agent.errors import AgentError
from agent.pipeline import Pipeline
from agent.recalibration import JobObserver, Post
from agent.reporting import Reporter
from agent.service import Loaded, Service
from agent.summary import RunSummary, Swap
from agent.verdict import Verdict
from calibrate.errors import TaredError


@dataclass(frozen=True)
class Cause:
    """Why an engine is put in service, since when (monotonic s) that is wanted, and who hears of it."""

    trigger: str
    since_s: float
    report: JobObserver
    verdict: Verdict | None = None


class Exchange:
    """At most one at a time. on_live(loaded, since) hears from which capture time on the new engine serves."""

    def __init__(
        self,
        service: Service,
        pipeline: Pipeline,
        reporter: Reporter,
        summary: RunSummary,
        post: Post,
        on_live: Callable[[Loaded, float], None],
    ) -> None:
        self._service = service
        self._pipeline = pipeline
        self._reporter = reporter
        self._summary = summary
        self._post = post
        self._on_live = on_live
        self.under_way = False  # an engine waits for its first frame

    def start(self, loaded: Loaded, cause: Cause) -> None:
        """Hand the engine to the frame path."""
        self.under_way = True
        self._pipeline.loop.swap(
            loaded.artefact.id, loaded.engine, lambda ts: self._post(lambda: self._live(loaded, cause, ts))
        )

    def _live(self, loaded: Loaded, cause: Cause, ts: float | None) -> None:
        """It has served the frame of capture time `ts`; None: frames have ended."""
        self.under_way = False
        if self._pipeline.error is not None:
            cause.report.fail(AgentError("swap.stopped", "the frame path has failed", "frames", "see the log"))
            return
        try:
            self._service.commit(loaded)
        except TaredError as error:
            self._reporter.error(error)
        self._on_live(loaded, self._pipeline.last_ts if ts is None else ts)
        verdict = cause.verdict
        swap = Swap(
            ts,
            loaded.artefact.id,
            cause.trigger,
            round(time.monotonic() - cause.since_s, 2),
            verdict.fidelity if verdict else None,
            verdict.fidelity_serving if verdict else None,
        )
        self._summary.swaps.append(swap)
        self._summary.artefact = str(loaded.artefact.path)
        detail = {"capture_ts" if key == "ts" else key: value for key, value in asdict(swap).items()}
        self._reporter.event("rollback" if cause.trigger == "rollback" else "swap", **detail)
        cause.report.succeed({"artefact": loaded.artefact.id, "fidelity": swap.fidelity})
