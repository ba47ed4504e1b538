"""Number telemetry and events, keep them until they have arrived, and send them in order: store and forward.

The way of a row:

1. `Outbox.put` numbers it. The outbox's thread writes it to the disk (`turn`, agent/uplink/outbox_store.py).
2. `turn` loads what is due into the `SendWindow`; the MQTT thread pops it from there, limited by a `RateLimiter`.
3. The broker acknowledges it (PUBACK): `delivered`. Without a collector that deletes the row.
4. With a collector, the row is only marked as sent. The collector's ack (contract: Ack, topic `ack`) deletes it:
   `acknowledge`, where the `AckTracker` also notices a collector that misses something.
5. If no ack comes in time, or a new connection begins, everything unconfirmed is due again, from the oldest on.

A row that is dropped, refused or lost leaves a DroppedRange, which is sent in its place: numbers have no gaps.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from agent.common.clock import SYSTEM_CLOCK, Clock
from agent.common.errors import AgentError, FaultLog
from agent.common.timing import Backoff, RetryState
from agent.contract.messages import Dropped
from agent.contract.topics import Topics
from agent.contract.wire import MAX_PAYLOAD_BYTES
from agent.mqtt.config import OutboxConfig
from agent.mqtt.message import Message, MessageSource
from agent.uplink.outbox_store import (
    ALARM,
    EVENT,
    SAMPLE,
    START,
    DroppedRange,
    Key,
    OutboxRow,
    OutboxStore,
    Parcel,
    PendingWrites,
)
from calibrate.errors import TaredError

log = logging.getLogger(__package__)

TELEMETRY = "telemetry"  # the kind of a sample; every other kind is an event's
WINDOW = 200  # parcels that are due and in memory
_MOST_PENDING = 5000  # rows that are not on the disk yet; if it does not answer for minutes, later ones are dropped
_EVENT_WAIT_S = 1.0  # an event waits this long for others, to be written with them
# All is sent again if a collector does not confirm the oldest row for this long; doubles each time.
_SILENCE_S = 10.0
_GAP_S = 2.0  # the same if the collector reports that it misses something
_LONGEST_SILENCE_S = 3600.0
# A collector that has repeated the same number for this long, though it was sent all there is, misses what is gone.
_STILL_MISSING_S = 10.0
_MOST_EPOCHS = 1000  # whose acks are remembered


class Outbox(MessageSource):
    """A thread-safe MessageSource of numbered rows; a context manager, in which a thread writes them to the disk.

    After the context, all rows that were put in it are on the disk. A caller that has no thread to spend enters no
    context, but calls `turn` when it is due (`is_due`, `patience_s`), and `close`.

    While the disk refuses, memory replaces it. What memory holds is lost with the process, which may leave a gap at the
    end of an epoch.

    Attributes:
        errors: Errors of the disk, to be reported.
        error: The error that has ended the thread: a file of a newer tared.
        epoch: Of the rows that are put now.
        on_due: Called by the writing thread once there is more to pop.
    """

    def __init__(self, path: Path, topics: Topics, config: OutboxConfig, clock: Clock = SYSTEM_CLOCK) -> None:
        """clock: The board's. Raises AgentError (`state.schema`) for a file of a newer tared."""
        self.errors: queue.SimpleQueue[TaredError] = queue.SimpleQueue()
        self.error: AgentError | None = None
        self.on_due: Callable[[], None] = lambda: None
        self._config = config
        self._clock = clock
        self._store = OutboxStore(path, config, self.errors.put, clock)
        self.epoch = self._store.epoch
        self._seq = 0
        self._changed = threading.Condition()  # guards all that follows
        self._pending = PendingWrites()
        self._write_at = math.inf  # monotonic
        self._committed_s = self._clock.monotonic_s()
        self._resend = False  # everything unconfirmed is due again, from the oldest on
        self._resend_at = math.inf  # monotonic
        self._resent_s = self._clock.monotonic_s()
        self._closing = False
        self._window = SendWindow(topics)
        self._rate = RateLimiter(config.backlog_per_s, clock)
        self._ack_tracker = AckTracker()
        self._confirmed: dict[int, int] = {}  # by epoch, what a collector has; the broker may not have all of it yet
        self._gap_s = _GAP_S
        # A collector's ack waits for up to `commit_s` until it is written; until then the collector would seem silent.
        self._shortest_s = max(_SILENCE_S, 2.0 * config.commit_s)
        self._silence_s = self._shortest_s
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
        """Close the file without a context: what `turn` has not written is lost, as with a power cut."""
        self._store.close()

    def __len__(self) -> int:
        with self._changed:
            return len(self._pending.rows) + len(self._window)

    @property
    def last(self) -> Key:
        """The epoch, and the greatest number in it so far."""
        with self._changed:
            return self.epoch, self._seq

    @property
    def dropped(self) -> Counter[str]:
        """The number of rows that will never be sent, by kind, since the start."""
        return Counter(self._store.dropped)

    @property
    def oldest_s(self) -> float:
        """Age of the oldest row on the disk that has not arrived, in s, as of the latest write; 0.0 without one."""
        wall = self._store.oldest_wall
        return max(0.0, self._clock.wall_s() - wall) if wall is not None else 0.0

    @property
    def size_bytes(self) -> int:
        """The bytes that the rows take on the disk, as of the latest write."""
        return self._store.size_bytes

    def put(self, kind: str, rank: int, document: Callable[[int, int], bytes]) -> None:
        """Number a row and keep it.

        Args:
            kind: TELEMETRY, or the event's kind.
            rank: SAMPLE, EVENT or ALARM (agent/uplink/outbox_store.py).
            document: Makes the payload from epoch and number.
        """
        with self._changed:
            seq = self._seq + 1
            payload = document(self.epoch, seq) if len(self._pending.rows) < _MOST_PENDING else None
            self._seq = seq  # only now: a number without a row would be a gap
            if payload is not None and len(payload) <= MAX_PAYLOAD_BYTES:
                self._pending.rows.append(OutboxRow(self.epoch, seq, kind, rank, self._clock.wall_s(), payload))
            else:
                self._pending.lost.append(((self.epoch, seq), kind))
            since_s = self._clock.monotonic_s() - self._committed_s
            self._write_within({SAMPLE: self._config.commit_s - since_s, EVENT: _EVENT_WAIT_S, ALARM: 0.0}[rank])

    def hurry(self) -> None:
        """Write at once what there is."""
        with self._changed:
            self._write_within(0.0)

    def acknowledge(self, epoch: int, upto: int) -> None:
        """Apply a collector's ack: it has everything of the epoch up to this number.

        Numbers that were never sent are ignored: nobody can have them.
        """
        with self._changed:
            epoch_sent, sent = self._window.furthest
            if epoch > epoch_sent:
                return
            if epoch == epoch_sent:
                upto = min(upto, sent)
            result = self._ack_tracker.update(epoch, upto, self._clock.monotonic_s())
            self._confirmed[epoch] = max(upto, self._confirmed.get(epoch, 0))
            self._confirm()  # earlier acks, too: the disk may have refused them
            if result is AckResult.PROGRESS:  # there is a collector again; it will soon confirm the rest
                self._silence_s = self._shortest_s
                self._resend_at = min(self._resend_at, self._clock.monotonic_s() + self._shortest_s)
                self._changed.notify()
                return
            self._resend_at = min(self._resend_at, self._resent_s + self._gap_s)
            if result is AckResult.STILL_MISSING:
                self._pending.missing[epoch] = upto
                self._write_within(self._config.commit_s)
            self._changed.notify()

    def connection_started(self) -> None:
        """Make due what the previous connection has not carried, and what no collector has confirmed."""
        with self._changed:
            self._send_again()

    def pop(self) -> Message | None:
        with self._changed:
            is_first = self._window.is_at_start
            if is_first and not self._rate.allows_one:
                return None
            message = self._window.pop()
            if message is not None and is_first:
                self._rate.spend()
            if self._window.is_low:
                self._changed.notify()
            return message

    def delivered(self, message: Message) -> None:
        with self._changed:
            parcel = self._window.delivered(message)
            if parcel is not None:
                self._pending.delivered.append(parcel)
                self._write_within(self._config.commit_s)
                self._confirm()

    def refused(self, message: Message, for_good: bool) -> None:
        """Count a row that is refused for good among the dropped; any other is due again after a while."""
        with self._changed:
            parcel = self._window.refused(message)
            if for_good and isinstance(parcel, OutboxRow):
                self._pending.refused.append(parcel)
                self._write_within(self._config.commit_s)
            elif parcel is not None:
                self._resend_at = min(self._resend_at, self._clock.monotonic_s() + self._silence_s)
                self._changed.notify()

    def _confirm(self) -> None:
        """Queue the deletion of what a collector has confirmed, as far as the broker has acknowledged it, too.

        An ack for a row that is still on its way to the broker cannot be true.
        """
        for epoch, upto in list(self._confirmed.items()):
            confirmed = self._window.delivered_upto(epoch, upto)
            if confirmed == upto:
                del self._confirmed[epoch]
            self._pending.acks[epoch] = max(confirmed, self._pending.acks.get(epoch, 0))
            self._write_within(self._config.commit_s)

    def _write_within(self, seconds: float) -> None:
        """Have the disk written to within so many seconds."""
        at = self._clock.monotonic_s() + seconds
        if at < self._write_at:
            self._write_at = at
            self._changed.notify()

    def _send_again(self) -> None:
        """Make everything unconfirmed due again, from the oldest on."""
        self._resend = True
        self._resent_s = self._clock.monotonic_s()
        self._resend_at = self._resent_s + self._silence_s if self._store.needs_collector else math.inf
        self._window.reset()
        self._write_within(0.0)

    def _run(self) -> None:
        failing = RetryState(lambda error: self.errors.put(error) if error is not None else None, Backoff(), 1)
        is_last = False
        faults = FaultLog(log)
        while not is_last:
            with self._changed:
                while not self.is_due and self._wait(self._due_at):
                    pass
                is_last = self._closing  # after a turn for what came before the closing
            try:
                self.turn()
                failing.note_success()
            except AgentError as error:
                self.error = error
                return
            except Exception as error:  # nothing is lost, and the video goes on
                faults.note("outbox", error)
                found = f"{type(error).__name__}: {error}"
                remedy = "see its traceback in the log; memory keeps the rows until the writing works again"
                failure = AgentError("outbox.failed", found, "a commit of the outbox without an error", remedy)
                pause_s = failing.note_failure(failure)
                with self._changed:
                    self._clock.wait_for(self._changed, lambda: self._closing, pause_s)

    @property
    def is_due(self) -> bool:
        """True if `turn` has something to do."""
        return self._closing or self._window.is_low or self._clock.monotonic_s() >= self._write_at

    @property
    def patience_s(self) -> float:
        """Seconds until `turn` may be due without a notification."""
        return min(60.0, max(0.0, self._due_at - self._clock.monotonic_s()))

    @property
    def _due_at(self) -> float:
        """The monotonic time at which `turn` is due without a notification."""
        return min(self._write_at, self._resend_at)

    def _wait(self, planned: float) -> bool:
        """Wait until `turn` is due, or due sooner than planned; return False once the planned time has come."""
        return self._clock.wait_for(self._changed, lambda: self.is_due or self._due_at < planned, self.patience_s)

    def turn(self) -> None:
        """Write what has to be written by now, and load the next parcels into the window."""
        with self._changed:
            if self._clock.monotonic_s() >= self._resend_at:
                self._silence_s = min(2.0 * self._silence_s, _LONGEST_SILENCE_S)
                self._gap_s = min(2.0 * self._gap_s, _LONGEST_SILENCE_S)
                self._send_again()
            resend, pending = self._resend, self._pending
            writes = self._closing or resend or self._clock.monotonic_s() >= self._write_at
            if writes:
                self._window.complete = self._window.complete and not pending.rows  # until these are loaded
                self._pending, self._resend, self._write_at = PendingWrites(), False, math.inf
                self._committed_s = self._clock.monotonic_s()
            last = self.epoch, self._seq
            room = self._window.room
        if writes and (pending or resend):
            try:
                self._commit(pending, last, resend)
            except Exception:
                with self._changed:
                    pending.extend(self._pending)
                    self._pending, self._resend, self._write_at = pending, resend or self._resend, 0.0
                raise
        due = self._store.due(room)
        with self._changed:
            is_more = not self._resend and self._window.add(due, complete=len(due) < room)
        if is_more:
            self.on_due()

    def _commit(self, pending: PendingWrites, last: Key, resend: bool) -> None:
        oldest = self._store.oldest
        self._store.commit(pending, last, resend)
        with self._changed:
            if self._store.oldest is None:
                self._resend_at = math.inf
            elif self._store.oldest != oldest and self._store.needs_collector:
                self._silence_s, self._gap_s = self._shortest_s, _GAP_S
                self._resend_at = self._clock.monotonic_s() + self._shortest_s
            if self._store.returned:
                self._store.returned = False
                if self.epoch != self._store.epoch:
                    self.epoch, self._seq = self._store.epoch, 0
                self._send_again()


@dataclass
class _Sending:
    """A parcel on its way, and how many of its messages the broker has not acknowledged yet."""

    parcel: Parcel
    messages: int


class SendWindow:
    """Messages that are due on one connection: loaded, popped, and on its way; for one thread at a time.

    furthest: the greatest number that was ever popped, on any connection. complete: nothing else is due.
    """

    def __init__(self, topics: Topics) -> None:
        self.furthest = START
        self.complete = False
        self._topics = topics
        self._loaded: deque[Parcel] = deque()
        self._messages: deque[Message] = deque()  # those left of the parcel that is being popped
        self._sending: dict[int, _Sending] = {}  # by the id of their messages

    def __len__(self) -> int:
        """Return how many wait, at least."""
        return len(self._loaded) + len(self._messages) + (0 if self.complete else 1)

    @property
    def room(self) -> int:
        """The number of further parcels that may be loaded."""
        return WINDOW - len(self._loaded)

    @property
    def is_low(self) -> bool:
        """True if it is time to load more."""
        return not self.complete and len(self._loaded) < WINDOW // 2

    @property
    def is_at_start(self) -> bool:
        """True if the next message would be the first of a parcel."""
        return not self._messages

    def reset(self) -> None:
        """Start another connection, which has carried nothing yet."""
        self._loaded.clear()
        self._messages.clear()
        self._sending.clear()
        self.complete = False

    def add(self, due: Sequence[Parcel], complete: bool) -> bool:
        """Load the next parcels; return whether any is new here. A range may be on its way while another one grows.

        due: no more than there is room for. complete: nothing else is due.
        """
        known = [*self._loaded, *(each.parcel for each in self._sending.values())]
        ranges = {each.identity for each in known if isinstance(each, DroppedRange)}
        new = [each for each in due if isinstance(each, OutboxRow) or each.identity not in ranges]
        self._loaded.extend(new)
        self.complete = complete
        return bool(new)

    def pop(self) -> Message | None:
        """Return the next message; None if nothing is loaded."""
        if not self._messages and self._loaded:
            parcel = self._loaded.popleft()
            messages = self._messages_of(parcel)
            last = parcel.seq if isinstance(parcel, OutboxRow) else parcel.last
            self.furthest = max(self.furthest, (parcel.epoch, last))
            sending = _Sending(parcel, len(messages))
            self._sending.update({id(message): sending for message in messages})
            self._messages.extend(messages)
        return self._messages.popleft() if self._messages else None

    def _messages_of(self, parcel: Parcel) -> list[Message]:
        """Return a row's message, or one for each kind in a dropped range."""
        if isinstance(parcel, OutboxRow):
            topic = self._topics.telemetry if parcel.kind == TELEMETRY else self._topics.event
            return [Message(topic, parcel.payload)]
        span = {"epoch": parcel.epoch, "from": parcel.first, "to": parcel.last}
        documents = [Dropped.model_validate({**span, "kind": kind, "n": n}) for kind, n in parcel.counts.items()]
        return [Message(self._topics.event, document.to_json()) for document in documents]

    def delivered(self, message: Message) -> Parcel | None:
        """Note a PUBACK; return the parcel once the broker has all of it."""
        sending = self._sending.pop(id(message), None)
        if sending is None:
            return None
        sending.messages -= 1
        return sending.parcel if not sending.messages else None

    def refused(self, message: Message) -> Parcel | None:
        """Note a refusal; return the message's parcel, None if it is of another connection."""
        sending = self._sending.pop(id(message), None)
        return sending.parcel if sending is not None else None

    def delivered_upto(self, epoch: int, upto: int) -> int:
        """Return the greatest number, at most `upto`, before which no row is still on its way to the broker."""
        rows = [each.parcel for each in self._sending.values() if isinstance(each.parcel, OutboxRow)]
        return min([upto, *(row.seq - 1 for row in rows if row.epoch == epoch)])


class RateLimiter:
    """A token bucket: `per_s` parcels a second, and as many at once after an idle second."""

    def __init__(self, per_s: float, clock: Clock) -> None:
        self._clock = clock
        self._per_s = per_s
        self._left = per_s
        self._counted_s = self._clock.monotonic_s()

    @property
    def allows_one(self) -> bool:
        """True if one more is allowed now."""
        now = self._clock.monotonic_s()
        self._left = min(self._per_s, self._left + (now - self._counted_s) * self._per_s)
        self._counted_s = now
        return self._left >= 1.0

    def spend(self) -> None:
        """Count one that was sent."""
        self._left -= 1.0


class AckResult(Enum):
    """The content of a collector's ack."""

    PROGRESS = "progress"  # it has more than before
    GAP = "gap"  # it has received something, but not what comes next
    STILL_MISSING = "still missing"  # the gap has lasted for _STILL_MISSING_S


class AckTracker:
    """The acks of collectors by epoch. A smaller number, late or from a slower collector, takes nothing back."""

    def __init__(self) -> None:
        self._most: dict[int, int] = {}
        self._repeated: dict[int, tuple[int, float]] = {}  # the number that is repeated, and since when

    def update(self, epoch: int, upto: int, now_s: float) -> AckResult:
        """Note an ack. now_s: monotonic."""
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
        elif now_s - since_s >= _STILL_MISSING_S:
            return AckResult.STILL_MISSING
        return AckResult.GAP
