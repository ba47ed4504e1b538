"""Keeping the store small: what nobody needs is removed, and an engine is not begun that would fill the disk."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from engines.artefact import read_artefact
from engines.backend import EngineError
from engines.retention import Retention, Stored, retain
from engines.seal import MANIFEST, read_manifest
from engines.store import LINKS, Store

Pins = Mapping[str, Collection[str]]


@dataclass(frozen=True)
class Freed:
    """What was removed, or would be: artefacts by id, files and folders of the cache by their path in the state."""

    artefacts: tuple[str, ...] = ()
    cached: tuple[str, ...] = ()
    nbytes: int = 0


class Upkeep:
    """Removes from a store, and from the caches beside it, what `retain` lets go.

    keep: so many of the newest artefacts stay without being needed, and so many cached references and timing caches,
    of which one is in use: it stays in any case.
    reserve_bytes: what an engine must leave free on the disk. Not to be used while another process builds into the
    store; what is loaded must be among the pins.
    """

    def __init__(self, store: Store, keep: int, reserve_bytes: int) -> None:
        self._store = store
        self._keep = keep
        self._reserve_bytes = reserve_bytes

    def survey(self, pins: Pins) -> tuple[list[Stored], Retention]:
        """What lies in the store, and what becomes of it. Of the bytes only the manifests are verified.

        pins: as for `retain`; `current` and `previous` need not be among them. Raises EngineError
        (`artefact.unreadable`).
        """
        links = {link: (self._store.target(link),) for link in LINKS}
        with self._store.reading():
            found = [self._stored(path) for path in self._store.places()]
        stored = [one for one in found if one is not None]
        return stored, retain(stored, {**links, **pins}, self._keep)

    def cached(self) -> list[Path]:
        """Reference engines and timing caches, the newest of each kind first.

        Raises EngineError (`artefact.unreadable`).
        """
        cache = self._store.root / "cache"
        with self._store.reading():
            built = (cache / "references").is_dir()
            references = Store(cache / "references", self._store.key).places() if built else []
            return [*_newest_first(references), *_newest_first(cache.glob("*.timings"))]

    def tidy(self, pins: Pins, dry_run: bool = False) -> Freed:
        """Remove what nobody needs. dry_run: only tell.

        Raises EngineError (`artefact.unreadable`, `store.write`) when the disk refuses.
        """
        _, retention = self.survey(pins)
        stale = self._stale_cache()
        freed = sum(one.nbytes for one in retention.goes) + sum(size(path) for path in stale)
        if not dry_run:
            for one in retention.goes:
                self._remove(one)
            for path in stale:
                self._store.discard(path)
        names = tuple(str(path.relative_to(self._store.root)) for path in stale)
        return Freed(tuple(one.id for one in retention.goes), names, freed)

    def ensure_room(self, expected_bytes: int, pins: Pins) -> Freed:
        """Make room for so many bytes beside the reserve: what nobody needs goes first, then what is only recent.

        What is only recent stays where its room would not be enough either.
        Raises EngineError: `store.room`, `store.write`, `artefact.unreadable`.
        """
        freed, needed = self.tidy(pins), expected_bytes + self._reserve_bytes
        _, retention = self.survey(pins)
        short = needed - self.free_bytes()
        if short > sum(one.nbytes for one in retention.spare):
            raise EngineError(
                "store.room",
                f"{_mb(self.free_bytes())} free on the disk of {self._store.root}",
                f"{_mb(needed)}: {_mb(expected_bytes)} for the engine, {_mb(self._reserve_bytes)} as reserve",
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
        """Read every byte of every artefact and cached reference; their number, and what is wrong with which.

        Where `current` or `previous` lead to something, but to no place of the store, that is wrong too. Timing caches
        are verified when they are read, and a damaged one is as good as none.
        """
        errors: list[EngineError] = []
        places = self._store.places()
        for link in LINKS:
            if self._store.target(link) not in [path.name for path in places]:  # else it is among those
                _collect(errors, partial(self._store.read, link))
        for path in places:
            wrong: list[EngineError] = []
            _collect(wrong, partial(self._store.find, path.name))
            errors += wrong if os.path.lexists(path) else ()  # a daemon beside this may have removed it meanwhile
        references = [path for path in self.cached() if path.is_dir()]
        for path in references:
            _collect(errors, partial(read_artefact, path, self._store.key))
        return len(places) + len(references), errors

    def largest_bytes(self) -> int:
        """Of the largest artefact here: the next one will hardly be larger. 0 where there is none."""
        return max((size(path) for path in self._store.places()), default=0)

    def _stale_cache(self) -> list[Path]:
        """All but the newest few of each kind: what else is there was made for another model, release or board."""
        references = [path for path in self.cached() if path.suffix != ".timings"]
        timings = [path for path in self.cached() if path.suffix == ".timings"]
        keep = max(1, self._keep)
        return [*references[keep:], *timings[keep:]]

    def _stored(self, path: Path) -> Stored | None:
        """None for one that a daemon beside this has removed meanwhile."""
        try:
            made_s, nbytes = path.lstat().st_mtime, size(path)
            manifest = read_manifest(path, self._store.key)
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
        """On the disk of the store, for who owns it. Raises EngineError (`artefact.unreadable`)."""
        with self._store.reading():
            return shutil.disk_usage(self._store.root).free

    def _remove(self, one: Stored) -> None:
        self._store.discard(self._store.root / "artefacts" / one.id)


def _collect(errors: list[EngineError], read: Callable[[], object]) -> None:
    try:
        read()
    except EngineError as error:
        errors.append(error)


def size(path: Path) -> int:
    """Bytes of a file, or of all files in a folder; a link counts as itself, and what cannot be seen not at all."""
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
