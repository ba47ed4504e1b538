"""A frame's answer as one JSON object: a line of `tared infer -o`, and of what the daemon gives away."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from types import TracebackType
from typing import Any, NamedTuple, Protocol

from agent.common.errors import AgentError
from agent.common.latency import LatencyMeter
from agent.config import Config
from agent.vision.decode import Prediction, described
from agent.vision.preprocess import Geometry
from agent.vision.spec import ModelSpec
from agent.vision.task import ServedFrame


class ResultRecord(NamedTuple):
    """What the frame path hands over of a frame: not its image, which takes MB, and nothing is computed for it."""

    camera: str
    frame: int
    ts: float
    engine_id: str
    captured_ns: int
    done_ns: int
    result: Prediction
    geometry: Geometry | None

    @classmethod
    def of(cls, served: ServedFrame) -> ResultRecord:
        frame = served.frame
        times_ns = frame.captured_ns, served.done_ns
        return cls(frame.camera, frame.id, frame.ts, served.engine_id, *times_ns, served.result, served.geometry)


class ResultLine:
    """An answer of the daemon, put into words by whoever asks first."""

    def __init__(self, answered: ResultRecord, spec: ModelSpec) -> None:
        self._answered = answered
        self._spec = spec

    @property
    def camera(self) -> str:
        return self._answered.camera

    @cached_property
    def document(self) -> dict[str, Any]:
        """As `tared infer` has it, with who answered, and the milliseconds from the frame's arrival to its answer."""
        answered = self._answered
        return {
            "frame": answered.frame,
            "ts": answered.ts,
            "camera": answered.camera,
            "engine": answered.engine_id,
            "latency_ms": round((answered.done_ns - answered.captured_ns) / 1e6, 3),
            **described(answered.result, answered.geometry, self._spec),
        }

    @cached_property
    def encoded(self) -> bytes:
        """With the newline."""
        return json.dumps(self.document).encode() + b"\n"


_WAITING = 256  # answers
_WAITING_RAW = 8  # of raw outputs each may take MB
_END_S = 5.0  # for what waits at the end; a disk may hang


class Output(Protocol):
    """Where lines go. The writer's thread calls it, and none of it may wait for a reader.

    dropped: lines that it should have given away and has not; None: it gives away samples.
    trouble: why it cannot, while it cannot.
    """

    @property
    def name(self) -> str: ...

    @property
    def dropped(self) -> int | None: ...

    @property
    def trouble(self) -> AgentError | None: ...

    def add(self, line: ResultLine) -> None:
        """The next line."""

    def tick(self) -> float:
        """Do what is due; in how many seconds it is to be called again."""

    def flush(self) -> None:
        """Let nothing wait that need not."""

    def close(self) -> None:
        """The end."""


class ResultsWriter(threading.Thread):
    """A context manager, inside which what is offered goes to every output.

    The frame path calls `offer`, which neither waits nor computes. What the thread cannot keep up with is dropped, the
    oldest first. `failed` is an exception that has ended it, `settle` raises it.
    """

    def __init__(self, config: Config, outputs: Sequence[Output]) -> None:
        super().__init__(name="results", daemon=True)
        self._spec = config.model
        self._outputs = outputs
        self._room = _WAITING_RAW if config.model.task == "raw" else _WAITING
        self._waiting: deque[ResultRecord] = deque()  # filled by the frame path alone
        self._overrun = 0
        self._called = threading.Event()
        self._settled = threading.Event()
        self._settling = self._ending = False
        self._on_change: Callable[[str, AgentError | None], None] = lambda _name, _error: None
        self._troubled: set[str] = set()
        # By camera, from a frame's arrival until every output was handed its line.
        self.latency = {camera.name: LatencyMeter() for camera in config.every_camera}
        self.failed: BaseException | None = None

    def __enter__(self) -> ResultsWriter:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending = True
        self._called.set()
        self.join(_END_S)

    def follow(self, on_change: Callable[[str, AgentError | None], None]) -> None:
        """From now on this hears, in the writer's thread, by name of an output that fails, and that works again."""
        self._on_change = on_change

    def offer(self, served: ServedFrame) -> None:
        """Give this answer away; a sink of the frame path."""
        if len(self._waiting) >= self._room:
            with suppress(IndexError):  # it has just been taken
                self._waiting.popleft()
                self._overrun += 1
        self._waiting.append(ResultRecord.of(served))
        self._called.set()

    @property
    def dropped(self) -> Mapping[str, int]:
        """Lines that each output should have given away, and has not, so far."""
        lost = {output.name: output.dropped for output in self._outputs}
        return {name: self._overrun + count for name, count in lost.items() if count is not None}

    def settle(self) -> None:
        """Wait until all that was offered has gone as far as it goes, for a few seconds at most. Raises `failed`."""
        self._settled.clear()
        self._settling = True
        self._called.set()
        if self.is_alive():
            self._settled.wait(_END_S)
        if self.failed is not None:
            raise self.failed

    def run(self) -> None:
        try:
            while not self._ending:
                self._called.wait(self._turn())
                self._called.clear()
            self._turn()
            for output in self._outputs:
                output.close()
        except BaseException as error:
            self.failed = error
        finally:
            self._settled.set()

    def _turn(self) -> float:
        """Give away what waits; for how many seconds there is nothing else to do."""
        settling, self._settling = self._settling, False
        taken = 0
        while self._waiting and taken < self._room:  # and not for as long as more come
            taken += 1
            answered = self._waiting.popleft()
            line = ResultLine(answered, self._spec)
            for output in self._outputs:
                output.add(line)
            self.latency[answered.camera].record(time.monotonic_ns() - answered.captured_ns)
        patience_s = min(output.tick() for output in self._outputs)
        for output in self._outputs:
            if settling:
                output.flush()
            self._tell(output)
        if settling:
            self._settled.set()
        return patience_s

    def _tell(self, output: Output) -> None:
        """Of a change only: a disk that stays full would fill every log and queue."""
        if (output.trouble is not None) != (output.name in self._troubled):
            self._troubled ^= {output.name}
            self._on_change(output.name, output.trouble)
