"""Store the devices of a fleet: what each last reported of itself, and the tags by which its owner groups them.

The collector applies statuses and births; everybody else reads `Device`s, each with its newest telemetry and events.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, TypeVar

from agent.contract.messages import SCHEMA_VERSION, Birth, Status
from fleet.devices.records import audit
from fleet.store.transaction import FleetStore, Row, Transaction, write_with_retries
from fleet.untrusted import printable

Name = tuple[str, str]  # fleet, device
K = TypeVar("K")
V = TypeVar("V")

_MOST_REMEMBERED = 200_000  # rows
_STATE = ("id", "state", "session", "boot_id", "state_ts")
_BIRTH = ("id", "agent_version", "model", "engine", "calibration", "birth")
_COLUMNS = "id, fleet, name, last_seen, state, agent_version, model, engine, calibration, birth"
# The newest by its numbers, not by its clock. A device has few events beside its telemetry.
_NEWEST = "FROM reports r WHERE r.device = d.id AND r.kind = 'telemetry' ORDER BY epoch DESC, seq DESC LIMIT 1"
_AT_ONCE = 500
FORGOTTEN = "forgotten devices"  # subject of the audit's entries
_TABLES = ("reports", "dropped", "progress", "newest_events", "results", "tags")  # they have a device's rows, by its id
_HEARD = "(SELECT max(heard) FROM progress p WHERE p.device = d.id)"
REGIME = "regime"  # the kind of event that names an engine which is kept for a light
_REGIME = f"(SELECT document FROM newest_events e WHERE e.device = d.id AND e.kind = '{REGIME}')"


@dataclass(frozen=True)
class Device:
    """A device as the store knows it.

    last_seen: Unix time in s, by the collector's clock; 0 for a device that is known only by retained messages. state:
    of its newest status; None without one. birth, telemetry, regime: the newest documents; empty without one.
    telemetry_at: when the newest telemetry came. tags: values by name, "" for a tag without value.
    """

    id: int
    fleet: str
    name: str
    last_seen: float
    state: str | None
    agent_version: str | None
    model: str | None
    engine: str | None
    calibration: str | None
    birth: Mapping[str, Any] = field(default_factory=dict)
    telemetry: Mapping[str, Any] = field(default_factory=dict)
    telemetry_at: float | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    regime: Mapping[str, Any] = field(default_factory=dict)

    @property
    def schema(self) -> int | None:
        """The version of the contract that the device speaks, by its birth; None without one."""
        return _schema(self.birth) if self.birth else None

    @property
    def is_newer(self) -> bool:
        """True if the device speaks a newer contract: it is known to be there, and nothing else of it can be read."""
        return self.schema is not None and self.schema > SCHEMA_VERSION


class RowCache(dict[K, V]):
    """Remember facts about rows for as long as they hold: within one connection of the store.

    Rows written in a transaction that failed are forgotten too, because the store then connects again.
    """

    def __init__(self, store: FleetStore) -> None:
        super().__init__()
        self._store = store
        self._generation = 0

    def validate(self) -> None:
        """Forget everything after a new connection, or once too much is remembered. Call it before each use."""
        if self._generation != self._store.generation or len(self) > _MOST_REMEMBERED:
            self.clear()
            self._generation = self._store.generation


class Devices:
    """Read and change the devices in a store. Each method raises AgentError as the store does; times are Unix s."""

    def __init__(self, store: FleetStore) -> None:
        self._store = store
        self._known: RowCache[Name, int] = RowCache(store)
        self._forgotten = 0  # the audit's newest entry of devices that somebody has forgotten

    def ids(self, transaction: Transaction, names: Set[Name], now: float) -> dict[Name, int]:
        """Return the number of each device, by which the store's tables know it; it is remembered.

        A new device gets one: first seen `now` (Unix time in s), not heard yet.
        """
        known = self._known_ids(transaction, names)
        if new := names - known.keys():
            query = (
                "INSERT INTO devices (fleet, name, first_seen, last_seen) VALUES (?, ?, ?, 0.0) "
                "ON CONFLICT (fleet, name) DO NOTHING"
            )
            transaction.execute_many(query, [(*name, now) for name in sorted(new)])
            known.update(_lookup_ids(transaction, new))
            self._known.update(known)
        return known

    def unknown(self, transaction: Transaction, names: Set[Name]) -> Set[Name]:
        """Return those of the names that are no device of the store yet."""
        return names - self._known_ids(transaction, names).keys()

    def total(self, transaction: Transaction) -> int:
        """Return how many devices the store has, of all fleets."""
        ((count,),) = transaction.execute("SELECT count(*) FROM devices")
        return int(count)

    def _known_ids(self, transaction: Transaction, names: Set[Name]) -> dict[Name, int]:
        """Return the numbers of those that the store knows; they are remembered."""
        self._known.validate()
        newest = "SELECT coalesce(max(id), 0) FROM audit WHERE subject = ?"
        ((forgotten,),) = transaction.execute(newest, (FORGOTTEN,))
        if forgotten != self._forgotten:  # a device that is heard again gets another number
            self._known.clear()
            self._forgotten = int(forgotten)
        ids = {name: self._known[name] for name in names if name in self._known}
        if len(ids) == len(names):
            return ids
        ids.update(_lookup_ids(transaction, names - ids.keys()))
        self._known.update(ids)
        return ids

    def apply_statuses(self, transaction: Transaction, statuses: Mapping[Name, Status], now: float) -> None:
        """Store the newest status of devices. A late will is ignored: see `is_late_will`."""
        ids = self.ids(transaction, statuses.keys(), now)
        known = transaction.lookup("devices", ("id",), ("session", "state_ts"), [(each,) for each in ids.values()])
        rows = [
            (ids[name], status.state, printable(status.session), printable(status.boot_id), status.ts)
            for name, status in statuses.items()
            if not is_late_will(status, *known[(ids[name],)])
        ]
        _update(transaction, _STATE, rows)

    def apply_births(
        self, transaction: Transaction, births: Mapping[Name, tuple[Birth | None, str]], now: float
    ) -> None:
        """Store what devices are and run.

        births: by device the birth and its document. A birth that cannot be read here is None, and its document has
        the version alone, such as `{"schema_version": 2}`.
        """
        ids = self.ids(transaction, births.keys(), now)
        rows = []
        for name, (birth, document) in births.items():
            runs = [getattr(birth, column, None) for column in _BIRTH[1:-1]]
            rows.append((ids[name], *(each if each is None else printable(each) for each in runs), document))
        _update(transaction, _BIRTH, rows)

    def mark_seen(self, transaction: Transaction, names: Set[Name], now: float) -> None:
        """Note that these devices have sent something just now. A message that a broker had retained does not count."""
        ids = self.ids(transaction, names, now)
        _update(transaction, ("id", "last_seen"), [(each, now) for each in ids.values()])

    def all(self, fleet: str, condition: str = "", values: Sequence[object] = (), after: str = "") -> Iterator[Device]:
        """Yield the devices of a fleet, by name, read some hundreds at a time.

        Args:
            condition: In SQL, on `d`, a row of the table devices; empty for all.
            values: Of the condition's parameters.
            after: Begin with the first name behind this one.
        """
        condition = f"fleet = ? AND name > ? AND ({condition})" if condition else "fleet = ? AND name > ?"
        while page := self._select(condition, (fleet, after, *values)):
            yield from page
            if len(page) < _AT_ONCE:
                return
            after = page[-1].name

    def count(self, fleet: str) -> int:
        """Return how many devices a fleet has."""
        with self._store.transaction("read") as transaction:
            ((count,),) = transaction.execute("SELECT count(*) FROM devices WHERE fleet = ?", (fleet,))
        return int(count)

    def by_ids(self, ids: Sequence[int]) -> list[Device]:
        """Return the devices of these ids."""
        parts = [ids[start : start + _AT_ONCE] for start in range(0, len(ids), _AT_ONCE)]
        return [each for part in parts for each in self._select(f"id IN ({', '.join('?' * len(part))})", part)]

    def census(self, since: float, most: int) -> list[tuple[str, str, int, int]]:
        """Return fleet, state, how many devices, and how many of them were heard since then; the largest groups first.

        The state of a device without a status is `unknown`.
        """
        heard = (
            "d.last_seen >= ? OR EXISTS (SELECT 1 FROM progress p WHERE p.device = d.id AND p.heard >= ?)"  # telemetry
        )
        query = (
            f"SELECT fleet, coalesce(state, 'unknown'), count(*), sum(CASE WHEN {heard} THEN 1 ELSE 0 END) "
            "FROM devices d GROUP BY fleet, state ORDER BY count(*) DESC LIMIT ?"
        )
        with self._store.transaction("read") as transaction:
            groups = transaction.execute(query, (since, since, most))
        return [(str(fleet), str(state), int(count), int(recent)) for fleet, state, count, recent in groups]

    def _select(self, condition: str, values: Sequence[object]) -> list[Device]:
        with self._store.transaction("read") as transaction:
            ids = f"SELECT id FROM devices d WHERE {condition} ORDER BY name LIMIT {_AT_ONCE}"
            tags: dict[int, dict[str, str]] = defaultdict(dict)
            query = f"SELECT device, name, value FROM tags WHERE device IN ({ids}) ORDER BY name"
            for id_, name, value in transaction.execute(query, values):
                tags[id_][name] = value
            rows = transaction.execute(
                f"SELECT {_COLUMNS}, {_HEARD}, (SELECT document {_NEWEST}), (SELECT received {_NEWEST}), {_REGIME} "
                f"FROM devices d WHERE {condition} ORDER BY name LIMIT {_AT_ONCE}",
                values,
            )
        return [_device(row, tags.get(row[0], {})) for row in rows]

    def tag(self, devices: Iterable[Device], tags: Mapping[str, str], removed: Sequence[str], who: str) -> None:
        """Put `tags` on each device, and take the `removed` names off; record it as done by `who`."""
        ids = sorted(device.id for device in devices)

        def write(transaction: Transaction) -> None:
            rows = [(id_, name, value) for id_ in ids for name, value in tags.items()]
            transaction.upsert("tags", ("device", "name"), ("device", "name", "value"), rows)
            gone = [(id_, name) for id_ in ids for name in removed]
            transaction.execute_many("DELETE FROM tags WHERE device = ? AND name = ?", gone)
            document = json.dumps({"devices": ids, "tags": dict(tags), "removed": list(removed)})
            audit(transaction, who, "tag", "", "", document)

        write_with_retries(self._store, write)

    def unseen(self, before: float, most: int = _AT_ONCE) -> list[Device]:
        """Return devices that nobody has heard since `before`, in Unix s: at most so many, of all fleets."""
        query = (
            "SELECT id FROM devices d WHERE first_seen < ? AND last_seen < ? AND NOT EXISTS "
            f"(SELECT 1 FROM progress p WHERE p.device = d.id AND p.heard >= ?) ORDER BY id LIMIT {most}"
        )
        with self._store.transaction("read") as transaction:
            ids = [int(id_) for (id_,) in transaction.execute(query, (before,) * 3)]
        return self.by_ids(ids)

    def forget(self, devices: Iterable[Device], who: str) -> None:
        """Remove devices with all that they have reported; record it as done by `who`.

        One that reports again is a new device. Its part in rollouts goes too; their records in the audit stay.
        """
        ids = sorted(device.id for device in devices)
        for start in range(0, len(ids), _AT_ONCE):
            part = ids[start : start + _AT_ONCE]

            def write(transaction: Transaction, part: Sequence[int] = part) -> None:
                rows = [(id_,) for id_ in part]
                transaction.lookup("devices", ("id",), ("id",), rows, lock=True)
                for table in (*_TABLES, "rollout_targets", "rollout_commands"):
                    transaction.execute_many(f"DELETE FROM {table} WHERE device = ?", rows)
                transaction.execute_many("DELETE FROM devices WHERE id = ?", rows)
                audit(transaction, who, "forget", "", FORGOTTEN, json.dumps({"devices": list(part)}))

            write_with_retries(self._store, write)


def is_late_will(status: Status, session: str | None, state_ts: float | None) -> bool:
    """Return True for the will of an old connection that a newer connection has followed already.

    session, state_ts: of the newest status before this one; None without one.
    """
    return (
        status.state == "offline"
        and session is not None
        and printable(status.session) != session
        and state_ts is not None
        and status.ts <= state_ts
    )


def newer_schemas(transaction: Transaction, ids: Iterable[int]) -> dict[int, int]:
    """Return the schema of each of these devices that speaks one unknown to this tared."""
    rows = transaction.lookup("devices", ("id",), ("birth",), [(each,) for each in ids])
    schemas = {int(key[0]): _schema(json.loads(row[0])) for key, row in rows.items() if row[0]}
    return {each: schema for each, schema in schemas.items() if schema > SCHEMA_VERSION}


def _schema(birth: Mapping[str, Any]) -> int:
    return int(birth.get("schema_version", SCHEMA_VERSION))


def _lookup_ids(transaction: Transaction, names: Set[Name]) -> dict[Name, int]:
    rows = transaction.lookup("devices", ("fleet", "name"), ("id",), names)
    return {(fleet, name): int(row[0]) for (fleet, name), row in rows.items()}


def _update(transaction: Transaction, columns: Sequence[str], rows: Sequence[Row]) -> None:
    names = ", ".join(f"{name} = ?" for name in columns[1:])
    transaction.execute_many(f"UPDATE devices SET {names} WHERE id = ?", [(*row[1:], row[0]) for row in sorted(rows)])


def _device(row: Row, tags: Mapping[str, str]) -> Device:
    id_, fleet, name, last_seen, *columns, birth, heard, newest, newest_at, regime = row
    seen = max(last_seen, heard or 0.0)
    known, telemetry, kept = (json.loads(each) if each else {} for each in (birth, newest, regime))
    return Device(id_, fleet, name, seen, *[*columns, known, telemetry, newest_at, tags, kept])
