"""Writing files so that a reader, or a power cut, never meets half of one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def replace_files(contents: Mapping[Path, bytes], mode: int = 0o666) -> None:
    """Write files under their names, in order, once all are on the disk. Raises OSError; nothing half is left.

    mode: who may do what with them, less what the umask forbids.
    """
    partial = {path: path.with_name(f".{path.name}.{os.getpid()}.new") for path in contents}
    try:
        for path, content in contents.items():
            with open(partial[path], "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        for path, written in partial.items():
            os.replace(written, path)
    finally:
        for written in partial.values():
            written.unlink(missing_ok=True)
    for folder in {path.parent for path in contents}:
        sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Make renames in a folder durable. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
