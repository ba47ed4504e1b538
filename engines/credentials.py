"""Secrets that systemd hands to a service as files: LoadCredential= in systemd.exec(5)."""

from __future__ import annotations

import os
from pathlib import Path


def credential(name: str) -> Path | None:
    """Where the credential of this name is, or would be; None outside a service that was given any."""
    folder = os.environ.get("CREDENTIALS_DIRECTORY")
    return Path(folder, name) if folder else None


def is_credential(file: Path) -> bool:
    """Whether it is systemd that rules who may read the file."""
    folder = os.environ.get("CREDENTIALS_DIRECTORY")
    return bool(folder and Path(os.path.realpath(file)).is_relative_to(os.path.realpath(folder)))
