"""Chunks of an upload on their way to the broker: one at a time, after all else that the board has to say."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from agent.contract.histograms import Upload
from agent.contract.topics import Topics
from agent.mqtt.message import Message

OnChunk = Callable[[int, str], None]  # so many chunks are still to come; what of the broker refuses them, or empty


class UploadSource:
    """A Source. Telemetry waits for one chunk at most, however slow the network is: the next one is given away once the
    broker has the one before. What a lost connection carried is given away again.

    Nobody waits for what is left when the client closes: its length is 0 at all times.
    """

    def __init__(self, topics: Topics) -> None:
        self._topics = topics
        self._lock = threading.Lock()
        self._upload: Upload | None = None
        self._left: deque[int] = deque()
        self._sent: int | None = None  # on its way
        self._message: Message | None = None  # the one that carries it
        self._told: OnChunk = lambda _left, _refusal: None

    def __len__(self) -> int:
        return 0

    def start(self, upload: Upload, numbers: Iterable[int], told: OnChunk) -> None:
        """Give these chunks away, in the place of what is left. told: called in the MQTT thread, after each."""
        with self._lock:
            self._upload, self._left, self._told = upload, deque(numbers), told
            self._sent = self._message = None

    def end(self) -> None:
        """Nothing more of it."""
        with self._lock:
            self._upload = None
            self._left.clear()

    def connection_started(self) -> None:
        """A connection begins."""

    def pop(self) -> Message | None:
        with self._lock:
            if self._upload is None or self._sent is not None or not self._left:
                return None
            self._sent = self._left.popleft()
            topic = self._topics.histogram_chunk(self._upload.name, self._sent)
            self._message = Message(topic, self._upload.chunk(self._sent))
            return self._message

    def delivered(self, message: Message) -> None:
        self._tell(message, "")

    def refused(self, message: Message, for_good: bool) -> None:
        """The next one would be as well."""
        self.end()
        self._tell(message, "its longest message" if for_good else "its access rules")

    def put_back(self, messages: Sequence[Message]) -> None:
        with self._lock:
            if self._message in messages and self._sent is not None and self._upload is not None:
                self._left.appendleft(self._sent)
            self._sent = self._message = None

    def _tell(self, message: Message, refusal: str) -> None:
        with self._lock:
            if message is not self._message:  # of an upload that has ended
                return
            self._sent = self._message = None
            left, told = len(self._left), self._told
        told(left, refusal)
