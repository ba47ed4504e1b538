"""Files of config.yaml that may be secrets: by path, or as `credential:NAME`, which systemd hands to a service."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

from agent.common.errors import ConfigError
from engines.store.signing import NO_KEY, credential

_PREFIX = "credential:"


def _known_form(path: Path) -> Path:
    name = _name(path)
    if name is not None and not re.fullmatch(r"(?!\.{1,2}$)[A-Za-z0-9._-]+", name, re.ASCII):
        raise ValueError("a file, or 'credential:' and the name of a systemd credential")
    return path


FileOrCredential = Annotated[Path, AfterValidator(_known_form)]


def resolve_against(path: Path | None, base: Path) -> Path | None:
    """The same file, taken from the folder `base` where its path is relative."""
    return path if path is None or _name(path) is not None else base / path


def locate(path: Path) -> Path:
    """Where the file is.

    Raises ConfigError (`config.credential`) for a credential outside a service that has any, and where it is the unit's
    default, which says that there is no file behind it.
    """
    name = _name(path)
    if name is None:
        return path
    file = credential(name)
    if file is None:
        remedy = f"give the service LoadCredential={name}:FILE, or name the file itself"
        raise ConfigError("config.credential", f"no $CREDENTIALS_DIRECTORY for '{path}'", "a systemd service", remedy)
    if file.is_file() and file.read_bytes() == NO_KEY:
        remedy = f"put it where LoadCredential={name} of the unit looks, and restart the service"
        raise ConfigError("config.credential", f"no file behind '{path}'", "one of root's", remedy)
    return file


def _name(path: Path) -> str | None:
    """Of a credential; None for a file."""
    text = str(path)
    return text.removeprefix(_PREFIX) if text.startswith(_PREFIX) else None
