"""Follow the boards of a fleet by MQTT: the newest document of each kind, and what has happened lately."""

from __future__ import annotations

import threading
import uuid
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agent.common.clock import SYSTEM_CLOCK, Clock
from agent.common.errors import AgentError
from agent.common.timing import Backoff, thinned
from agent.contract.topics import Topics
from agent.contract.wire import read_object
from agent.mqtt.client import Endpoint, MqttClient, SessionOptions
from agent.mqtt.receive_queue import Arrival, ReceiveQueue
from fleet.devices.facts import as_number, cameras_of, value_at

KINDS = ("status", "birth", "telemetry", "event", "reported")
_QUEUE_BYTES, _BATCH_BYTES = 16 << 20, 1 << 20
_WAIT_S = 0.5
_MOST_EVENTS, _MOST_POINTS = 60, 200
_MOST_BOARDS = 20_000  # a stranger may publish under any name


@dataclass
class LiveBoard:
    """A board, as far as it has reported since this process began.

    Attributes:
        documents: The newest of each kind.
        heard_at: Unix time of the newest live message in s; None if only retained ones have come.
        measured_at: Unix time of the newest telemetry in s; None before the first.
        events: The newest events, the newest first; each with the time when it came.
        job: The newest event of a job that has not ended.
        points: For each camera (time, fidelity or None, predicted gain in dB or None), the oldest first.
        version: Rises with each document.
    """

    documents: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    heard_at: float | None = None
    measured_at: float | None = None
    events: deque[tuple[float, Mapping[str, Any]]] = field(default_factory=lambda: deque(maxlen=_MOST_EVENTS))
    job: Mapping[str, Any] | None = None
    points: dict[str, list[tuple[float, float | None, float | None]]] = field(default_factory=dict)
    version: int = 0


_JOB_ENDS = frozenset(["COMMITTED", "ROLLED_BACK", "FAILED", "CANCELLED"])
_ENDING_EVENTS = frozenset(["commit", "rollback"])


class LiveBoards:
    """A context manager; inside it, a thread follows the boards.

    Attributes:
        fleet: Its name.
        version: Rises with each document of any board.
    """

    def __init__(self, endpoint: Endpoint, fleet: str, clock: Clock = SYSTEM_CLOCK) -> None:
        self.fleet, self._clock = fleet, clock
        self.version = 0
        self._queue = ReceiveQueue(_QUEUE_BYTES)
        topics = [f"tared/v1/{fleet}/+/{kind}" for kind in KINDS]
        session = SessionOptions(subscriptions=topics, backoff=Backoff(0.2, 5.0), receive_queue=self._queue)
        self._client = MqttClient(endpoint, f"tared-web-{uuid.uuid4().hex[:12]}", session)
        self._boards: dict[str, LiveBoard] = {}
        self._lock = threading.Lock()
        self._ending = False
        self._thread = threading.Thread(target=self._follow, name="boards", daemon=True)

    def __enter__(self) -> LiveBoards:
        self._client.__enter__()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending = True
        self._thread.join()
        self._client.__exit__(None, None, None)

    @property
    def trouble(self) -> str:
        """The reason why there is no connection to the broker; empty while there is one."""
        return "" if self._client.connected else str(self._client.outcome)

    def names(self) -> list[str]:
        """Return the names of all boards, sorted."""
        with self._lock:
            return sorted(self._boards)

    def get(self, name: str) -> LiveBoard | None:
        """Return a board; its documents are replaced, never changed."""
        with self._lock:
            return self._boards.get(name)

    def _follow(self) -> None:
        while not self._ending:
            arrivals = self._queue.pop(_BATCH_BYTES, _WAIT_S, 0.0)
            if not arrivals:
                continue
            with self._lock:
                for arrival in arrivals:
                    self._receive(arrival)
                self.version += 1

    def _receive(self, arrival: Arrival) -> None:
        """Note a document; messages that cannot be read are ignored."""
        try:
            name, kind = arrival.topic.decode().split("/")[3:5]
            Topics(self.fleet, name)
            document = read_object(arrival.payload)
        except (AgentError, ValueError):
            return
        if name not in self._boards and len(self._boards) >= _MOST_BOARDS:
            return
        board, now = self._boards.setdefault(name, LiveBoard()), self._clock.wall_s()
        board.documents[kind] = document
        board.version += 1
        if not arrival.retained:
            board.heard_at = now
        if kind == "telemetry":
            board.measured_at = now
            _note_points(board, document, now)
        elif kind == "event":
            board.events.appendleft((now, document))
            _note_job(board, document)


def _note_points(board: LiveBoard, telemetry: Mapping[str, Any], now: float) -> None:
    for name, camera in cameras_of(telemetry).items():
        estimate, gain_db = value_at(camera, "fidelity", "estimate"), value_at(camera, "drift", "gain_db")
        points = [*board.points.get(name, ()), (now, as_number(estimate), as_number(gain_db))]
        board.points[name] = thinned(points, _MOST_POINTS)


def _note_job(board: LiveBoard, event: Mapping[str, Any]) -> None:
    kind = event.get("kind")
    if kind == "job":
        board.job = None if event.get("step") in _JOB_ENDS or event.get("state") in _JOB_ENDS else event
    elif kind in _ENDING_EVENTS or (kind == "error" and board.job is not None and event.get("step") is not None):
        board.job = None
