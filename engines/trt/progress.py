"""Report how far the builder is, as one fraction, and stop it: TensorRT's progress monitor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from engines.interface import Progress
from engines.trt.release import TensorRtRelease


@dataclass
class _Phase:
    """A phase under way: `done` of its `steps`."""

    parent: str | None
    steps: int
    done: int = 0


class BuildProgress:
    """Phases nest: a phase's share of the whole is that of the step of its parent during which it runs.

    What `progress` raises, a KeyboardInterrupt too, must not pass through TensorRT's C++: it is kept in `stopped`, the
    builder is told to stop, and `reraise` raises it once the builder has returned.
    """

    def __init__(self, release: TensorRtRelease, progress: Progress) -> None:
        self._progress = progress
        self._phases: dict[str, _Phase] = {}
        self._fraction = 0.0
        self.stopped: BaseException | None = None
        self.monitor = _monitor(release, self)

    def start(self, phase: str, parent: str | None, steps: int) -> None:
        self._phases[phase] = _Phase(parent, max(steps, 1))

    def step(self, phase: str, step: int) -> bool:
        """One step is done; False stops the builder."""
        if phase in self._phases:
            self._phases[phase].done = step + 1
            self._report(phase)
        return self.stopped is None

    def finish(self, phase: str) -> None:
        """A phase has ended, and its last step too, which TensorRT does not always report."""
        if phase in self._phases:
            self._phases[phase].done = self._phases[phase].steps
            self._report(phase)
            del self._phases[phase]

    @contextmanager
    def stopping(self) -> Iterator[None]:
        """Stop the builder at its next step if the `with` raises, which goes no further; the first reason counts."""
        try:
            yield
        except BaseException as error:
            self.stopped = self.stopped or error

    def reraise(self) -> None:
        """Raise what stopped the builder, if anything did."""
        if self.stopped is not None:
            raise self.stopped

    def _report(self, phase: str) -> None:
        """Report the fraction, never less than before: a root phase may follow another. Nothing after a stop."""
        if self.stopped is not None:
            return
        self._fraction = max(self._fraction, self._share(phase))
        with self.stopping():
            self._progress(self._fraction, phase)

    def _share(self, name: str) -> float:
        """Return the fraction of the root phase that is done, seen from a phase inside it."""
        phase = self._phases[name]
        share = min(phase.done / phase.steps, 1.0)
        while phase.parent in self._phases:
            phase = self._phases[phase.parent]
            share = min((phase.done + share) / phase.steps, 1.0)
        return share


def _monitor(release: TensorRtRelease, progress: BuildProgress) -> Any:
    base = release.trt.IProgressMonitor

    class Monitor(base):  # type: ignore[misc, valid-type]  # the class is known only when the module is there
        def phase_start(self, phase: str, parent: str | None, steps: int) -> None:
            progress.start(phase, parent, steps)

        def step_complete(self, phase: str, step: int) -> bool:
            return progress.step(phase, step)

        def phase_finish(self, phase: str) -> None:
            progress.finish(phase)

    return Monitor()
