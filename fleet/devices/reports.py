"""Up to which number each stream of documents has no hole: what is written down, and how it goes on."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import merge
from typing import NamedTuple

from fleet.devices.identities import Identities, Name
from fleet.store import FleetStore, ReportRow, Row, Transaction, written

Key = tuple[int, int]  # a device's id, its epoch
Span = tuple[int, int, float]  # numbers, from first to last; by the board's clock, 0 where nobody knows
_KEY = ("device", "epoch")
_COLUMNS = ("upto", "highest", "ts", "heard")
_FIRST_LOOK, _WALKED_AT_ONCE = 16, 1000  # rows


class _Progress(NamedTuple):
    """upto: nothing is missing up to there. highest: number that anything is known of, ts: when that was by its board.
    heard: when anything came. Unix time in s."""

    upto: int = 0
    highest: int = 0
    ts: float = 0.0
    heard: float = 0.0


class StreamStep(NamedTuple):
    """Where a stream is now. went_on: whether there is a higher number than before; ts: when that was by its board."""

    upto: int
    went_on: bool
    ts: float


def advance(transaction: Transaction, seen: Mapping[Key, Sequence[Span]], now: float) -> dict[Key, StreamStep]:
    """Note, and return, up to which number each stream is complete now.

    seen: what has just been stored, of each stream. What anybody else has stored counts too: who stores does so before
    coming here, and here there is one at a time.
    """
    before = _locked(transaction, seen, now)
    after = {}
    for key, spans in seen.items():
        known = before[key]
        upto = through(known.upto, sorted(spans))
        highest, ts = max([(known.highest, known.ts), *((last, ts) for _, last, ts in spans)])
        if upto < highest:
            upto = _walked(transaction, key, upto)
        after[key] = _Progress(upto, highest, ts, max(now, known.heard))
    transaction.upsert("progress", _KEY, (*_KEY, *_COLUMNS), [(*key, *each) for key, each in after.items()])
    return {key: StreamStep(each.upto, each.highest > before[key].highest, each.ts) for key, each in after.items()}


def through(upto: int, spans: Iterable[Sequence[float]]) -> int:
    """How far there is no hole after `upto`. spans: ascending by their first."""
    for first, last, *_ in spans:
        if first > upto + 1:
            break
        upto = max(upto, int(last))
    return upto


def _locked(transaction: Transaction, keys: Iterable[Key], now: float) -> dict[Key, _Progress]:
    """What is written down of these streams, which is nobody else's to change now; those without are begun."""
    found = transaction.lookup("progress", _KEY, _COLUMNS, keys, lock=True)
    if new := [key for key in keys if key not in found]:
        begin = "INSERT INTO progress VALUES (?, ?, 0, 0, 0.0, ?) ON CONFLICT (device, epoch) DO NOTHING"
        transaction.execute_many(begin, [(*key, now) for key in sorted(new)])
        newest = "UPDATE devices SET epoch = ? WHERE id = ? AND epoch < ?"
        transaction.execute_many(newest, [(epoch, device, epoch) for device, epoch in sorted(new)])
        found |= transaction.lookup("progress", _KEY, _COLUMNS, new, lock=True)
    return {(key[0], key[1]): _Progress(*row) for key, row in found.items()}


def _walked(transaction: Transaction, key: Key, upto: int) -> int:
    """How far there is no hole after `upto`, by all that is stored."""
    query = "SELECT first, last FROM dropped WHERE device = ? AND epoch = ? AND last > ? ORDER BY first"
    gaps = transaction.execute(query, (*key, upto))
    return through(upto, merge(gaps, ((seq, seq) for seq in _numbers(transaction, key, upto))))


def _numbers(transaction: Transaction, key: Key, after: int) -> Iterator[int]:
    """Of what is stored, in their order; few at first, for there may be a hole right there."""
    query = "SELECT seq FROM reports WHERE device = ? AND epoch = ? AND seq > ? ORDER BY seq LIMIT ?"
    most = _FIRST_LOOK
    while True:
        found = transaction.execute(query, (*key, after, most))
        for (seq,) in found:
            yield seq
        if len(found) < most:
            return
        after, most = found[-1][0], _WALKED_AT_ONCE


_MOST = 200_000  # remembered


class DuplicateBoards:
    """An epoch is a start's (see agent/uplink/outbox_store.py): a board has one that goes on, and may have older ones
    to send
    from the disk. What was written, by the board's own clock, after the newest epoch's newest is of another board: one
    that was cloned, or somebody who uses its name. A clock that was set back looks the same; nothing is refused for it.
    """

    def __init__(self, store: FleetStore) -> None:
        self._store = store
        self._generation = 0
        self._newest: dict[int, int] = {}  # epochs, by device
        self._told: set[Key] = set()

    def among(self, transaction: Transaction, steps: Mapping[Key, StreamStep]) -> list[Key]:
        """Which streams are a twin's, each told once."""
        self._learn(transaction, steps)
        late = {
            key: step for key, step in steps.items() if step.went_on and key[1] < self._newest[key[0]] and step.ts > 0.0
        }
        if not late:
            return []
        newest = {(device, self._newest[device]) for device, _ in late}
        found = transaction.lookup("progress", ("device", "epoch"), ("ts",), newest)
        ends = {key[0]: row[0] for key, row in found.items()}
        twins = [key for key, step in late.items() if 0.0 < ends.get(key[0], 0.0) < step.ts and key not in self._told]
        self._told.update(twins)
        return twins

    def _learn(self, transaction: Transaction, steps: Mapping[Key, StreamStep]) -> None:
        if self._generation != self._store.generation or len(self._newest) > _MOST or len(self._told) > _MOST:
            self._newest.clear()
            self._told.clear()
            self._generation = self._store.generation
        unknown = {(device,) for device, _ in steps if device not in self._newest}
        if unknown:
            found = transaction.lookup("devices", ("id",), ("epoch",), unknown)
            self._newest.update({int(key[0]): int(row[0]) for key, row in found.items()})
        for device, epoch in steps:
            if epoch > self._newest.get(device, 0):
                self._newest[device] = epoch


# Of events, those that the contract has (agent.contract.messages.Event), for a stranger may invent any number.
_KINDS = frozenset(
    ["alarm", "drift", "fidelity", "view", "regime", "job", "swap", "commit", "rollback", "store", "error"]
)
_KINDS |= {"camera", "observer", "results"}


_MOST_BEGUN = 200_000  # remembered


class Stream(NamedTuple):
    """One board's numbers between two of its starts."""

    fleet: str
    device: str
    epoch: int


class Report(NamedTuple):
    """One telemetry or event. kind: telemetry, or the event's. ts: Unix time of its board in s. document: JSON."""

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
class Added:
    """complete: up to which number each stream is. taken: what came under a number that another document has. twins:
    streams that go on though their board, by its own clock, had begun another one before."""

    complete: Mapping[Stream, int]
    taken: Sequence[Report]
    twins: Sequence[Stream]


class Reports:
    """Those in a store. Each method raises AgentError as the store does."""

    def __init__(self, store: FleetStore) -> None:
        self._store = store
        self._identities = Identities(store)
        self._twins = DuplicateBoards(store)
        self._generation = 0
        self._begun = set[Stream]()

    def add(self, news: Sequence[Report | Gap]) -> dict[Stream, int]:
        """Store it durably, what is known already once; up to which number each of its streams is complete."""
        added = written(self._store, lambda transaction: self.take(transaction, news, time.time()))
        return dict(added.complete)

    def take(self, transaction: Transaction, news: Sequence[Report | Gap], now: float) -> Added:
        """As `add`, in a transaction of the caller's. now: Unix time in s."""
        streams = {each.stream for each in news}
        ids = self._identities.of(transaction, {(stream.fleet, stream.device) for stream in streams}, now)
        keys = {stream: (ids[stream.fleet, stream.device], stream.epoch) for stream in streams}
        rows, gaps = [], []
        seen: dict[tuple[int, int], list[tuple[int, int, float]]] = defaultdict(list)  # first, last, ts
        for each in news:
            key = keys[each.stream]
            if isinstance(each, Report):
                rows.append(ReportRow(*key, each.seq, each.kind, each.ts, now, each.document))
                seen[key].append((each.seq, each.seq, each.ts))
            else:
                gaps.append((*key, each.first, each.kind, each.last, each.n))
                seen[key].append((each.first, each.last, 0.0))
        taken = {(*row[:3], row.document) for row in transaction.add_reports(rows)}
        _add_gaps(transaction, gaps)
        _add_newest(transaction, rows)
        steps = advance(transaction, seen, now)
        twins = set(self._twins.among(transaction, steps))
        return Added(
            {stream: steps[key].upto for stream, key in keys.items()},
            [each for each in news if isinstance(each, Report) and _key(each, keys) in taken] if taken else [],
            [stream for stream, key in keys.items() if key in twins] if twins else [],
        )

    def begun(self, transaction: Transaction, news: Iterable[Report | Gap], ids: Mapping[Name, int]) -> set[Name]:
        """Whose streams begin with these. ids: of all their devices."""
        if self._generation != self._store.generation or len(self._begun) > _MOST_BEGUN:
            self._begun.clear()
            self._generation = self._store.generation
        streams = {each.stream for each in news} - self._begun
        self._begun |= streams
        keys = {(ids[each.fleet, each.device], each.epoch): (each.fleet, each.device) for each in streams}
        found = transaction.lookup("progress", ("device", "epoch"), ("upto",), keys)
        return {name for key, name in keys.items() if key not in found}

    def latest(self, fleet: str, device: str) -> tuple[int, int]:
        """The newest epoch that a board has reported in, and up to which number that is complete; zeros without one."""
        with self._store.begun("read") as transaction:
            return self.newest(transaction, [(fleet, device)])[fleet, device]

    def newest(
        self, transaction: Transaction, boards: Iterable[tuple[str, str]]
    ) -> dict[tuple[str, str], tuple[int, int]]:
        """As `latest`, of each of these boards."""
        known = transaction.lookup("devices", ("fleet", "name"), ("id", "epoch"), boards)
        found = transaction.lookup("progress", ("device", "epoch"), ("upto",), known.values())
        latest = {board: (key[1], found[key][0]) for board, key in known.items() if key in found}
        return {board: latest.get(board, (0, 0)) for board in boards}

    def of(self, fleet: str, device: str) -> Iterator[Report]:
        """All that a board has reported, in the order of its numbers."""
        columns = "epoch, seq, kind, ts, document"
        for epoch, *rest in self._all(f"SELECT {columns} FROM reports r", "epoch, seq", fleet, device):
            yield Report(Stream(fleet, device, epoch), *rest)

    def dropped(self, fleet: str, device: str) -> list[Gap]:
        """All that a board has said of numbers that will not come, in their order."""
        query = "SELECT epoch, first, last, kind, n FROM dropped r"
        found = self._all(query, "epoch, first, kind", fleet, device)
        return [Gap(Stream(fleet, device, epoch), *rest) for epoch, *rest in found]

    def _all(self, query: str, order: str, fleet: str, device: str) -> list[Row]:
        where = f"WHERE r.device = (SELECT id FROM devices WHERE fleet = ? AND name = ?) ORDER BY {order}"
        with self._store.begun("read") as transaction:
            return transaction.execute(f"{query} {where}", (fleet, device))


def _add_gaps(transaction: Transaction, gaps: Sequence[tuple[int, int, int, str, int, int]]) -> None:
    """A board's gaps grow together: the last word counts."""
    for device, epoch, first, _, last, _ in gaps:
        # The first bounds by the key what is looked at: a board may have thousands of them.
        within = "first BETWEEN ? AND ? AND last <= ? AND (first > ? OR last < ?)"
        where = f"device = ? AND epoch = ? AND {within}"
        transaction.execute(f"DELETE FROM dropped WHERE {where}", (device, epoch, first, last, last, first, last))
    rows = list({gap[:4]: gap for gap in gaps}.values())
    columns = ("device", "epoch", "first", "kind", "last", "n")
    transaction.upsert("dropped", columns[:4], columns, rows, "excluded.last >= dropped.last")


def _add_newest(transaction: Transaction, rows: Sequence[ReportRow]) -> None:
    """Of each device the newest event of each kind, for whoever asks how all of them are."""
    newest: dict[Row, Row] = {}
    for row in rows:
        if row.kind in _KINDS:
            key = row.device, row.kind
            newest[key] = max(newest.get(key, ()), (row.epoch, row.seq, row.document))
    columns = ("device", "kind", "epoch", "seq", "document")
    news = [(*key, *each) for key, each in newest.items()]
    newer = "(excluded.epoch, excluded.seq) > (newest_events.epoch, newest_events.seq)"  # also than another collector's
    transaction.upsert("newest_events", columns[:2], columns, news, newer)


def _key(report: Report, keys: Mapping[Stream, tuple[int, int]]) -> tuple[int, int, int, str]:
    return (*keys[report.stream], report.seq, report.document)
