"""Up to which number each stream of documents has no hole: what is written down, and how it goes on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import merge
from typing import NamedTuple

from fleet.store import Transaction

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


class Step(NamedTuple):
    """Where a stream is now. went_on: whether there is a higher number than before; ts: when that was by its board."""

    upto: int
    went_on: bool
    ts: float


def advance(transaction: Transaction, seen: Mapping[Key, Sequence[Span]], now: float) -> dict[Key, Step]:
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
    return {key: Step(each.upto, each.highest > before[key].highest, each.ts) for key, each in after.items()}


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
