"""Store the numbered reports of boards, and know up to which number each stream of them is complete.

A board numbers its telemetry and events from 1 on, in a new stream with each start. `Reports.insert` stores what
came, in any order and as often as it comes. A board may drop numbers and say so: a `Gap` counts like the reports
that it stands for. The table `progress` has for each stream the number up to which nothing is missing; that number
is acknowledged to the board. `DuplicateBoards` notices two boards that use one name.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import merge
from typing import NamedTuple

from fleet.devices.devices import REGIME, Name, RowCache
from fleet.store.transaction import FleetStore, ReportRow, Row, Transaction

Key = tuple[int, int]  # a device's id, its epoch
Span = tuple[int, int, float]  # first number, last number, time by the board's clock; 0 if unknown

_KEY = ("device", "epoch")
_COLUMNS = ("upto", "highest", "ts", "heard")
_FIRST_PAGE, _PAGE = 16, 1000  # rows that are read at once; few at first, for there may be a hole right there


class Stream(NamedTuple):
    """The numbers of one board between two of its starts."""

    fleet: str
    device: str
    epoch: int


class Report(NamedTuple):
    """A telemetry sample or an event.

    kind: `telemetry`, or the event's kind. ts: Unix time in s, by the board's clock. document: JSON.
    """

    stream: Stream
    seq: int
    kind: str
    ts: float
    document: str


class Gap(NamedTuple):
    """Numbers of a stream, first to last, that its board had to drop; n of them of this kind."""

    stream: Stream
    first: int
    last: int
    kind: str
    n: int


@dataclass(frozen=True)
class AddedReports:
    """The result of an insert.

    complete: up to which number each stream is complete. conflicts: reports whose number another document has.
    duplicates: streams that grow although their board, by its own clock, had started a later one.
    """

    complete: Mapping[Stream, int]
    conflicts: Sequence[Report]
    duplicates: Sequence[Stream]


class Reports:
    """Insert reports into a store, and know how complete they are. Raises AgentError as the store does."""

    def __init__(self, store: FleetStore) -> None:
        self._duplicates = DuplicateBoards(store)
        self._started: RowCache[Stream, None] = RowCache(store)

    def insert(
        self, transaction: Transaction, entries: Sequence[Report | Gap], ids: Mapping[Name, int], now: float
    ) -> AddedReports:
        """Insert what is not stored yet. ids: of all their devices. now: Unix time in s."""
        streams = {each.stream for each in entries}
        keys = {stream: (ids[stream.fleet, stream.device], stream.epoch) for stream in streams}
        rows, gaps = [], []
        spans: dict[Key, list[Span]] = defaultdict(list)
        for each in entries:
            key = keys[each.stream]
            if isinstance(each, Report):
                rows.append(ReportRow(*key, each.seq, each.kind, each.ts, now, each.document))
                spans[key].append((each.seq, each.seq, each.ts))
            else:
                gaps.append((*key, each.first, each.kind, each.last, each.n))
                spans[key].append((each.first, each.last, 0.0))
        conflicting = {(*row[:3], row.document) for row in transaction.add_reports(rows)}
        _add_gaps(transaction, gaps)
        _add_newest_regimes(transaction, rows)
        complete, grown = _advance_streams(transaction, spans, now)
        duplicates = set(self._duplicates.detect(transaction, complete, grown))
        reports = [each for each in entries if isinstance(each, Report)] if conflicting else []
        return AddedReports(
            {stream: complete[key] for stream, key in keys.items()},
            [each for each in reports if (*keys[each.stream], each.seq, each.document) in conflicting],
            [stream for stream, key in keys.items() if key in duplicates],
        )

    def boards_with_new_streams(
        self, transaction: Transaction, entries: Iterable[Report | Gap], ids: Mapping[Name, int]
    ) -> set[Name]:
        """Return the boards of which a stream starts with these entries. ids: of all their devices."""
        self._started.validate()
        streams = {each.stream for each in entries} - self._started.keys()
        self._started.update(dict.fromkeys(streams))
        keys = {(ids[each.fleet, each.device], each.epoch): (each.fleet, each.device) for each in streams}
        known = transaction.lookup("progress", _KEY, ("upto",), keys)
        return {name for key, name in keys.items() if key not in known}

    def positions(self, transaction: Transaction, boards: Iterable[Name]) -> dict[Name, tuple[int, int]]:
        """Return each board's newest epoch, and up to which number it is complete; zeros without reports."""
        known = transaction.lookup("devices", ("fleet", "name"), ("id", "epoch"), boards)
        complete = transaction.lookup("progress", _KEY, ("upto",), known.values())
        latest = {board: (key[1], complete[key][0]) for board, key in known.items() if key in complete}
        return {board: latest.get(board, (0, 0)) for board in boards}


def _add_gaps(transaction: Transaction, gaps: Sequence[tuple[int, int, int, str, int, int]]) -> None:
    """Store gaps. Neighbouring gaps of a board grow into one, so the newest replaces those within it."""
    for device, epoch, first, _, last, _ in gaps:
        # The condition on `first` limits by the key which rows are read: a board may have thousands of gaps.
        within = "first BETWEEN ? AND ? AND last <= ? AND (first > ? OR last < ?)"
        where = f"device = ? AND epoch = ? AND {within}"
        transaction.execute(f"DELETE FROM dropped WHERE {where}", (device, epoch, first, last, last, first, last))
    rows = list({gap[:4]: gap for gap in gaps}.values())
    columns = ("device", "epoch", "first", "kind", "last", "n")
    transaction.upsert("dropped", columns[:4], columns, rows, "excluded.last >= dropped.last")


def _add_newest_regimes(transaction: Transaction, rows: Sequence[ReportRow]) -> None:
    """Keep each device's newest event of a regime, for the tables of all devices."""
    newest: dict[int, Row] = {}
    for row in rows:
        if row.kind == REGIME:
            newest[row.device] = max(newest.get(row.device, ()), (row.epoch, row.seq, row.document))
    columns = ("device", "kind", "epoch", "seq", "document")
    newer = (
        "(excluded.epoch, excluded.seq) > (newest_events.epoch, newest_events.seq)"  # another collector may be ahead
    )
    transaction.upsert(
        "newest_events", columns[:2], columns, [(device, REGIME, *each) for device, each in newest.items()], newer
    )


class _Progress(NamedTuple):
    """A row of `progress`: nothing is missing up to `upto`.

    highest: the highest number that is known, reported or dropped. ts: its time by the board's clock. heard: when
    anything of the stream came last. Unix time in s.
    """

    upto: int = 0
    highest: int = 0
    ts: float = 0.0
    heard: float = 0.0


def _advance_streams(
    transaction: Transaction, spans: Mapping[Key, Sequence[Span]], now: float
) -> tuple[dict[Key, int], dict[Key, float]]:
    """Update the progress of streams.

    Return up to which number each is complete; and of those whose highest number rose, the time of that number.

    Rows of other collectors count too: each stores them before it comes here, and the lock lets in one at a time.

    Args:
        spans: The numbers just stored, by stream.
        now: Unix time in s.
    """
    before = _lock_progress(transaction, spans, now)
    after = {}
    for key, stored in spans.items():
        known = before[key]
        upto = complete_through(known.upto, sorted(stored))
        highest, ts = max([(known.highest, known.ts), *((last, ts) for _, last, ts in stored)])
        if upto < highest:  # go on by all that is stored
            query = "SELECT first, last FROM dropped WHERE device = ? AND epoch = ? AND last > ? ORDER BY first"
            gaps = transaction.execute(query, (*key, upto))
            upto = complete_through(upto, merge(gaps, ((seq, seq) for seq in _stored_numbers(transaction, key, upto))))
        after[key] = _Progress(upto, highest, ts, max(now, known.heard))
    transaction.upsert("progress", _KEY, (*_KEY, *_COLUMNS), [(*key, *each) for key, each in after.items()])
    grown = {key: each.ts for key, each in after.items() if each.highest > before[key].highest}
    return {key: each.upto for key, each in after.items()}, grown


def complete_through(upto: int, spans: Iterable[Sequence[float]]) -> int:
    """Return the last number before the first hole after `upto`. spans: in ascending order of their first number."""
    for first, last, *_ in spans:
        if first > upto + 1:
            break
        upto = max(upto, int(last))
    return upto


def _lock_progress(transaction: Transaction, keys: Iterable[Key], now: float) -> dict[Key, _Progress]:
    """Return the progress of these streams, locked to the end of the transaction. Missing rows are created."""
    rows = transaction.lookup("progress", _KEY, _COLUMNS, keys, lock=True)
    if new := [key for key in keys if key not in rows]:
        start = "INSERT INTO progress VALUES (?, ?, 0, 0, 0.0, ?) ON CONFLICT (device, epoch) DO NOTHING"
        transaction.execute_many(start, [(*key, now) for key in sorted(new)])
        newest = "UPDATE devices SET epoch = ? WHERE id = ? AND epoch < ?"
        transaction.execute_many(newest, [(epoch, device, epoch) for device, epoch in sorted(new)])
        rows |= transaction.lookup("progress", _KEY, _COLUMNS, new, lock=True)
    return {(key[0], key[1]): _Progress(*row) for key, row in rows.items()}


def _stored_numbers(transaction: Transaction, key: Key, after: int) -> Iterator[int]:
    """Yield the numbers of stored reports, in ascending order."""
    query = "SELECT seq FROM reports WHERE device = ? AND epoch = ? AND seq > ? ORDER BY seq LIMIT ?"
    most = _FIRST_PAGE
    while True:
        rows = transaction.execute(query, (*key, after, most))
        for (seq,) in rows:
            yield seq
        if len(rows) < most:
            return
        after, most = rows[-1][0], _PAGE


class DuplicateBoards:
    """Detect boards that share one name: a cloned board, or a stranger who uses the name.

    An epoch belongs to one start (see agent/uplink/outbox_store.py). A board has one epoch that grows, and may still
    send older ones from its disk. A report in an older epoch was therefore written before the newest epoch's last
    one, by the board's own clock. If it was written later, it is another board's. A clock that was set back looks the
    same, so nothing is refused for it.
    """

    def __init__(self, store: FleetStore) -> None:
        self._newest: RowCache[int, int] = RowCache(store)  # epochs, by device
        self._reported: RowCache[Key, None] = RowCache(store)

    def detect(self, transaction: Transaction, streams: Collection[Key], grown: Mapping[Key, float]) -> list[Key]:
        """Return the streams of duplicates, each once.

        Args:
            streams: All streams of a batch. One that has not grown also says that its epoch has begun: with `--share`
                another collector may have stored its reports.
            grown: Those of them that have grown, each with its newest time by its board.
        """
        self._newest.validate()
        self._reported.validate()
        if unknown := {(device,) for device, _ in streams if device not in self._newest}:
            rows = transaction.lookup("devices", ("id",), ("epoch",), unknown)
            self._newest.update({int(key[0]): int(row[0]) for key, row in rows.items()})
        for device, epoch in streams:
            self._newest[device] = max(epoch, self._newest.get(device, 0))
        late = {key: ts for key, ts in grown.items() if key[1] < self._newest[key[0]] and ts > 0.0}
        newest = {(device, self._newest[device]) for device, _ in late}
        ends = {key[0]: row[0] for key, row in transaction.lookup("progress", _KEY, ("ts",), newest).items()}
        duplicates = [key for key, ts in late.items() if 0.0 < ends.get(key[0], 0.0) < ts and key not in self._reported]
        self._reported.update(dict.fromkeys(duplicates))
        return duplicates
