"""The devices of a fleet as the store knows them: what each last said of itself, and how its owner groups them."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from agent.contract.messages import SCHEMA_VERSION, Birth, Status
from fleet.devices.identities import Identities, Name
from fleet.devices.records import audit
from fleet.store import FleetStore, Row, Transaction, written
from fleet.untrusted import printable

_STATE = ("id", "state", "session", "boot_id", "state_ts")
_BIRTH = ("id", "agent_version", "model", "engine", "calibration", "birth")
_COLUMNS = "id, fleet, name, first_seen, last_seen, state, agent_version, model, engine, calibration, birth"
# By its numbers, not its clock; a device has few events beside its telemetry.
_NEWEST = "FROM reports r WHERE r.device = d.id AND r.kind = 'telemetry' ORDER BY epoch DESC, seq DESC LIMIT 1"
_AT_ONCE = 500
_HEARD = "(SELECT max(heard) FROM progress p WHERE p.device = d.id)"


@dataclass(frozen=True)
class Device:
    """One of them. first_seen, last_seen: Unix time in s, by the collector's clock; last_seen is 0 where it was never
    heard, and is known by what the broker had kept of it. state: as of its newest status, None where it never told one.
    birth, telemetry: its newest documents, empty without one; telemetry_at: when the latter came. tags: names to
    values, "" for a name alone. events: the newest of each kind, by kind."""

    id: int
    fleet: str
    name: str
    first_seen: float
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
    events: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def schema(self) -> int | None:
        """The version of the contract that it speaks, by its birth; None without one."""
        return _schema(self.birth) if self.birth else None

    @property
    def is_newer(self) -> bool:
        """Whether nothing that it tells can be read here, but that it is there."""
        return self.schema is not None and self.schema > SCHEMA_VERSION


class Devices:
    """Those in a store. Each method raises AgentError as the store does; times are Unix time in s."""

    def __init__(self, store: FleetStore) -> None:
        self._store = store
        self._identities = Identities(store)

    def told_status(self, transaction: Transaction, told: Mapping[Name, Status], now: float) -> None:
        """What they say of being there. The late will of a connection that another one has followed is none."""
        ids = self._identities.of(transaction, told.keys(), now)
        known = transaction.lookup("devices", ("id",), ("session", "state_ts"), [(each,) for each in ids.values()])
        rows = [
            (ids[name], status.state, printable(status.session), printable(status.boot_id), status.ts)
            for name, status in told.items()
            if not is_late_will(status, *known[(ids[name],)])
        ]
        _update(transaction, _STATE, rows)

    def told_birth(self, transaction: Transaction, told: Mapping[Name, tuple[Birth | None, str]], now: float) -> None:
        """What they are and run: the document, and as it came; None and `{"schema_version": 2}` of one that nobody here
        can read."""
        ids = self._identities.of(transaction, told.keys(), now)
        rows = [(ids[name], *_runs(birth), document) for name, (birth, document) in told.items()]
        _update(transaction, _BIRTH, rows)

    def heard(self, transaction: Transaction, names: Set[Name], now: float) -> None:
        """These have said something just now, and not to a broker that kept it until now."""
        ids = self._identities.of(transaction, names, now)
        _update(transaction, ("id", "last_seen"), [(each, now) for each in ids.values()])

    def all(self, fleet: str) -> list[Device]:
        """Those of a fleet, by their names."""
        return self._those("fleet = ?", (fleet,))

    def some(self, ids: Sequence[int]) -> list[Device]:
        """Those of these ids, by their names."""
        parts = [ids[start : start + _AT_ONCE] for start in range(0, len(ids), _AT_ONCE)]
        return [each for part in parts for each in self._those(f"id IN ({', '.join('?' * len(part))})", part)]

    def _those(self, condition: str, values: Sequence[object]) -> list[Device]:
        with self._store.begun("read") as transaction:
            tags: dict[int, dict[str, str]] = defaultdict(dict)
            ids = f"SELECT id FROM devices WHERE {condition}"
            for id_, name, value in transaction.execute(
                f"SELECT device, name, value FROM tags WHERE device IN ({ids}) ORDER BY name", values
            ):
                tags[id_][name] = value
            events: dict[int, dict[str, Any]] = defaultdict(dict)
            for id_, kind, document in transaction.execute(
                f"SELECT device, kind, document FROM newest_events WHERE device IN ({ids})", values
            ):
                events[id_][kind] = json.loads(document)
            found = transaction.execute(
                f"SELECT {_COLUMNS}, {_HEARD}, (SELECT document {_NEWEST}), (SELECT received {_NEWEST}) "
                f"FROM devices d WHERE {condition} ORDER BY name",
                values,
            )
        return [_device(row, tags.get(row[0], {}), events.get(row[0], {})) for row in found]

    def tag(self, devices: Iterable[Device], tags: Mapping[str, str], removed: Sequence[str], who: str) -> None:
        """Put these on each of the devices, and take those off; on record as done by `who`."""
        ids = sorted(device.id for device in devices)

        def write(transaction: Transaction) -> None:
            rows = [(id_, name, value) for id_ in ids for name, value in tags.items()]
            transaction.upsert("tags", ("device", "name"), ("device", "name", "value"), rows)
            gone = [(id_, name) for id_ in ids for name in removed]
            transaction.execute_many("DELETE FROM tags WHERE device = ? AND name = ?", gone)
            document = json.dumps({"devices": ids, "tags": dict(tags), "removed": list(removed)})
            audit(transaction, who, "tag", "", "", document)

        written(self._store, write)

    def hold(self, transaction: Transaction, ids: Iterable[int]) -> None:
        """Nobody else changes these until the end. Who changes several holds them all at once, in one order, and two
        never wait for each other in a circle."""
        transaction.lookup("devices", ("id",), ("id",), [(each,) for each in ids], lock=True)


def is_late_will(status: Status, session: str | None, state_ts: float | None) -> bool:
    """Whether it is of a connection that another one has followed. session, state_ts: of the newest status before it,
    None where there was none."""
    return (
        status.state == "offline"
        and session is not None
        and printable(status.session) != session
        and state_ts is not None
        and status.ts <= state_ts
    )


def newer(transaction: Transaction, ids: Iterable[int]) -> dict[int, int]:
    """Which of these speak a schema that this tared does not know, and which one."""
    found = transaction.lookup("devices", ("id",), ("birth",), [(each,) for each in ids])
    schemas = {int(key[0]): _schema(json.loads(row[0])) for key, row in found.items() if row[0]}
    return {each: schema for each, schema in schemas.items() if schema > SCHEMA_VERSION}


def _schema(birth: Mapping[str, Any]) -> int:
    """Also of one that an older tared has stored without looking."""
    told = birth.get("schema_version", SCHEMA_VERSION)
    return told if isinstance(told, int) else SCHEMA_VERSION


def _runs(birth: Birth | None) -> list[str | None]:
    if birth is None:
        return [None] * len(_BIRTH[1:-1])
    told = (birth.agent_version, birth.model, birth.engine, birth.calibration)
    return [None if each is None else printable(each) for each in told]


def _update(transaction: Transaction, columns: Sequence[str], rows: Sequence[Row]) -> None:
    """Of devices that are there."""
    names = ", ".join(f"{name} = ?" for name in columns[1:])
    transaction.execute_many(f"UPDATE devices SET {names} WHERE id = ?", [(*row[1:], row[0]) for row in sorted(rows)])


def _device(row: Row, tags: Mapping[str, str], events: Mapping[str, Any]) -> Device:
    id_, fleet, name, first_seen, last_seen, *told, birth, heard, newest, newest_at = row
    seen = max(last_seen, heard or 0.0)
    documents = [json.loads(each) if each else {} for each in (birth, newest)]
    return Device(id_, fleet, name, first_seen, seen, *[*told, *documents, newest_at, tags, events])
