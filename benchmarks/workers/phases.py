"""Where a process spends its time: CPU and wall seconds by phase, inner phases taken off the outer ones."""

from __future__ import annotations

import functools
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Phases:
    """The time from the process's start to this object's birth is the phase 'start of the process', in CPU seconds."""

    def __init__(self) -> None:
        self._cpu: dict[str, float] = defaultdict(float, {"start of the process": time.process_time()})
        self._wall: dict[str, float] = defaultdict(float)
        self._inner: list[list[float]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Everything in the block that is not in a phase of its own."""
        self._inner.append([0.0, 0.0])
        began, began_cpu = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            cpu, wall = time.process_time() - began_cpu, time.perf_counter() - began
            inner_cpu, inner_wall = self._inner.pop()
            self._cpu[name] += cpu - inner_cpu
            self._wall[name] += wall - inner_wall
            if self._inner:
                self._inner[-1][0] += cpu
                self._inner[-1][1] += wall

    def wrap(self, owner: Any, attribute: str, name: str) -> None:
        """From now on, calls of owner.attribute are the phase `name`."""
        function: Callable[..., Any] = getattr(owner, attribute)

        @functools.wraps(function)
        def timed(*arguments: Any, **keywords: Any) -> Any:
            with self.phase(name):
                return function(*arguments, **keywords)

        setattr(owner, attribute, timed)

    def report(self, **facts: Any) -> None:
        """Print one line of JSON, the last of the process."""
        print(json.dumps({"phases": {name: [cpu, self._wall[name]] for name, cpu in self._cpu.items()}, **facts}))
