"""Artefacts on disk: written once, verified before use, made current by one atomic rename.

An artefact is a directory with `manifest.json` and the files it names by SHA-256. The manifest carries a `seal`,
the hash of its own other bytes, so that a changed byte in any file is found before a runtime sees it. The seal
finds damage, not malice: whoever can write the store can reseal it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines.backend import EngineError
from engines.files import sync_folder

SCHEMA = 1
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Artefact:
    """A verified artefact: its directory, its id, and its manifest."""

    path: Path
    id: str
    manifest: Mapping[str, Any]

    @property
    def engine_path(self) -> Path:
        """The engine file, which the manifest names under `engine`."""
        return self.path / str(self.manifest["engine"])


def fingerprint(inputs: Mapping[str, Any]) -> str:
    """The artefact id: 16 hex digits over everything that went in. Builds are not byte-deterministic, inputs are."""
    return hashlib.sha256(_canonical(inputs)).hexdigest()[:16]


def write_artefact(destination: Path, inputs: Mapping[str, Any], fill: Callable[[Path], Mapping[str, Any]]) -> Artefact:
    """Write an artefact directory where none is, all or nothing.

    `fill` writes the files into the directory it is given and returns what else the manifest shall say. The
    directory appears under its name only when complete and on disk.
    Raises EngineError (`artefact.write`) when the disk refuses, and whatever `fill` raises.
    """
    destination = Path(os.path.abspath(destination))
    identity = fingerprint(inputs)
    with _staging(destination) as staging:
        facts = fill(staging)
        files = {path.name: _sha256(path) for path in sorted(staging.iterdir())}
        manifest = {"schema": SCHEMA, "id": identity, "inputs": dict(inputs), "files": files, **facts}
        manifest["seal"] = hashlib.sha256(_canonical(manifest)).hexdigest()
        (staging / MANIFEST).write_bytes(_canonical(manifest))
        _sync(staging)
        staging.rename(destination)
        sync_folder(destination.parent)
    return Artefact(destination, identity, manifest)


def find_artefact(destination: Path, inputs: Mapping[str, Any]) -> Artefact | None:
    """The whole artefact of these inputs at `destination`, None when nothing is there.

    Raises EngineError (`artefact.exists`) when something else is.
    """
    if not destination.exists():
        return None
    try:
        artefact = read_artefact(destination)
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


def read_artefact(path: Path) -> Artefact:
    """Verify every byte of an artefact.

    Raises EngineError: `artefact.missing`, `artefact.schema` for one of a newer tared, `artefact.damaged` naming
    the file.
    """
    resolved = path.resolve()
    try:
        written = (resolved / MANIFEST).read_bytes()
    except OSError as error:
        raise EngineError(
            "artefact.missing", f"no {MANIFEST} in {path}", "an artefact directory", "make one with 'tared build'"
        ) from error
    manifest = _unseal(resolved, written)
    for name, digest in manifest["files"].items():
        file = resolved / name
        if not file.is_file() or _sha256(file) != digest:
            raise _damaged(file)
    for extra in resolved.iterdir():
        if extra.name != MANIFEST and extra.name not in manifest["files"]:
            raise _damaged(extra)
    return Artefact(resolved, str(manifest["id"]), manifest)


class Store:
    """The artefacts of one daemon, with `current` and `previous` as symlinks."""

    def __init__(self, root: Path) -> None:
        """Open or create; what a process that is gone left unfinished is swept away."""
        self.root = root
        (root / "artefacts").mkdir(parents=True, exist_ok=True)
        for staging in (root / "artefacts").glob(".*.new"):
            if not _is_alive(staging.suffixes[-2]):
                shutil.rmtree(staging, ignore_errors=True)

    def place(self, inputs: Mapping[str, Any]) -> Path:
        """Where the artefact of these inputs belongs. A damaged one in its place is removed: it can be built anew."""
        path = self.root / "artefacts" / fingerprint(inputs)
        if path.exists():
            try:
                read_artefact(path)
            except EngineError:
                shutil.rmtree(path)
        return path

    def read(self, link: str) -> Artefact | None:
        """The verified artefact behind `current` or `previous`, None when there is none; raises as read_artefact."""
        path = self.root / link
        return read_artefact(path) if path.is_symlink() else None

    def promote(self, artefact: Artefact) -> None:
        """Make an artefact current; the one that was current becomes previous.

        Raises EngineError (`store.write`) when the disk refuses.
        """
        current = self.root / "current"
        target = os.path.relpath(artefact.path, self.root)
        try:
            if current.is_symlink():
                if os.readlink(current) == target:
                    return
                self._link("previous", os.readlink(current))
            self._link("current", target)
        except OSError as error:
            raise EngineError(
                "store.write",
                f"{self.root}: {error.strerror}",
                "a writable store",
                "check the disk and its permissions",
            ) from error

    def _link(self, name: str, target: str) -> None:
        temporary = self.root / f".{name}.new"
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(target)
        os.replace(temporary, self.root / name)
        sync_folder(self.root)


def _is_alive(suffix: str) -> bool:
    """Whether the process that made a staging directory, named in `suffix` as `.<pid>`, still runs."""
    return Path("/proc", suffix[1:]).exists()


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


def _unseal(path: Path, written: bytes) -> dict[str, Any]:
    try:
        manifest = json.loads(written)
        seal = manifest.pop("seal")
        sealed = hashlib.sha256(_canonical(manifest)).hexdigest()
        whole = seal == sealed and written == _canonical({**manifest, "seal": seal})
        schema = int(manifest["schema"])
    except (ValueError, KeyError, TypeError, AttributeError):
        raise _damaged(path / MANIFEST) from None
    if not whole:
        raise _damaged(path / MANIFEST)
    if schema > SCHEMA:
        raise EngineError(
            "artefact.schema",
            f"{path} has schema {schema}",
            f"at most {SCHEMA}",
            "update tared, or build the artefact again with this version",
        )
    return dict(manifest)


def _damaged(file: Path) -> EngineError:
    return EngineError(
        "artefact.damaged",
        f"{file} is not what was written",
        "the bytes that the manifest names by hash",
        "build the artefact again, or roll back",
    )


def _canonical(document: Mapping[str, Any]) -> bytes:
    """One spelling per document: sorted keys, fixed indent. NaN is refused (ValueError)."""
    return (json.dumps(document, sort_keys=True, indent=1, allow_nan=False) + "\n").encode()


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _sync(directory: Path) -> None:
    for path in directory.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    sync_folder(directory)
