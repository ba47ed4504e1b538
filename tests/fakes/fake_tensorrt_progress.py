"""The phases of a build that the fake reports: those of TensorRT-RTX 1.7.1, without the smallest."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fake_tensorrt_types import IProgressMonitor

_ROOT = "Building engine"
_PHASES = (  # phase, parent, steps, and the parent's steps that are done before it starts
    ("Cloning network graph", _ROOT, 5, 0),
    ("Preparing graph for optimization", _ROOT, 4, 2),
    ("Building engine from subgraph", _ROOT, 1, 4),
    ("Optimizing graph", "Building engine from subgraph", 30, 0),
    ("Computing profile costs", "Building engine from subgraph", 5, 0),
    ("Timing tactics", "Computing profile costs", 3, 0),
)


class BuildCanceled(Exception):
    """The monitor said stop."""


class Progress:
    """Report the phases of a build to a monitor. Of what it raises, only step_complete's counts, and that as a stop."""

    def __init__(self, monitor: IProgressMonitor | None) -> None:
        self._monitor = monitor
        self._open: list[str] = []
        self._steps: dict[str, int] = {}
        self._done: dict[str, int] = {}

    @contextmanager
    def phases(self) -> Iterator[None]:
        """The phases before the body, and their ends after it. Raises BuildCanceled."""
        try:
            self._start(_ROOT, None, 6)
            for phase, parent, steps, before in _PHASES:
                while self._open[-1] != parent:
                    self._finish()
                self._step_to(parent, before)
                self._start(phase, parent, steps)
            yield
            while self._open:
                self._finish()
        except BuildCanceled:
            while self._open:
                self._report("phase_finish", self._open.pop())
            raise

    def _start(self, phase: str, parent: str | None, steps: int) -> None:
        self._open.append(phase)
        self._steps[phase], self._done[phase] = steps, 0
        self._report("phase_start", phase, parent, steps)

    def _step_to(self, phase: str, done: int) -> None:
        while self._done[phase] < done:
            step = self._done[phase]
            self._done[phase] += 1
            if not self._report("step_complete", phase, step) and self._monitor is not None:
                raise BuildCanceled

    def _finish(self) -> None:
        self._step_to(self._open[-1], self._steps[self._open[-1]])
        self._report("phase_finish", self._open.pop())

    def _report(self, call: str, *arguments: Any) -> object:
        try:
            return getattr(self._monitor, call)(*arguments) if self._monitor is not None else True
        except BaseException:
            return None
