"""Write the answers of all frames to the configured outputs, each as one JSON object on a line.

`ResultsWriter` is the thread between the frame path, which must not wait, and the outputs, which may be slow: a file, a
socket, an MQTT topic. Each of them implements `Output`. `ResultLine` is what they get: the same object that
`tared infer -o` writes, with a few keys more.
"""

from __future__ import annotations

import abc
import json
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from typing import Any

from agent.common.clock import SYSTEM_CLOCK, Clock
from agent.common.errors import AgentError, FaultLog, fault_remedy
from agent.common.latency import LoopMeter
from agent.common.timing import Backoff, RetryState
from agent.config import Config
from agent.vision.spec import ModelSpec
from agent.vision.task import ServedFrame, Show, as_served
from agent.vision.tasks.opening import open_task
from calibrate.errors import TaredError

log = logging.getLogger(__package__)

_WAITING = 256  # answers
_WAITING_LARGE = 8  # answers each of which may take MB
_END_S = 5.0  # time for the lines that wait at the end; a disk may hang
_WELL_AFTER = 30  # calls of an output in a row without a fault, after which it works again
_IDLE_S = 60.0  # between two looks at outputs that have nothing to do


class ResultLine:
    """One answer of the daemon, encoded by the first output that needs it."""

    def __init__(self, served: ServedFrame, spec: ModelSpec, show: Show = as_served) -> None:
        """show: what the owner lets be shown of it."""
        self.camera = served.frame.camera
        self._served = served
        self._spec = spec
        self._show = show

    @cached_property
    def document(self) -> dict[str, Any]:
        """The answer as `tared infer` has it, with camera, engine, and milliseconds from the frame's arrival on.

        Where a policy holds, `policy_left_out` counts what it leaves out.
        """
        served, frame = self._served, self._served.frame
        shown = self._show(served)
        policy = {"policy_left_out": served.result.left_out(shown.result)} if shown is not served else {}
        return {
            "frame": frame.id,
            "ts": frame.ts,
            "camera": frame.camera,
            "engine": served.engine_id,
            "latency_ms": round((served.done_ns - frame.captured_ns) / 1e6, 3),
            **shown.result.in_frame(shown.geometry).as_dict(self._spec),
            **policy,
        }

    @cached_property
    def encoded(self) -> bytes:
        """The document as JSON, with the newline."""
        return json.dumps(self.document).encode() + b"\n"


class Output(abc.ABC):
    """An output of lines. The writer's thread calls it, and no call may wait for a reader.

    Attributes:
        dropped: How many lines the output has lost; None for one that publishes samples.
        trouble: Why the output fails, while it fails.
    """

    name: str
    dropped: int | None = None
    trouble: AgentError | None = None

    @abc.abstractmethod
    def add(self, line: ResultLine) -> None:
        """Accept the next line."""

    @abc.abstractmethod
    def tick(self) -> float:
        """Do what is due. Return the seconds until the next call."""

    def flush(self) -> None:  # noqa: B027  (an output that publishes samples holds no lines)
        """Write every line that can be written now."""

    def close(self) -> None:  # noqa: B027  (nor is anything open)
        """Write every line, and close what is open."""


class ResultsWriter(threading.Thread):
    """A context manager; inside it, every answer that is offered goes to every output.

    The frame path calls `offer`, which neither waits nor computes. When the thread cannot keep up, the oldest answers
    are dropped. Whatever an output raises costs it that line alone. `on_change(name, error)` is called in the writer's
    thread when an output fails, with None when it works again. `show` returns what the owner lets be shown of an
    answer; it is called in that thread, too.
    """

    def __init__(self, config: Config, outputs: Sequence[Output], clock: Clock = SYSTEM_CLOCK) -> None:
        super().__init__(name="results", daemon=True)
        self._spec = config.model
        self._outputs = outputs
        self._clock = clock
        self._capacity = _WAITING_LARGE if open_task(config.model).has_large_answers else _WAITING
        self._waiting: deque[ServedFrame] = deque()  # without images; filled by the frame path alone
        self._overrun = 0
        self._wake = threading.Event()
        self._flushed = threading.Event()
        self._flush_requested = self._ending = False
        self.on_change: Callable[[str, TaredError | None], None] | None = None
        self.show: Show = as_served
        self._troubled: set[str] = set()
        self._faults = {
            output.name: RetryState(partial(self._report, output.name), Backoff(), _WELL_AFTER) for output in outputs
        }
        self._logged = FaultLog(log)
        self._lost: Counter[str] = Counter()  # by output, to a fault
        # By camera, from a frame's arrival until every output was handed its line.
        self.latency = {camera.name: LoopMeter(clock=clock) for camera in config.every_camera}

    def __enter__(self) -> ResultsWriter:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending = True
        self._wake.set()
        self.join(_END_S)

    def offer(self, served: ServedFrame) -> None:
        """Accept an answer; a sink of the frame path."""
        if len(self._waiting) >= self._capacity:
            with suppress(IndexError):  # the thread has just emptied it
                self._waiting.popleft()
                self._overrun += 1
        self._waiting.append(served.without_image)
        self._wake.set()

    @property
    def dropped(self) -> Mapping[str, int]:
        """The number of lines that each output has lost so far."""
        lost = {output.name: output.dropped for output in self._outputs}
        return {name: self._overrun + self._lost[name] + count for name, count in lost.items() if count is not None}

    def flush(self) -> None:
        """Wait until every answer offered has gone as far as it goes, for a few seconds at most."""
        self._flushed.clear()
        self._flush_requested = True
        self._wake.set()
        if self.is_alive():
            self._clock.wait(self._flushed, _END_S)

    def run(self) -> None:
        while not self._ending:
            self._clock.wait(self._wake, self._write_waiting())
            self._wake.clear()
        self._write_waiting()
        for output in self._outputs:
            try:
                output.close()
            except Exception as error:  # noqa: PERF203  (each is closed)
                self._note_fault(output, error)
        self._flushed.set()

    def _note_fault(self, output: Output, error: Exception) -> None:
        self._logged.note(output.name, error)
        failure = AgentError("results.failed", f"{type(error).__name__}: {error}", "no exception", fault_remedy(error))
        self._faults[output.name].note_failure(failure)

    def _report(self, output: str, error: TaredError | None) -> None:
        if self.on_change is not None:
            self.on_change(output, error)

    def _write_waiting(self) -> float:
        """Write the answers that wait. Return for how many seconds there is nothing else to do."""
        flushing, self._flush_requested = self._flush_requested, False
        written = 0
        while self._waiting and written < self._capacity:  # and not for as long as more come
            written += 1
            served = self._waiting.popleft()
            line = ResultLine(served, self._spec, self.show)
            for output in self._outputs:
                try:
                    output.add(line)
                except Exception as error:  # noqa: PERF203  (whatever it is, the video and other outputs go on)
                    self._lost[output.name] += 1
                    self._note_fault(output, error)
            self.latency[line.camera].record(self._clock.monotonic_ns() - served.frame.captured_ns)
        idle_s = _IDLE_S
        on_change = self.on_change  # trouble at the start waits until somebody is there to report it to
        for output in self._outputs:
            try:
                idle_s = min(idle_s, output.tick())
                if flushing:
                    output.flush()
            except Exception as error:
                self._note_fault(output, error)
            else:
                self._faults[output.name].note_success()
            # Report changes only: a disk that stays full would fill every log and queue.
            if on_change is not None and (output.trouble is not None) != (output.name in self._troubled):
                self._troubled ^= {output.name}
                on_change(output.name, output.trouble)
        if flushing:
            self._flushed.set()
        return idle_s
