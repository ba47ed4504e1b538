"""Fidelity below what the owner accepts, though the scales fit the scene: then INT8 itself is what costs it."""

from __future__ import annotations

from collections.abc import Callable

from agent.config import Config
from agent.findings import ObserverState
from agent.job_report import JobReport
from agent.raising import EXHAUSTED
from agent.recalibration import CANCELLED
from agent.reporting import Reporter
from calibrate.errors import TaredError


def is_low(state: ObserverState, config: Config) -> bool:
    """Whether what serves loses more than `recalibration.max_loss`, with 95 % confidence, and no recalibration helps.

    As many frames have to say so as make a calibration: neighbours are right and wrong together.
    """
    drift, fidelity = state.drift, state.fidelity
    scales_fit = drift is not None and drift.state == "calm" and drift.serving_db <= config.drift.tolerance_db
    sees = not state.outage and not state.view.trouble
    enough = fidelity.n >= config.calibration.frames
    return scales_fit and sees and enough and fidelity.high < 1.0 - config.recalibration.max_loss


class Attempts:
    """What was tried in vain, by the artefact whose fidelity it was for; forgotten with the process."""

    def __init__(self) -> None:
        self._failed: dict[str, int] = {}
        self._exhausted: set[str] = set()

    def next_rung(self, artefact: str) -> int:
        """What to try next for it, as in `Raising`; 0 where nothing is left to try."""
        return 0 if artefact in self._exhausted else self._failed.get(artefact, 0) + 1

    def failed(self, artefact: str, error: TaredError | None = None) -> None:
        """An attempt ended with this error, or was taken back later. One that was only cancelled is as good as new."""
        if error is not None and error.code == EXHAUSTED:
            self._exhausted.add(artefact)
        elif error is None or error.code != CANCELLED:
            self._failed[artefact] = self._failed.get(artefact, 0) + 1


class AttemptReport(JobReport):
    """Of a job that raises precision for what serves. on_end hears how it fails, cancelled or not."""

    def __init__(
        self, reporter: Reporter, on_failure: Callable[[], None], on_end: Callable[[TaredError], None]
    ) -> None:
        super().__init__("precision", reporter, on_failure, None)
        self._on_end = on_end

    def fail(self, error: TaredError) -> None:
        self._on_end(error)
        super().fail(error)
