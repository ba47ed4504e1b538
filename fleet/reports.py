"""What boards have reported, in SQLite: each numbered document once, and up to which number nothing is missing."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from agent.database import Database
from agent.errors import AgentError

_MIGRATIONS = (
    """
    CREATE TABLE reports (
        fleet TEXT NOT NULL,
        device TEXT NOT NULL,
        epoch INTEGER NOT NULL,
        seq INTEGER NOT NULL,
        kind TEXT NOT NULL,
        ts REAL NOT NULL,
        document TEXT NOT NULL,
        PRIMARY KEY (fleet, device, epoch, seq)
    );
    CREATE TABLE dropped (
        fleet TEXT NOT NULL,
        device TEXT NOT NULL,
        epoch INTEGER NOT NULL,
        first INTEGER NOT NULL,
        last INTEGER NOT NULL,
        kind TEXT NOT NULL,
        n INTEGER NOT NULL,
        PRIMARY KEY (fleet, device, epoch, first, kind)
    ) WITHOUT ROWID;
    CREATE TABLE progress (
        fleet TEXT NOT NULL,
        device TEXT NOT NULL,
        epoch INTEGER NOT NULL,
        upto INTEGER NOT NULL,
        PRIMARY KEY (fleet, device, epoch)
    ) WITHOUT ROWID;
    """,
)
_PRAGMAS = ("journal_mode = WAL", "synchronous = FULL")  # what is acknowledged survives a power cut
_WALKED_AT_ONCE = 1000  # rows


@dataclass(frozen=True)
class Stream:
    """One board's numbers between two of its starts."""

    fleet: str
    device: str
    epoch: int

    @property
    def key(self) -> tuple[str, str, int]:
        return self.fleet, self.device, self.epoch


@dataclass(frozen=True)
class Report:
    """One telemetry or event. kind: telemetry, or the event's. ts: Unix time of its board in s. document: JSON."""

    stream: Stream
    seq: int
    kind: str
    ts: float
    document: str


@dataclass(frozen=True)
class Gap:
    """Numbers of a stream, first to last, that its board had to drop; n of them of this kind."""

    stream: Stream
    first: int
    last: int
    kind: str
    n: int


class Reports:
    """The file at `path`, for one thread at a time.

    Each method raises AgentError where the disk refuses (`fleet.write`, `fleet.read`), and where the file is damaged
    (`fleet.damaged`): that is moved aside, and the next call begins a new one.
    """

    def __init__(self, path: Path) -> None:
        """Raises also AgentError `fleet.schema`."""
        holds, loss = "what boards have reported", "what they have reported so far lies in the other file"
        self._database = Database(path, "fleet", holds, loss, _MIGRATIONS, _PRAGMAS)
        self._db: sqlite3.Connection | None = self._database.connect(any_thread=True)

    def close(self) -> None:
        if self._db is not None:
            self._db.close()
        self._db = None

    @contextmanager
    def _begun(self, what: str) -> Iterator[sqlite3.Connection]:
        """A transaction. A connection that failed serves no more: what it has open may have been moved aside."""
        self._db = self._db or self._database.connect(what, any_thread=True)
        try:
            with self._database.begun(self._db, what):
                yield self._db
        except AgentError:
            self.close()
            raise

    def add(self, news: Sequence[Report | Gap]) -> dict[Stream, int]:
        """Store it durably, what is known already once; up to which number each of its streams is complete."""
        reports = [
            (*each.stream.key, each.seq, each.kind, each.ts, each.document) for each in news if isinstance(each, Report)
        ]
        gaps = [(*each.stream.key, each.first, each.last, each.kind, each.n) for each in news if isinstance(each, Gap)]
        with self._begun("write") as db:
            db.executemany("INSERT OR IGNORE INTO reports VALUES (?, ?, ?, ?, ?, ?, ?)", reports)
            for *stream, first, last, _, _ in gaps:  # a board's gaps grow together: the last word counts
                within = "first >= ? AND last <= ? AND (first > ? OR last < ?)"
                where = f"fleet = ? AND device = ? AND epoch = ? AND {within}"
                db.execute(f"DELETE FROM dropped WHERE {where}", (*stream, first, last, first, last))
            db.executemany("INSERT OR REPLACE INTO dropped VALUES (?, ?, ?, ?, ?, ?, ?)", gaps)
            return {stream: _advance(db, stream) for stream in {each.stream for each in news}}

    def latest(self, fleet: str, device: str) -> tuple[int, int]:
        """The newest epoch that a board has reported in, and up to which number that is complete; zeros without one."""
        query = "SELECT epoch, upto FROM progress WHERE fleet = ? AND device = ? ORDER BY epoch DESC LIMIT 1"
        with self._begun("read") as db:
            found = db.execute(query, (fleet, device)).fetchone()
        return (int(found[0]), int(found[1])) if found is not None else (0, 0)

    def of(self, fleet: str, device: str) -> Iterator[Report]:
        """All that a board has reported, in the order of its numbers; one transaction until the last is taken."""
        query = "SELECT epoch, seq, kind, ts, document FROM reports WHERE fleet = ? AND device = ? ORDER BY epoch, seq"
        with self._begun("read") as db:
            for epoch, *rest in db.execute(query, (fleet, device)):
                yield Report(Stream(fleet, device, epoch), *rest)

    def dropped(self, fleet: str, device: str) -> list[Gap]:
        """All that a board has said of numbers that will not come, in their order."""
        where = "FROM dropped WHERE fleet = ? AND device = ? ORDER BY epoch, first, kind"
        with self._begun("read") as db:
            found = db.execute(f"SELECT epoch, first, last, kind, n {where}", (fleet, device)).fetchall()
        return [Gap(Stream(fleet, device, epoch), *rest) for epoch, *rest in found]


def _advance(db: sqlite3.Connection, stream: Stream) -> int:
    """Note, and return, up to which number the stream is complete now."""
    where = "fleet = ? AND device = ? AND epoch = ?"
    found = db.execute(f"SELECT upto FROM progress WHERE {where}", stream.key).fetchone()
    upto = before = int(found[0]) if found is not None else 0
    gaps = db.execute(f"SELECT first, last FROM dropped WHERE {where} AND last > ? ORDER BY first", (*stream.key, upto))
    upto = _through(upto, _numbers(db, stream, upto), gaps.fetchall())
    if upto > before or found is None:
        db.execute("INSERT OR REPLACE INTO progress VALUES (?, ?, ?, ?)", (*stream.key, upto))
    return upto


def _numbers(db: sqlite3.Connection, stream: Stream, after: int) -> Iterator[int]:
    """Of what is stored, in their order."""
    query = "SELECT seq FROM reports WHERE fleet = ? AND device = ? AND epoch = ? AND seq > ? ORDER BY seq LIMIT ?"
    while True:
        found = db.execute(query, (*stream.key, after, _WALKED_AT_ONCE)).fetchall()
        for (seq,) in found:
            yield seq
        if len(found) < _WALKED_AT_ONCE:
            return
        after = found[-1][0]


def _through(upto: int, numbers: Iterable[int], gaps: Sequence[tuple[int, int]]) -> int:
    """How far there is no hole after `upto`. numbers and gaps: ascending, by their first."""
    place = 0

    def over_gaps(reached: int) -> int:
        nonlocal place
        while place < len(gaps) and gaps[place][0] <= reached + 1:
            reached = max(reached, gaps[place][1])
            place += 1
        return reached

    upto = over_gaps(upto)
    for number in numbers:
        if number > upto + 1:
            break
        upto = over_gaps(max(upto, number))
    return upto
