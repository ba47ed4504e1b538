"""What of the outbox is on its way: the next of what is due, and what the broker has not acknowledged."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from agent.messages import Dropped
from agent.outbox_rows import Row
from agent.outbox_runs import START, Run
from agent.publishing import Message
from agent.topics import Topics

TELEMETRY = "telemetry"  # the kind of a sample; every other kind is an event's
WINDOW = 200  # of what is due, so many are in memory


@dataclass
class _Parcel:
    """What the broker is being sent, in so many messages that it has not acknowledged yet."""

    content: Row | Run
    messages: int


class Sending:
    """On one connection; one thread at a time. furthest: the greatest number that was ever taken, on any."""

    def __init__(self, topics: Topics) -> None:
        self.furthest = START
        self.complete = False  # nothing is due but what is here
        self._topics = topics
        self._window: deque[Row | Run] = deque()
        self._opened: deque[Message] = deque()  # of one parcel, what is still to be taken
        self._parcels: dict[int, _Parcel] = {}  # by the id of their messages

    def __len__(self) -> int:
        """How many wait, at least."""
        return len(self._window) + len(self._opened) + (0 if self.complete else 1)

    @property
    def room(self) -> int:
        """For so many more."""
        return WINDOW - len(self._window)

    @property
    def is_low(self) -> bool:
        """Whether it is time to look for more."""
        return not self.complete and len(self._window) < WINDOW // 2

    def begin(self) -> None:
        """Another connection: it has carried nothing yet."""
        self._window.clear()
        self._opened.clear()
        self._parcels.clear()
        self.complete = False

    def add(self, due: Sequence[Row | Run], complete: bool) -> bool:
        """What is due next, no more than there is room for; complete: there is no more. Whether any of it is new here:
        a run may be on its way while another of them grows."""
        here = [*self._window, *(parcel.content for parcel in self._parcels.values())]
        runs = {each.ends for each in here if isinstance(each, Run)}
        news = [each for each in due if isinstance(each, Row) or each.ends not in runs]
        self._window.extend(news)
        self.complete = complete
        return bool(news)

    @property
    def begins(self) -> bool:
        """Whether the next message would be the first of something."""
        return not self._opened

    def take(self) -> Message | None:
        """The next message."""
        if not self._opened and self._window:
            self._open(self._window.popleft())
        return self._opened.popleft() if self._opened else None

    def delivered(self, message: Message) -> Row | Run | None:
        """The broker has it: what has arrived there by that, None while some of it has not."""
        parcel = self._parcels.pop(id(message), None)
        if parcel is None:
            return None
        parcel.messages -= 1
        return parcel.content if not parcel.messages else None

    def refused(self, message: Message) -> Row | Run | None:
        """The broker does not take it: what that is part of, None if it is of another connection."""
        parcel = self._parcels.pop(id(message), None)
        return parcel.content if parcel is not None else None

    def arrived(self, epoch: int, upto: int) -> int:
        """Up to which number, of those up to `upto`, none is still on its way to the broker."""
        rows = [parcel.content for parcel in self._parcels.values() if isinstance(parcel.content, Row)]
        return min([upto, *(row.seq - 1 for row in rows if row.epoch == epoch)])

    def _open(self, content: Row | Run) -> None:
        """Turn it into the messages that tell it."""
        if isinstance(content, Run):
            told = [Message(self._topics.event, _told(content, kind, n)) for kind, n in content.counts.items()]
        else:
            topic = self._topics.telemetry if content.kind == TELEMETRY else self._topics.event
            told = [Message(topic, content.payload)]
        self.furthest = max(self.furthest, content.upto)
        parcel = _Parcel(content, len(told))
        self._parcels.update({id(message): parcel for message in told})
        self._opened.extend(told)


def _told(run: Run, kind: str, n: int) -> bytes:
    fields = {"epoch": run.epoch, "from": run.first, "to": run.last, "kind": kind, "n": n}
    return Dropped.model_validate(fields).to_json()
