"""What a collector says that it has, and what follows from hearing the same twice."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from agent.common.errors import AgentError
from agent.contract.messages import Dropped
from agent.contract.topics import Topics
from agent.contract.wire import MAX_PAYLOAD_BYTES
from agent.mqtt.config import OutboxConfig
from agent.mqtt.message import Message
from agent.system.clock import unix_s
from agent.uplink.outbox_store import OutboxStore, PendingWrites
from agent.uplink.outbox_tables import ALARM, EVENT, SAMPLE, START, DroppedRange, Key, OutboxRow

_LACKING_S = 10.0  # over which a collector says the same, though it was sent again what there is
_MOST_EPOCHS = 1000  # of which is remembered what was said


class AckResult(Enum):
    """EVENT: it has more than before. HOLE: it has heard of more, but not of what comes next. LACKING: so it goes on."""

    PROGRESS = "news"
    GAP = "hole"
    STILL_MISSING = "lacking"


class AckTracker:
    """By epoch; a number that comes late, or from a collector that is behind, takes nothing back."""

    def __init__(self) -> None:
        self._most: dict[int, int] = {}
        self._repeated: dict[int, tuple[int, float]] = {}  # the number that is repeated, and since when

    def update(self, epoch: int, upto: int, now_s: float) -> AckResult:
        """now_s: monotonic."""
        if len(self._most) >= _MOST_EPOCHS:
            self._most.clear()
            self._repeated.clear()
        if upto > self._most.get(epoch, -1):
            self._most[epoch] = upto
            self._repeated.pop(epoch, None)
            return AckResult.PROGRESS
        repeated, since_s = self._repeated.get(epoch, (-1, now_s))
        if repeated != upto:
            self._repeated[epoch] = upto, now_s
        elif now_s - since_s >= _LACKING_S:
            return AckResult.STILL_MISSING
        return AckResult.GAP


TELEMETRY = "telemetry"  # the kind of a sample; every other kind is an event's
WINDOW = 200  # of what is due, so many are in memory


@dataclass
class _Parcel:
    """What the broker is being sent, in so many messages that it has not acknowledged yet."""

    content: OutboxRow | DroppedRange
    messages: int


class SendWindow:
    """On one connection; one thread at a time. furthest: the greatest number that was ever taken, on any."""

    def __init__(self, topics: Topics) -> None:
        self.furthest = START
        self.complete = False  # nothing is due but what is here
        self._topics = topics
        self._window: deque[OutboxRow | DroppedRange] = deque()
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

    def reset(self) -> None:
        """Another connection: it has carried nothing yet."""
        self._window.clear()
        self._opened.clear()
        self._parcels.clear()
        self.complete = False

    def add(self, due: Sequence[OutboxRow | DroppedRange], complete: bool) -> bool:
        """What is due next, no more than there is room for; complete: there is no more. Whether any of it is new here:
        a run may be on its way while another of them grows."""
        here = [*self._window, *(parcel.content for parcel in self._parcels.values())]
        runs = {each.identity for each in here if isinstance(each, DroppedRange)}
        news = [each for each in due if isinstance(each, OutboxRow) or each.identity not in runs]
        self._window.extend(news)
        self.complete = complete
        return bool(news)

    @property
    def is_at_start(self) -> bool:
        """Whether the next message would be the first of something."""
        return not self._opened

    def pop(self) -> Message | None:
        """The next message."""
        if not self._opened and self._window:
            self._open(self._window.popleft())
        return self._opened.popleft() if self._opened else None

    def delivered(self, message: Message) -> OutboxRow | DroppedRange | None:
        """The broker has it: what has arrived there by that, None while some of it has not."""
        parcel = self._parcels.pop(id(message), None)
        if parcel is None:
            return None
        parcel.messages -= 1
        return parcel.content if not parcel.messages else None

    def refused(self, message: Message) -> OutboxRow | DroppedRange | None:
        """The broker does not take it: what that is part of, None if it is of another connection."""
        parcel = self._parcels.pop(id(message), None)
        return parcel.content if parcel is not None else None

    def delivered_upto(self, epoch: int, upto: int) -> int:
        """Up to which number, of those up to `upto`, none is still on its way to the broker."""
        rows = [parcel.content for parcel in self._parcels.values() if isinstance(parcel.content, OutboxRow)]
        return min([upto, *(row.seq - 1 for row in rows if row.epoch == epoch)])

    def _open(self, content: OutboxRow | DroppedRange) -> None:
        """Turn it into the messages that tell it."""
        if isinstance(content, DroppedRange):
            told = [Message(self._topics.event, _told(content, kind, n)) for kind, n in content.counts.items()]
        else:
            topic = self._topics.telemetry if content.kind == TELEMETRY else self._topics.event
            told = [Message(topic, content.payload)]
        self.furthest = max(self.furthest, content.last_key)
        parcel = _Parcel(content, len(told))
        self._parcels.update({id(message): parcel for message in told})
        self._opened.extend(told)


def _told(run: DroppedRange, kind: str, n: int) -> bytes:
    fields = {"epoch": run.epoch, "from": run.first, "to": run.last, "kind": kind, "n": n}
    return Dropped.model_validate(fields).to_json()


class RateLimiter:
    """So many per second, and as many at once after a second without."""

    def __init__(self, per_s: float) -> None:
        self._per_s = per_s
        self._left = per_s
        self._counted_s = time.monotonic()

    @property
    def allows_one(self) -> bool:
        """Whether one more is allowed now."""
        now = time.monotonic()
        self._left = min(self._per_s, self._left + (now - self._counted_s) * self._per_s)
        self._counted_s = now
        return self._left >= 1.0

    def spend(self) -> None:
        """That one."""
        self._left -= 1.0


_MOST_PENDING = 5000  # not yet on the disk: where it does not answer for minutes, what comes then is dropped
_NEWS_WAIT_S = 1.0  # for what else is to be written
_SILENCE_S = 10.0  # in which a collector does not confirm the oldest row, until all is sent again; doubles
_HOLE_S = 2.0  # between that and the next time, where the collector lets know that it misses something
_LONGEST_SILENCE_S = 3600.0


class Outbox:
    """A Source, thread-safe; a thread of its own writes. A context manager, after which nothing is lost but what is
    put then. Who has no thread for it enters no context, but calls `turn` when it is due, and `close`.

    `errors` has what there is to tell of the disk, and `error` what ended the thread, which is a bug. While the disk
    refuses, memory stands in for it: with the process that is lost, and may leave a gap at the end of an epoch.
    """

    def __init__(self, path: Path, topics: Topics, config: OutboxConfig, clock: Callable[[], float] = unix_s) -> None:
        """clock: Unix time as the board has it. Raises AgentError (`outbox.schema`) for a file of a newer tared."""
        self.errors: queue.SimpleQueue[AgentError] = queue.SimpleQueue()
        self.error: BaseException | None = None
        self.on_due: Callable[[], None] = lambda: None  # called by the writing thread once there is more to take
        self._config = config
        self._clock = clock
        self._store = OutboxStore(path, config, self.errors.put, clock)
        self.epoch = self._store.epoch
        self._seq = 0
        self._changed = threading.Condition()  # guards all that follows
        self._work = PendingWrites()
        self._write_at = math.inf  # monotonic
        self._committed_s = time.monotonic()
        self._again = False  # what is unconfirmed is due once more, from the oldest on
        self._closing = False
        self._sending = SendWindow(topics)
        self._allowance = RateLimiter(config.backlog_per_s)
        self._acknowledgements = AckTracker()
        self._confirmed: dict[int, int] = {}  # by epoch: up to these numbers, some of which the broker may not have yet
        self._hole_s = _HOLE_S
        self._resent_s = time.monotonic()
        # A collector's word waits for up to `commit_s` until it is written; until then it would be taken for silent.
        self._shortest_s = max(_SILENCE_S, 2.0 * config.commit_s)
        self._silence_s = self._shortest_s
        self._again_at = math.inf  # monotonic
        self._thread = threading.Thread(target=self._run, name="outbox", daemon=True)

    def __enter__(self) -> Outbox:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()
        self._store.close()

    def close(self) -> None:
        """Without a context: what `turn` has not written yet is lost, as with a power cut."""
        self._store.close()

    def __len__(self) -> int:
        with self._changed:
            return len(self._work.rows) + len(self._sending)

    @property
    def last(self) -> Key:
        """The epoch, and the greatest number in it so far."""
        with self._changed:
            return self.epoch, self._seq

    @property
    def dropped(self) -> Counter[str]:
        """How many will never be sent, by kind, since the start."""
        return Counter(self._store.dropped)

    def put(self, kind: str, rank: int, document: Callable[[int, int], bytes]) -> None:
        """A document, made of its epoch and number. kind: `telemetry`, or the event's. rank: as in `outbox_rows`."""
        with self._changed:
            self._seq += 1
            payload = None
            if len(self._work.rows) < _MOST_PENDING:
                payload = document(self.epoch, self._seq)
            if payload is not None and len(payload) <= MAX_PAYLOAD_BYTES:
                self._work.rows.append(OutboxRow(self.epoch, self._seq, kind, rank, self._clock(), payload))
            else:
                self._work.lost.append(((self.epoch, self._seq), kind))
            since_s = time.monotonic() - self._committed_s
            self._write_within({SAMPLE: self._config.commit_s - since_s, EVENT: _NEWS_WAIT_S, ALARM: 0.0}[rank])

    def hurry(self) -> None:
        """Write at once what there is."""
        with self._changed:
            self._write_within(0.0)

    def acknowledge(self, epoch: int, upto: int) -> None:
        """A collector has everything of the epoch up to this number; of what was never sent nobody can have it."""
        with self._changed:
            epoch_sent, sent = self._sending.furthest
            if epoch > epoch_sent:
                return
            if epoch == epoch_sent:
                upto = min(upto, sent)
            heard = self._acknowledgements.update(epoch, upto, time.monotonic())
            self._confirmed[epoch] = max(upto, self._confirmed.get(epoch, 0))
            self._settle()  # also what it has said before: the disk may have refused it
            if heard is AckResult.PROGRESS:  # there is a collector again; what else it has, it will say soon
                self._silence_s = self._shortest_s
                self._again_at = min(self._again_at, time.monotonic() + self._shortest_s)
                self._changed.notify()
                return
            self._again_at = min(self._again_at, self._resent_s + self._hole_s)
            if heard is AckResult.STILL_MISSING:
                self._work.missing[epoch] = upto
                self._write_within(self._config.commit_s)
            self._changed.notify()

    def connection_started(self) -> None:
        """A connection begins: what the one before has not carried, and what no collector confirmed, is due."""
        with self._changed:
            self._send_again()

    def pop(self) -> Message | None:
        with self._changed:
            if self._sending.is_at_start and not self._allowance.allows_one:
                return None
            begins, message = self._sending.is_at_start, self._sending.pop()
            if message is not None and begins:
                self._allowance.spend()
            if self._sending.is_low:
                self._changed.notify()
            return message

    def delivered(self, message: Message) -> None:
        with self._changed:
            arrived = self._sending.delivered(message)
            if arrived is not None:
                self._work.delivered.append(arrived)
                self._write_within(self._config.commit_s)
                self._settle()

    def refused(self, message: Message, for_good: bool) -> None:
        """For good: it will never arrive, and is counted among what was dropped. Else it is due again in a while."""
        with self._changed:
            refused = self._sending.refused(message)
            if for_good and isinstance(refused, OutboxRow):
                self._work.refused.append(refused)
                self._write_within(self._config.commit_s)
            elif refused is not None:
                self._again_at = min(self._again_at, time.monotonic() + self._silence_s)
                self._changed.notify()

    def put_back(self, messages: Sequence[Message]) -> None:
        """With the next connection all that was not acknowledged is due anyway."""

    def _settle(self) -> None:
        """Forget what a collector has confirmed, as far as the broker has, too: who acknowledges what is still on its
        way to the broker has not seen it."""
        for epoch, upto in list(self._confirmed.items()):
            settled = self._sending.delivered_upto(epoch, upto)
            if settled == upto:
                del self._confirmed[epoch]
            self._work.acks[epoch] = max(settled, self._work.acks.get(epoch, 0))
            self._write_within(self._config.commit_s)

    def _write_within(self, seconds: float) -> None:
        """The disk is written to by then."""
        at = time.monotonic() + seconds
        if at < self._write_at:
            self._write_at = at
            self._changed.notify()

    def _send_again(self) -> None:
        self._again = True
        self._resent_s = time.monotonic()
        self._again_at = self._resent_s + self._silence_s if self._store.needs_collector else math.inf
        self._sending.reset()
        self._write_within(0.0)

    def _run(self) -> None:
        try:
            self._work_on()
        except BaseException as error:
            self.error = error

    def _work_on(self) -> None:
        while not self._closing:
            with self._changed:
                while not self.is_due and self._changed.wait(self.patience_s):
                    pass  # what was notified may have changed how long to wait
            self.turn()
        self.turn()  # what came before the closing

    def turn(self) -> None:
        """Write what is to be written by now, and hand over the next of what is due."""
        with self._changed:
            if time.monotonic() >= self._again_at:
                self._silence_s = min(2.0 * self._silence_s, _LONGEST_SILENCE_S)
                self._hole_s = min(2.0 * self._hole_s, _LONGEST_SILENCE_S)
                self._send_again()
            again, work = self._again, self._work
            writes = self._closing or again or time.monotonic() >= self._write_at
            if writes:
                self._sending.complete = self._sending.complete and not work.rows  # until these are there
                self._work, self._again, self._write_at = PendingWrites(), False, math.inf
                self._committed_s = time.monotonic()
            last = self.epoch, self._seq
            room = self._sending.room
        if writes and (work or again):
            self._commit(work, last, again)
        self._fill(room)

    def _fill(self, room: int) -> None:
        """Hand over the next of what is due."""
        due = self._store.due(room)
        with self._changed:
            news = not self._again and self._sending.add(due, complete=len(due) < room)
        if news:
            self.on_due()

    @property
    def is_due(self) -> bool:
        """Whether there is something to do for `turn`."""
        return self._closing or self._sending.is_low or time.monotonic() >= self._write_at

    @property
    def patience_s(self) -> float:
        """Until there may be something to do that nobody tells."""
        return min(60.0, max(0.0, min(self._write_at, self._again_at) - time.monotonic()))

    def _commit(self, work: PendingWrites, last: Key, again: bool) -> None:
        oldest = self._store.oldest
        self._store.commit(work, last, again)
        with self._changed:
            if self._store.oldest is None:
                self._again_at = math.inf
            elif self._store.oldest != oldest and self._store.needs_collector:
                self._silence_s, self._hole_s = self._shortest_s, _HOLE_S
                self._again_at = time.monotonic() + self._shortest_s
            if self._store.returned:
                self._store.returned = False
                if self.epoch != self._store.epoch:
                    self.epoch, self._seq = self._store.epoch, 0
                self._send_again()
