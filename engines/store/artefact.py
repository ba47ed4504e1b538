"""Write an artefact once, and verify it before use.

It is a directory with `manifest.json` and the files it names by SHA-256. The manifest is sealed, and with a key signed
(engines/store/signing.py), so that a changed byte in any file is found before a runtime sees it. An engine is code:
what is loaded are the bytes that `Artefact.read_file` has verified, not what lies under their name a moment later.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines.errors import EngineError
from engines.store.files import staging
from engines.store.signing import (
    MANIFEST,
    SCHEMA,
    canonical,
    check_files,
    damaged,
    open_regular,
    read_manifest,
    seal,
    sha256,
)


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
        """Return the engine's bytes; raises as `engine_path` and `read_file`."""
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
    """Return the artefact id: 16 hex digits over all inputs. Builds are not byte-deterministic, inputs are."""
    return hashlib.sha256(canonical(inputs)).hexdigest()[:16]


def write_artefact(
    destination: Path,
    inputs: Mapping[str, Any],
    fill: Callable[[Path], Mapping[str, Any]],
    key: bytes | None = None,
    replacing: bool = False,
) -> Artefact:
    """Write an artefact directory where none is, all or nothing; a key signs it.

    replacing: an existing one gives way as soon as the new one is complete.

    `fill` writes the files into the directory it is given and returns what else the manifest shall say. The
    directory appears under its name only when complete and on disk.
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
    """Return the whole artefact of these inputs at `destination`, with a key the signed one; None if nothing is there.

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
    """Verify every byte of an artefact; with a key, also who made it.

    Raises EngineError: `artefact.missing`, `artefact.unreadable`, `artefact.schema` for one of a newer tared,
    `artefact.signature` for one that the key has not signed, `artefact.damaged` naming the file.
    """
    resolved = Path(os.path.realpath(path))
    manifest = read_manifest(resolved, key)
    check_files(resolved, manifest["files"])
    return Artefact(resolved, manifest["id"], manifest)


def check_runtime(artefact: Artefact, description: Mapping[str, str]) -> None:
    """Check, before an artefact is loaded, that it was built for this runtime; description: Backend.describe() here.

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
        built_for, description = ({"runtime": str(facts.get("runtime"))} for facts in (built_for, description))
    for field in (*description, *(field for field in built_for if field not in description)):
        if built_for.get(field) != description.get(field):
            raise EngineError(
                "artefact.runtime",
                f"{artefact.path} was built for {field} {built_for.get(field, 'unknown')}",
                f"{field} {description.get(field, 'unknown')}, as this machine has it",
                "it is built anew from its calibration: the daemon does so, elsewhere use 'tared build'",
            )
