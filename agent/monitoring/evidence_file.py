"""Keep a mean over frames, and the evidence for drift beside it, in a file that outlives the daemon.

Every frame and every block is written when it is seen, without forcing it to the disk: a killed process loses at most
the block that was not complete, a power cut the last seconds. Once the file is long, its rows are replaced by what they
add up to: nothing is lost, however many they were. Only live cameras have such a file: a recording that is played once
more is new evidence.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from agent.common.errors import AgentError
from agent.common.state_files import Journal, count, finite, parse_or_none, share
from agent.monitoring.estimates import FidelityRecord, SinceStartBySecond
from engines.store.artefact import fingerprint

_SCHEMA = 2
_ROW = "row "
_PARTS = ("drift", "classes", "appearances")  # whose states are kept beside the mean
_LINES = 5000  # after which the file is compacted: hours at the normal pace, and less than a second to read

Mean = FidelityRecord | SinceStartBySecond  # what can be kept


@dataclass(frozen=True)
class RecalledEvidence:
    """since: capture time of the latest start. parts: the states that `note` has kept; None before the first of one."""

    since: float
    parts: Mapping[str, Any]


class EvidenceFile:
    """The evidence on one engine at a time.

    A disk that refuses is reported once, and nothing is kept until the next engine.
    """

    def __init__(
        self, path: Path | None, source: str = "", on_error: Callable[[AgentError], None] = lambda _: None
    ) -> None:
        """Args:
        path: None keeps nothing.
        source: Of the frames. Evidence from another source is ignored. It may hold a password, and is not kept.
        on_error: Called with `state.write` for a disk that refuses.
        """
        self._path = path
        self._identity = fingerprint({"schema": _SCHEMA, "source": source})
        self._on_error = on_error
        self._journal: Journal | None = None
        self._mean: Mean | None = None
        self._engine, self._since = "", 0.0
        self._next = 0  # number of the next row
        self._lines = 0

    def start(self, engine: str, since: float, recall: bool, mean: Mean) -> RecalledEvidence | None:
        """Keep the values of `mean` while `engine` serves, which it does from capture time `since` on.

        The first call restores the mean that another process left. If that was of the same engine, and `recall` is
        true, it goes on from there, and the evidence beside it is returned; else it starts from scratch.
        """
        is_first, self._mean = self._mean is None, mean
        with self._writing():
            if self._journal is None and self._path is not None:
                self._journal = Journal(self._path, self._identity, "state.write")
                self._lines = len(self._journal.values)
        recalled = self._restore(self._journal, mean) if is_first and self._journal is not None else None
        if not recall or self._engine != engine:
            recalled = None
        if recalled is None:
            mean.start(since)
            self._engine, self._since = engine, since
        if self._journal is not None:
            with self._writing():
                if recalled is None:
                    for part in _PARTS:
                        self._journal.values.pop(part, None)
                    self._journal.shorten()  # before the next engine is named: no kill may leave it with this drift
                self._compact(self._journal, mean)
        return recalled

    def note(self, part: str, state: Any) -> None:
        """Keep the newest state of a part, in JSON's types.

        drift: `DriftMonitor.saved_state` at the end of a block. classes: `ClassLosses.state`. appearances:
        `AppearanceHistory.state`, of the frames that the engine answered first.
        """
        assert part in _PARTS
        self._put(part, state)

    def note_frame(self, ts: float, value: float | None) -> None:
        """Keep a value that the mean has added."""
        self._put_row([ts, value])

    def note_start(self, since: float) -> None:
        """Keep that the mean was started: frames before capture time `since` are of another scene."""
        self._since = since
        self._put_row([since])

    def _restore(self, journal: Journal, mean: Mean) -> RecalledEvidence | None:
        """Put `mean` where the file left it; None, and an empty journal, for a file that cannot be understood."""
        empty = mean.state()
        recalled = parse_or_none(lambda: self._replay(journal, mean))
        if recalled is None:
            mean.restore(empty)  # part of the file may have been replayed
            journal.values.clear()
        return recalled

    def _replay(self, journal: Journal, mean: Mean) -> RecalledEvidence:
        """Raises what `parse_or_none` catches for a file that no process has left."""
        kept = cast("Any", journal.get("mean"))
        rows = {count(int(key.removeprefix(_ROW))): row for key, row in journal.values.items() if key.startswith(_ROW)}
        engine, first, self._since = str(kept["engine"]), count(kept["next"]), finite(kept["since"])
        mean.restore(kept["state"])
        for number, row in sorted(rows.items()):
            if number < first:
                continue
            ts, *values = cast("list[Any]", row)
            if values:
                (value,) = values
                mean.add(finite(ts), None if value is None else share(value))
            else:
                self._since = finite(ts)
                mean.start(self._since)
        self._engine, self._next = engine, max([first, *(number + 1 for number in rows)])
        return RecalledEvidence(self._since, {part: journal.get(part) for part in _PARTS})

    def _put_row(self, row: list[float | None]) -> None:
        number, self._next = self._next, self._next + 1
        self._put(f"{_ROW}{number}", row)

    def _put(self, key: str, value: Any) -> None:
        if self._journal is None or self._mean is None:
            return
        with self._writing():
            self._journal.put(key, value)
            self._lines += 1
            if self._lines > _LINES:
                self._compact(self._journal, self._mean)

    def _compact(self, journal: Journal, mean: Mean) -> None:
        """Replace the rows by what they add up to; after a kill in between, `next` says which of them that has."""
        kept: dict[str, Any] = {"engine": self._engine, "since": self._since, "next": self._next, "state": mean.state()}
        journal.put("mean", kept)
        for key in [key for key in journal.values if key.startswith(_ROW)]:
            del journal.values[key]
        journal.shorten()
        self._lines = len(journal.values)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except AgentError as error:
            self._journal = None
            with suppress(OSError):
                cast("Path", self._path).unlink(missing_ok=True)  # what is known there is old from now on
            self._on_error(error)


def remove_other_files(
    state_dir: Path, names: Sequence[str], kept: Collection[Path], on_error: Callable[[AgentError], None]
) -> None:
    """Remove the files that EvidenceFile has kept in `state_dir` under these names, with any suffix, but for `kept`."""
    try:
        found_files = [path for name in names for path in state_dir.glob(f"{name}*.jsonl")]
        for path in found_files:
            if path not in kept and re.fullmatch(r"[a-z]+(-[0-9a-f]{12})?", path.stem):
                path.unlink(missing_ok=True)
    except OSError as error:
        found, remedy = f"{error.filename}: {error.strerror}", "remove the file, or correct its permissions"
        on_error(AgentError("state.write", found, "a writable state directory", remedy))
