"""Send the chunks of a histogram upload, one at a time, after everything else that the board has to publish."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from agent.contract.histograms import Upload
from agent.contract.topics import Topics
from agent.mqtt.message import Message

OnChunk = Callable[[int, str], None]  # how many chunks are still to come; which limit of the broker refused one, or ""


class UploadSource:
    """A MessageSource of chunks.

    Telemetry waits for one chunk at most, however slow the network is: the next chunk is due once the broker has the
    previous one. A chunk that a lost connection carried is sent again. The client does not wait for the rest when it
    closes: the length is 0 at all times.
    """

    def __init__(self, topics: Topics) -> None:
        self._topics = topics
        self._lock = threading.Lock()
        self._upload: Upload | None = None
        self._left: deque[int] = deque()
        self._sent: int | None = None  # the chunk on its way
        self._message: Message | None = None  # the message that carries it
        self._on_chunk: OnChunk = lambda _left, _refusal: None

    def __len__(self) -> int:
        return 0

    def start(self, upload: Upload, numbers: Iterable[int], on_chunk: OnChunk) -> None:
        """Send these chunks, instead of what is left of an earlier upload.

        on_chunk: called in the MQTT thread, after each chunk.
        """
        with self._lock:
            self._upload, self._left, self._on_chunk = upload, deque(numbers), on_chunk
            self._sent = self._message = None

    def end(self) -> None:
        """Send no more chunks."""
        with self._lock:
            self._upload = None
            self._left.clear()

    def connection_started(self) -> None:
        """Do nothing: `put_back` has returned what the previous connection lost."""

    def pop(self) -> Message | None:
        with self._lock:
            if self._upload is None or self._sent is not None or not self._left:
                return None
            self._sent = self._left.popleft()
            topic = self._topics.histogram_chunk(self._upload.name, self._sent)
            self._message = Message(topic, self._upload.chunk(self._sent))
            return self._message

    def delivered(self, message: Message) -> None:
        self._report(message, "")

    def refused(self, message: Message, for_good: bool) -> None:
        """End the upload: the broker would refuse the next chunk as well."""
        self.end()
        self._report(message, "its longest message" if for_good else "its access rules")

    def put_back(self, messages: Sequence[Message]) -> None:
        with self._lock:
            if self._message in messages and self._sent is not None and self._upload is not None:
                self._left.appendleft(self._sent)
            self._sent = self._message = None

    def _report(self, message: Message, refusal: str) -> None:
        with self._lock:
            if message is not self._message:  # of an upload that has ended
                return
            self._sent = self._message = None
            left, on_chunk = len(self._left), self._on_chunk
        on_chunk(left, refusal)
