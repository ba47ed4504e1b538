"""Write an artefact once, verify it before use, and keep a daemon's artefacts: `current` and `previous`.

An artefact is a directory with `manifest.json` and the files it names by SHA-256. The manifest is sealed, and with a
key signed (engines/store/signing.py), so that a changed byte in any file is found before a runtime sees it. An engine
is code: what is loaded are the bytes that `Artefact.read_file` has verified, not what lies under their name later.
A `Store` holds each artefact under its id, and makes one current by one atomic rename.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines.errors import EngineError
from engines.store.files import open_regular, remove, staging, sweep, sync_folder
from engines.store.signing import (
    MANIFEST,
    SCHEMA,
    canonical,
    check_files,
    damaged,
    read_manifest,
    seal,
    sha256,
)


@dataclass(frozen=True)
class Artefact:
    """Hold a verified artefact.

    Args:
        path: Its directory.
        id: 16 hex digits: its `fingerprint`.
        manifest: In JSON's types; `files` names each file's SHA-256.
    """

    path: Path
    id: str
    manifest: Mapping[str, Any]

    @property
    def engine_path(self) -> Path:
        """The engine file, which the manifest names under `engine`.

        Raises EngineError (`artefact.damaged`) where it names none.
        """
        if self.manifest.get("engine") is None:
            raise damaged(self.path / MANIFEST)
        return self.path / str(self.manifest["engine"])

    def read_engine(self) -> bytes:
        """Return the engine's bytes.

        Raises EngineError (`artefact.damaged`) where there is no engine, or where it was changed since the artefact was
        read.
        """
        return self.read_file(self.engine_path.name)

    def read_file(self, name: str) -> bytes:
        """Return a file of the artefact, byte for byte what the verified manifest names by hash.

        Raises EngineError (`artefact.damaged`) when it was changed or replaced since the artefact was read.
        """
        file = self.path / name
        try:
            with open_regular(file, os.O_NOFOLLOW) as opened:
                content = opened.read()
        except OSError as error:
            raise damaged(file) from error
        if hashlib.sha256(content).hexdigest() != self.manifest["files"].get(name):
            raise damaged(file)
        return content


def fingerprint(inputs: Mapping[str, Any]) -> str:
    """Return the artefact id: 16 hex digits over all inputs. Builds are not byte-deterministic, inputs are.

    >>> fingerprint({"model": "a", "precision": "int8"}) == fingerprint({"precision": "int8", "model": "a"})
    True
    """
    return hashlib.sha256(canonical(inputs)).hexdigest()[:16]


def write_artefact(
    destination: Path,
    inputs: Mapping[str, Any],
    fill: Callable[[Path], Mapping[str, Any]],
    key: bytes | None = None,
    replacing: bool = False,
) -> Artefact:
    """Write an artefact directory, all or nothing.

    The directory appears under its name only when it is complete and on disk.

    Args:
        inputs: Everything that the engine follows from, in JSON's types; the id is their fingerprint.
        fill: Writes the files into the directory that it is given, and returns further entries of the manifest.
        key: Signs the manifest; None: no signature.
        replacing: True: an existing directory gives way as soon as the new one is complete. False: there must be none.

    Raises EngineError (`artefact.write`) when the disk refuses, and whatever `fill` raises.
    """
    destination = Path(os.path.abspath(destination))
    identity = fingerprint(inputs)
    with staging(destination, replacing) as folder:
        facts = fill(folder)
        files = {path.name: sha256(path) for path in sorted(folder.iterdir())}
        manifest = {**facts, "schema": SCHEMA, "id": identity, "inputs": dict(inputs), "files": files}
        (folder / MANIFEST).write_bytes(seal(manifest, key))
    return Artefact(destination, identity, manifest)


def find_artefact(destination: Path, inputs: Mapping[str, Any], key: bytes | None = None) -> Artefact | None:
    """Return the whole artefact of these inputs at `destination`; None if nothing is there.

    Args:
        inputs: Everything that the engine follows from, in JSON's types.
        key: Only an artefact that it has signed is found; None: any.

    Raises EngineError (`artefact.exists`) when something else is there.
    """
    if not os.path.lexists(destination):
        return None
    with suppress(EngineError):
        artefact = read_artefact(destination, key)
        if artefact.id == fingerprint(inputs):
            return artefact
    raise EngineError(
        "artefact.exists",
        f"{destination} is there already and holds something else",
        "a new name: artefacts are immutable",
        "choose another -o, or remove it first",
    )


def read_artefact(path: Path, key: bytes | None = None) -> Artefact:
    """Verify every byte of an artefact; with a key, also who made it.

    Args:
        path: Its directory, or a link to it.
        key: Only an artefact that it has signed is read; None: any.

    Raises EngineError:
        artefact.missing     there is no manifest
        artefact.unreadable  the disk, or its permissions, fail
        artefact.schema      it is of a newer tared
        artefact.signature   it is not signed with this key
        artefact.damaged     it is not what was written; the message names the file
    """
    resolved = Path(os.path.realpath(path))
    manifest = read_manifest(resolved, key)
    check_files(resolved, manifest["files"])
    return Artefact(resolved, manifest["id"], manifest)


def check_runtime(artefact: Artefact, description: Mapping[str, str]) -> None:
    """Check, before an artefact is loaded, that it was built for this runtime.

    Args:
        description: `Backend.describe` of the runtime that shall load it.

    Raises EngineError:
        artefact.verification  it was built only to prove that the builder takes the model
        artefact.runtime       it was built for another runtime; the message names the first field that differs
    """
    if artefact.manifest.get("verification_only"):
        raise EngineError(
            "artefact.verification",
            f"{artefact.path}, built without the GPU it is for",
            "an engine built on the board that serves it",
            "build it on the board with 'tared build'",
        )
    built_for = artefact.manifest["inputs"].get("backend", {})
    if artefact.manifest.get("portable"):  # a graph: any release on any machine compiles it when it is loaded
        built_for, description = ({"runtime": str(facts.get("runtime"))} for facts in (built_for, description))
    for field in (*description, *(field for field in built_for if field not in description)):
        if built_for.get(field) != description.get(field):
            raise EngineError(
                "artefact.runtime",
                f"{artefact.path} was built for {field} {built_for.get(field, 'unknown')}",
                f"{field} {description.get(field, 'unknown')}, as this machine has it",
                "wait until the daemon builds it again from its calibration; elsewhere, use 'tared build'",
            )


LINKS = ("current", "previous")
_ID = re.compile(r"[0-9a-f]{16}")


class Store:
    """Keep the artefacts of one daemon, each in `artefacts/<id>`, with symlinks to two of them: `link` is in LINKS.

    With a key, artefacts that it has not signed are refused. That does not stop whoever can write the store from
    turning `current` back to an older artefact that it has signed.
    """

    def __init__(self, root: Path, key: bytes | None = None) -> None:
        """Open or create the store, and remove what killed processes left unfinished.

        Args:
            root: The store's folder; one that is there may be read-only.
            key: Only artefacts that it has signed are read; None: any.

        Raises EngineError (`store.write`) where the store cannot be created.
        """
        self.root = root
        self.key = key
        self._artefacts = root / "artefacts"
        with self._writing():
            self._artefacts.mkdir(parents=True, exist_ok=True)
        sweep(self._artefacts)

    def place(self, inputs: Mapping[str, Any]) -> Path:
        """Return where the artefact of these inputs belongs. One there that cannot serve is removed, to be built again.

        Raises EngineError (`store.write`) when the disk refuses.
        """
        path = self._artefacts / fingerprint(inputs)
        if os.path.lexists(path):
            try:
                self._read(path)
            except EngineError:
                self.discard(path)
        return path

    def discard(self, path: Path) -> None:
        """Remove what lies where an artefact belongs: it can be built again.

        Raises EngineError (`store.write`) when the disk refuses.
        """
        with self._writing():
            remove(path)

    def places(self) -> list[Path]:
        """Return what lies where artefacts belong, whole or not, and nothing else; sorted by id.

        Raises EngineError (`artefact.unreadable`) when the disk, or its permissions, fail.
        """
        with self.reading():
            return sorted(path for path in self._artefacts.iterdir() if _ID.fullmatch(path.name))

    def target(self, link: str) -> str:
        """Return the id that a link leads to, whatever is there; empty if it leads out of the store.

        Raises EngineError (`artefact.unreadable`) where that cannot be seen: what it leads to may be needed.
        """
        path = self.root / link
        with self.reading():
            target = Path(os.path.realpath(path))
            inside = path.is_symlink() and target.parent == Path(os.path.realpath(self._artefacts))
        return target.name if inside else ""

    def read(self, link: str) -> Artefact | None:
        """Return the verified artefact behind a link; None when there is none.

        Raises EngineError as `read_artefact` does, and:
            artefact.place  it is not in the directory of its id in this store
            store.link      something that is no link has the link's name
        """
        path = self.root / link
        with self.reading():
            is_link = path.is_symlink()
        if is_link:
            return self._read(path)
        if os.path.lexists(path) and not path.is_symlink():  # a link may have been made since the first look
            found = f"a {'folder' if path.is_dir() else 'file'} at {path}"
            raise EngineError("store.link", found, f"a link to an artefact in {self._artefacts}", "remove it")
        return None

    def salvage(self, link: str) -> Artefact | None:
        """Return the artefact behind a link if its manifest is whole, though a file of it may not be; None otherwise.

        `Artefact.read_file` still returns what was written, or raises. Raises EngineError (`artefact.unreadable`) where
        the link cannot be read.
        """
        path = self._artefacts / self.target(link)
        try:
            manifest = read_manifest(path, self.key)
        except EngineError:  # `read` has raised it
            return None
        return Artefact(path, manifest["id"], manifest) if manifest["id"] == path.name else None

    def find(self, identity: str) -> Artefact:
        """Return the verified artefact of an id.

        Args:
            identity: 16 hex digits.

        Raises EngineError as `read_artefact` does: `artefact.missing` if there is none.
        """
        return self._read(self._artefacts / identity)

    def _read(self, path: Path) -> Artefact:
        artefact = read_artefact(path, self.key)
        proper = Path(os.path.realpath(self._artefacts), artefact.id)
        if artefact.path != proper:
            found = f"artefact {artefact.id} in {artefact.path}"
            raise EngineError("artefact.place", found, f"it in {proper}", "build it again, or roll back")
        return artefact

    def promote(self, artefact: Artefact) -> None:
        """Make an artefact current; the one that was current becomes previous, unless it is one no longer.

        Raises EngineError (`store.write`) when the disk refuses.
        """
        current = self.root / "current"
        target = self._relative_path(artefact)
        with self._writing():
            if current.is_symlink():
                if os.readlink(current) == target:
                    return
                with suppress(EngineError):  # one that is damaged does not become previous
                    if self.read("current") is not None:
                        self._link("previous", os.readlink(current))
            self._link("current", target)

    def replace(self, link: str, artefact: Artefact) -> None:
        """Let a link lead to another artefact: the same engine, built again.

        Raises EngineError (`store.write`) when the disk refuses.
        """
        with self._writing():
            self._link(link, self._relative_path(artefact))

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Raise EngineError (`artefact.unreadable`) where the disk, or its permissions, fail the block."""
        try:
            yield
        except OSError as error:
            found, remedy = f"{error.filename or self.root}: {error.strerror}", "check the disk and its permissions"
            raise EngineError("artefact.unreadable", found, "a store that can be read", remedy) from error

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            found = f"{self.root}: {error.strerror}"
            raise EngineError("store.write", found, "a writable store", "check the disk and its permissions") from error

    def _relative_path(self, artefact: Artefact) -> str:
        """Return the path from the store's real place: under DynamicUser /var/lib/tared is a link (systemd.exec(5))."""
        return os.path.relpath(artefact.path, os.path.realpath(self.root))

    def _link(self, name: str, target: str) -> None:
        temporary = self.root / f".{name}.new"
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(target)
        os.replace(temporary, self.root / name)
        sync_folder(self.root)
