"""Artefacts on disk: written once, verified before use, made current by one atomic rename.

An artefact is a directory with `manifest.json` and the files it names by SHA-256. The manifest is sealed, and with a
key signed (engines/seal.py), so that a changed byte in any file is found before a runtime sees it. An engine is code:
what is loaded are the bytes that `Artefact.read_file` has verified, not what lies under their name a moment later.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines.backend import EngineError
from engines.files import sync_folder
from engines.seal import MANIFEST, SCHEMA, canonical, check_files, damaged, open_regular, read_manifest, seal, sha256


@dataclass(frozen=True)
class Artefact:
    """A verified artefact: its directory, its id, and its manifest."""

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
        """The engine's bytes; raises as `engine_path` and `read_file`."""
        return self.read_file(self.engine_path.name)

    def read_file(self, name: str) -> bytes:
        """A file of the artefact, byte for byte what the verified manifest names by hash.

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
    """The artefact id: 16 hex digits over everything that went in. Builds are not byte-deterministic, inputs are."""
    return hashlib.sha256(canonical(inputs)).hexdigest()[:16]


def write_artefact(
    destination: Path,
    inputs: Mapping[str, Any],
    fill: Callable[[Path], Mapping[str, Any]],
    key: bytes | None = None,
) -> Artefact:
    """Write an artefact directory where none is, all or nothing; a key signs it.

    `fill` writes the files into the directory it is given and returns what else the manifest shall say. The
    directory appears under its name only when complete and on disk.
    Raises EngineError (`artefact.write`) when the disk refuses, and whatever `fill` raises.
    """
    destination = Path(os.path.abspath(destination))
    identity = fingerprint(inputs)
    with _staging(destination) as staging:
        facts = fill(staging)
        files = {path.name: sha256(path) for path in sorted(staging.iterdir())}
        manifest = {**facts, "schema": SCHEMA, "id": identity, "inputs": dict(inputs), "files": files}
        (staging / MANIFEST).write_bytes(seal(manifest, key))
        _sync(staging)
        staging.rename(destination)
        sync_folder(destination.parent)
    return Artefact(destination, identity, manifest)


def find_artefact(destination: Path, inputs: Mapping[str, Any], key: bytes | None = None) -> Artefact | None:
    """The whole artefact of these inputs at `destination`, with a key the signed one; None when nothing is there.

    Raises EngineError (`artefact.exists`) when something else is.
    """
    if not os.path.lexists(destination):
        return None
    try:
        artefact = read_artefact(destination, key)
    except EngineError:
        artefact = None
    if artefact is not None and artefact.id == fingerprint(inputs):
        return artefact
    raise EngineError(
        "artefact.exists",
        f"{destination} is there already and holds something else",
        "a new name: artefacts are immutable",
        "choose another -o, or remove it first",
    )


def read_artefact(path: Path, key: bytes | None = None) -> Artefact:
    """Verify every byte of an artefact, with a key also who made it.

    Raises EngineError: `artefact.missing`, `artefact.unreadable`, `artefact.schema` for one of a newer tared,
    `artefact.signature` for one that the key has not signed, `artefact.damaged` naming the file.
    """
    resolved = Path(os.path.realpath(path))
    manifest = read_manifest(resolved, key)
    check_files(resolved, manifest["files"])
    return Artefact(resolved, manifest["id"], manifest)


def check_runtime(artefact: Artefact, description: Mapping[str, str]) -> None:
    """To be called before an artefact is loaded; description: what Backend.describe() says on this machine.

    Raises EngineError: `artefact.verification` for an engine that was built only to prove that the builder takes the
    model, `artefact.runtime` for one that was built for another runtime, naming the first field that differs.
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
        built_for, description = ({"runtime": str(told.get("runtime"))} for told in (built_for, description))
    for field in (*description, *(field for field in built_for if field not in description)):
        if built_for.get(field) != description.get(field):
            raise EngineError(
                "artefact.runtime",
                f"{artefact.path} was built for {field} {built_for.get(field, 'unknown')}",
                f"{field} {description.get(field, 'unknown')}, as this machine has it",
                "it is built anew from its calibration: the daemon does so, elsewhere use 'tared build'",
            )


class Store:
    """The artefacts of one daemon, each in `artefacts/<id>`, with `current` and `previous` as symlinks.

    With a key, artefacts that it has not signed are refused. That does not stop whoever can write the store from
    turning `current` back to an older artefact that it has signed.
    """

    def __init__(self, root: Path, key: bytes | None = None) -> None:
        """Open or create; what a process that is gone left unfinished is swept away."""
        self.root = root
        self.key = key
        self._artefacts = root / "artefacts"
        self._artefacts.mkdir(parents=True, exist_ok=True)
        for staging in self._artefacts.glob(".*.new"):
            if _is_abandoned(staging.name):
                shutil.rmtree(staging, ignore_errors=True)

    def place(self, inputs: Mapping[str, Any]) -> Path:
        """Where the artefact of these inputs belongs. What cannot serve in its place is removed: it can be built anew.

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
        """Remove what lies where an artefact belongs: it can be built anew. Raises EngineError (`store.write`)."""
        with self._writing():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    def read(self, link: str) -> Artefact | None:
        """The verified artefact behind `current` or `previous`, None when there is none.

        Raises as read_artefact, and `artefact.place` for one that is not in the directory of its id in this store.
        """
        path = self.root / link
        return self._read(path) if path.is_symlink() else None

    def find(self, identity: str) -> Artefact:
        """The verified artefact of this id. Raises as `read`, `artefact.missing` where there is none."""
        return self._read(self._artefacts / identity)

    def _read(self, path: Path) -> Artefact:
        artefact = read_artefact(path, self.key)
        proper = Path(os.path.realpath(self._artefacts), artefact.id)
        if artefact.path != proper:
            found = f"artefact {artefact.id} in {artefact.path}"
            raise EngineError("artefact.place", found, f"it in {proper}", "build it again, or roll back")
        return artefact

    def promote(self, artefact: Artefact) -> None:
        """Make an artefact current; the one that was current becomes previous.

        Raises EngineError (`store.write`) when the disk refuses.
        """
        current = self.root / "current"
        target = os.path.relpath(artefact.path, self.root)
        with self._writing():
            if current.is_symlink():
                if os.readlink(current) == target:
                    return
                self._link("previous", os.readlink(current))
            self._link("current", target)

    def replace(self, link: str, artefact: Artefact) -> None:
        """Let `current` or `previous` lead to another artefact: the same engine, built anew. Raises as `promote`."""
        with self._writing():
            self._link(link, os.path.relpath(artefact.path, self.root))

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            found = f"{self.root}: {error.strerror}"
            raise EngineError("store.write", found, "a writable store", "check the disk and its permissions") from error

    def _link(self, name: str, target: str) -> None:
        temporary = self.root / f".{name}.new"
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(target)
        os.replace(temporary, self.root / name)
        sync_folder(self.root)


def _is_abandoned(staging: str) -> bool:
    """Whether the process that made a staging directory, and put its pid into the name, is gone."""
    named = re.search(r"\.(\d+)\.new$", staging)
    return named is not None and not Path("/proc", named[1]).exists()


@contextmanager
def _staging(destination: Path) -> Iterator[Path]:
    """A directory beside `destination` that is gone afterwards unless it was renamed."""
    staging = destination.with_name(f".{destination.name}.{os.getpid()}.new")
    try:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        yield staging
    except OSError as error:
        raise EngineError(
            "artefact.write",
            f"{destination}: {error.strerror or error}",
            "a writable disk with room for the engine",
            "free some space or check the permissions; what was current still is",
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _sync(directory: Path) -> None:
    for path in directory.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    sync_folder(directory)
