"""Keep artefacts on disk: each under its id, and made current by one atomic rename."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from engines.errors import EngineError
from engines.store.artefact import Artefact, fingerprint, read_artefact
from engines.store.files import remove, sweep, sync_folder
from engines.store.signing import read_manifest

LINKS = ("current", "previous")
_ID = re.compile(r"[0-9a-f]{16}")


class Store:
    """The artefacts of one daemon, each in `artefacts/<id>`, with `current` and `previous` as symlinks.

    With a key, artefacts that it has not signed are refused. That does not stop whoever can write the store from
    turning `current` back to an older artefact that it has signed.
    """

    def __init__(self, root: Path, key: bytes | None = None) -> None:
        """Open or create the store, and remove what killed processes left unfinished.

        Raises EngineError (`store.write`) where it cannot be created. One that is there may be read-only.
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
        """Remove what lies where an artefact belongs: it can be built again. Raises EngineError (`store.write`)."""
        with self._writing():
            remove(path)

    def places(self) -> list[Path]:
        """Return what lies where artefacts belong, whole or not, and nothing else; sorted by id.

        Raises EngineError (`artefact.unreadable`).
        """
        with self.reading():
            return sorted(path for path in self._artefacts.iterdir() if _ID.fullmatch(path.name))

    def target(self, link: str) -> str:
        """Return the id that `current` or `previous` leads to, whatever is there; empty if it leads out of the store.

        Raises EngineError (`artefact.unreadable`) where that cannot be seen: what it leads to may be needed.
        """
        path = self.root / link
        with self.reading():
            target = Path(os.path.realpath(path))
            inside = path.is_symlink() and target.parent == Path(os.path.realpath(self._artefacts))
        return target.name if inside else ""

    def read(self, link: str) -> Artefact | None:
        """Return the verified artefact behind `current` or `previous`; None when there is none.

        Raises as read_artefact, `artefact.place` for one that is not in the directory of its id in this store, and
        `store.link` for what is no link.
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
        """Return the artefact behind `current` or `previous` if its manifest is whole, though a file of it may not be.

        Returns None otherwise. `Artefact.read_file` still returns what was written, or raises.
        """
        path = self.root / "artefacts" / self.target(link)
        try:
            manifest = read_manifest(path, self.key)
        except EngineError:  # `read` has raised it
            return None
        return Artefact(path, manifest["id"], manifest) if manifest["id"] == path.name else None

    def find(self, identity: str) -> Artefact:
        """Return the verified artefact of this id. Raises as `read`, and `artefact.missing` if there is none."""
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
        """Let `current` or `previous` lead to another artefact: the same engine, built again. Raises as `promote`."""
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
