"""Decide which artefacts of a store stay, and remove the others.

`retain` decides from what is known of the artefacts, without a disk. Pinned artefacts stay: those that some part of the
daemon needs (`current`, `previous`, the loaded ones, the regimes). With them stays the float reference of their models,
which serves when nothing else can, and which a full disk would not allow to be built again. Beside them the newest few
stay as long as there is room. StoreCleaner carries the decision out. `record_refusal` keeps why a candidate was
refused.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from engines.errors import EngineError
from engines.store.artefact import LINKS, Store, read_artefact
from engines.store.files import replace_files
from engines.store.signing import MANIFEST, read_manifest

REFERENCE = "reference"
RECENT = "recent"
UNKNOWN = "unknown"
SCHEMA = 1  # version of a refusal's file
_MOST_REFUSALS = 20
Pins = Mapping[str, Collection[str]]  # by role, the ids of the artefacts that are needed


@dataclass(frozen=True)
class Stored:
    """Describe an artefact as it lies in the store.

    Args:
        id: The name of its directory.
        made_s: Unix time in seconds.
        nbytes: Size of all its files.
        trouble: Code of the error that reading it raised; empty for a sound one.
        model: SHA-256 of its master graph; empty if that cannot be read.
        reference: True for a float engine without a calibration.
    """

    id: str
    made_s: float
    nbytes: int
    trouble: str = ""
    model: str = ""
    reference: bool = False

    @property
    def unknown(self) -> bool:
        """True if it cannot be judged, so that it must not be removed: of a newer tared, or unreadable today."""
        return self.trouble in ("artefact.schema", "artefact.unreadable")

    @property
    def damaged(self) -> bool:
        """True if it can no longer serve."""
        return bool(self.trouble) and not self.unknown


@dataclass(frozen=True)
class Retention:
    """State which artefacts of a store stay and which go.

    Args:
        roles: The reasons, `recent` last, for each artefact that stays, by its id.
        goes: Artefacts that are not needed, damaged ones first, then the oldest first.
        spare: Artefacts that stay only because they are recent, the oldest first.
    """

    roles: Mapping[str, tuple[str, ...]]
    goes: tuple[Stored, ...]
    spare: tuple[Stored, ...]


def retain(stored: Collection[Stored], pins: Pins, keep: int) -> Retention:
    """Decide which artefacts stay.

    An artefact that cannot be judged stays as `unknown`. A damaged one stays only if it is pinned: an engine can be
    built again from the rest of it.

    Args:
        stored: All artefacts of the store.
        pins: The ids of the artefacts that are needed, by the role that needs them.
        keep: How many of the newest that can serve stay without a pin.

    >>> old, new = Stored("a" * 16, made_s=1.0, nbytes=10), Stored("b" * 16, made_s=2.0, nbytes=10)
    >>> decided = retain([old, new], pins={"current": [old.id]}, keep=0)
    >>> [one.id[0] for one in decided.goes], decided.roles[old.id]
    (['b'], ('current',))
    """
    roles: dict[str, tuple[str, ...]] = {}
    for artefact in stored:
        why = [role for role, ids in pins.items() if artefact.id in ids]
        if why or artefact.unknown:
            roles[artefact.id] = (*why, UNKNOWN) if artefact.unknown else tuple(why)
    newest = sorted((one for one in stored if not one.trouble), key=_age, reverse=True)
    needed = {one.model for one in stored if one.model and any(one.id in ids for ids in pins.values())}
    for identity in _references(newest, needed):
        roles[identity] = (*roles.get(identity, ()), REFERENCE)
    spare = [one for one in newest[:keep] if one.id not in roles]
    for artefact in newest[:keep]:
        roles[artefact.id] = (*roles.get(artefact.id, ()), RECENT)
    goes = sorted((one for one in stored if one.id not in roles), key=lambda one: (not one.damaged, *_age(one)))
    return Retention(roles, tuple(goes), tuple(reversed(spare)))


def _references(newest: Sequence[Stored], needed: Collection[str]) -> list[str]:
    """Return the newest float reference of each of these models; if none is needed, the newest of all."""
    references: dict[str, str] = {}
    for one in newest:
        if one.reference and (one.model in needed or not needed):
            references.setdefault(one.model, one.id)
    return list(references.values())[: len(needed) or 1]


def _age(artefact: Stored) -> tuple[float, str]:
    """Sorts the oldest first; the id decides between two of one moment."""
    return artefact.made_s, artefact.id


@dataclass(frozen=True)
class Freed:
    """Report what was removed.

    Args:
        artefacts: Ids of artefacts.
        cached: Files and folders of the cache, by their path in the state directory.
        nbytes: Size of all of them.
    """

    artefacts: tuple[str, ...] = ()
    cached: tuple[str, ...] = ()
    nbytes: int = 0


@dataclass(frozen=True)
class StoreCleaner:
    """Remove from a store, and from the caches beside it, what `retain` lets go.

    Do not use it while another process builds into the store. Loaded artefacts must be among the pins.

    Args:
        store: The daemon's; its caches lie beside it.
        keep: How many of the newest artefacts stay without being needed. As many cached references, timing caches,
            files of layer costs and compiled networks stay; of these at least one, since one is in use.
        reserve_bytes: Free space that an engine must leave on the disk.
    """

    store: Store
    keep: int
    reserve_bytes: int

    def survey(self, pins: Pins) -> tuple[list[Stored], Retention]:
        """Return what lies in the store, and what stays of it. Only the manifests are verified.

        Args:
            pins: As for `retain`; `current` and `previous` need not be among them.

        Raises EngineError (`artefact.unreadable`) when the disk, or its permissions, fail.
        """
        links = {link: (self.store.target(link),) for link in LINKS}
        with self.store.reading():
            artefacts = [self._stored(path) for path in self.store.places()]
        stored = [one for one in artefacts if one is not None]
        return stored, retain(stored, {**links, **pins}, self.keep)

    def cached(self) -> list[Path]:
        """Return reference engines, timing caches, files of layer costs and compiled networks, by kind, newest first.

        Raises EngineError (`artefact.unreadable`) when the disk, or its permissions, fail.
        """
        return [path for kind in self._cached_by_kind() for path in kind]

    def _cached_by_kind(self) -> list[list[Path]]:
        cache = self.store.root / "cache"
        with self.store.reading():
            built = (cache / "references").is_dir()
            references = Store(cache / "references", self.store.key).places() if built else []
            files = (cache.glob(f"*.{kind}") for kind in ("timings", "costs", "openvino"))
            return [_newest_first(paths) for paths in (references, *files)]

    def tidy(self, pins: Pins, dry_run: bool = False) -> Freed:
        """Remove artefacts and cached files that are not needed.

        Args:
            pins: As for `survey`.
            dry_run: True to report only.

        Raises EngineError (`artefact.unreadable`, `store.write`) when the disk refuses.
        """
        _, retention = self.survey(pins)
        # The newest few of each kind stay; the others were made for another model, release or board.
        stale = [path for kind in self._cached_by_kind() for path in kind[max(1, self.keep) :]]
        freed = sum(one.nbytes for one in retention.goes) + sum(size(path) for path in stale)
        if not dry_run:
            for one in retention.goes:
                self._remove(one)
            for path in stale:
                self.store.discard(path)
        names = tuple(str(path.relative_to(self.store.root)) for path in stale)
        return Freed(tuple(one.id for one in retention.goes), names, freed)

    def ensure_room(self, expected_bytes: int, pins: Pins) -> Freed:
        """Make room on the disk: unneeded artefacts go first, then those that are only recent.

        The recent ones stay if their room would not be enough either.

        Args:
            expected_bytes: Size of the next engine; the reserve is added to it.
            pins: As for `survey`.

        Raises EngineError:
            store.room           there is not enough room, whatever goes
            store.write          the disk refuses to remove
            artefact.unreadable  the disk, or its permissions, fail
        """
        freed, needed = self.tidy(pins), expected_bytes + self.reserve_bytes
        _, retention = self.survey(pins)
        short = needed - self.free_bytes()
        if short > sum(one.nbytes for one in retention.spare):
            raise EngineError(
                "store.room",
                f"{_mb(self.free_bytes())} free on the disk of {self.store.root}",
                f"{_mb(needed)}: {_mb(expected_bytes)} for the engine, {_mb(self.reserve_bytes)} as reserve",
                "free some space, or lower store.reserve_bytes; the engine in service serves on",
            )
        removed = list(freed.artefacts)
        for one in retention.spare:
            if self.free_bytes() >= needed:
                break
            self._remove(one)
            removed.append(one.id)
            freed = Freed(tuple(removed), freed.cached, freed.nbytes + one.nbytes)
        return freed

    def verify(self) -> tuple[int, list[EngineError]]:
        """Read every byte of every artefact and cached reference; return their number and the errors.

        It is an error too if `current` or `previous` lead out of the store. Timing caches, layer costs and compiled
        networks are verified when they are read, and a damaged file counts as none.

        Raises EngineError (`artefact.unreadable`) where the store cannot be listed.
        """
        errors: list[EngineError] = []
        places = self.store.places()
        for link in LINKS:
            if self.store.target(link) not in [path.name for path in places]:  # else it is among those
                _collect(errors, partial(self.store.read, link))
        for path in places:
            wrong: list[EngineError] = []
            _collect(wrong, partial(self.store.find, path.name))
            errors += wrong if os.path.lexists(path) else ()  # a daemon beside this may have removed it meanwhile
        references = [path for path in self.cached() if path.is_dir()]
        for path in references:
            _collect(errors, partial(read_artefact, path, self.store.key))
        return len(places) + len(references), errors

    def largest_bytes(self) -> int:
        """Return the size of the largest artefact, 0 without any: the next one will hardly be larger."""
        return max((size(path) for path in self.store.places()), default=0)

    def _stored(self, path: Path) -> Stored | None:
        """Read an artefact's manifest; return None if another process has removed it meanwhile."""
        try:
            made_s, nbytes = path.lstat().st_mtime, size(path)
            manifest = read_manifest(path, self.store.key)
            names = set(os.listdir(path))
        except FileNotFoundError:
            return None
        except EngineError as error:
            return Stored(path.name, made_s, nbytes, error.code) if os.path.lexists(path) else None
        inputs, trouble = manifest["inputs"], ""
        if path.is_symlink() or manifest["id"] != path.name:
            trouble = "artefact.place"
        elif names != {MANIFEST, *manifest["files"]}:
            trouble = "artefact.damaged"
        reference = "calibration" not in inputs and inputs.get("precision") != "int8"
        return Stored(path.name, made_s, nbytes, trouble, str(inputs.get("model", "")), reference)

    def free_bytes(self) -> int:
        """Return the free space on the store's disk, for its owner.

        Raises EngineError (`artefact.unreadable`) when the disk, or its permissions, fail.
        """
        with self.store.reading():
            return shutil.disk_usage(self.store.root).free

    def _remove(self, one: Stored) -> None:
        self.store.discard(self.store.root / "artefacts" / one.id)


def _collect(errors: list[EngineError], read: Callable[[], object]) -> None:
    try:
        read()
    except EngineError as error:
        errors.append(error)


def size(path: Path) -> int:
    """Return the bytes of a file, or of all files in a folder; a link counts as itself, an unreadable file as 0."""
    files = [Path(folder, name) for folder, _, names in os.walk(path) for name in names] or [path]
    total = 0
    for file in files:
        with suppress(OSError):
            total += file.lstat().st_size
    return total


def _newest_first(paths: Iterable[Path]) -> list[Path]:
    return sorted(paths, key=lambda path: (path.lstat().st_mtime, path.name), reverse=True)


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:.0f} MB"


def record_refusal(store_root: Path, identity: str, evidence: Mapping[str, Any]) -> Path:
    """Write why a candidate was refused, and return the file; it replaces an earlier one.

    The newest 20 refusals are kept. Only one process refuses at a time: the unfinished files of a killed one are
    removed.

    Args:
        store_root: The store's folder; refusals are in its folder `refused`.
        identity: The artefact id of the candidate.
        evidence: The reasons, in JSON's types.

    Raises OSError when the disk refuses.
    """
    folder = store_root / "refused"
    folder.mkdir(parents=True, exist_ok=True)
    for unfinished in folder.glob(".*.new"):
        unfinished.unlink(missing_ok=True)
    path = folder / f"{identity}.json"
    document = {**evidence, "schema": SCHEMA, "id": identity, "ts": round(time.time(), 3)}
    replace_files({path: json.dumps(document, indent=1, sort_keys=True).encode() + b"\n"})
    newest = sorted(folder.glob("*.json"), key=lambda refusal: refusal.stat().st_mtime_ns, reverse=True)
    for old in [refusal for refusal in newest if refusal != path][_MOST_REFUSALS - 1 :]:
        old.unlink(missing_ok=True)
    return path
