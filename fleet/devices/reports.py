"""What boards have reported: each numbered document once, and up to which number nothing is missing."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fleet.identities import Identities, Name
from fleet.progress import advance
from fleet.store import ReportRow, Row, Store, Transaction, written
from fleet.twins import Twins

# Of events, those that the contract has (agent.messages.Event), for a stranger may invent any number.
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

    def __init__(self, store: Store) -> None:
        self._store = store
        self._identities = Identities(store)
        self._twins = Twins(store)
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
