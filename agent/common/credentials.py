"""Locate files of config.yaml that may be secrets: by path, or as `credential:NAME`, which systemd provides."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, ValidationInfo

from agent.common.errors import ConfigError
from agent.common.schema import in_folder
from engines.store.files import read_regular
from engines.store.signing import NO_KEY, credential

_PREFIX = "credential:"


def _check_form(path: Path, info: ValidationInfo) -> Path:
    name = _name(path)
    if name is None:
        return in_folder(path, info)
    if not re.fullmatch(r"(?!\.{1,2}$)[A-Za-z0-9._-]+", name, re.ASCII):
        raise ValueError("a file, or 'credential:' and the name of a systemd credential")
    return path


FileOrCredential = Annotated[Path, AfterValidator(_check_form)]


def locate(path: Path) -> Path:
    """Return the path of the file.

    Raises ConfigError:
        config.credential  tared runs in no service with credentials, or the credential is the unit's default, which
                           stands for a file that is missing
    """
    name = _name(path)
    if name is None:
        return path
    file = credential(name)
    if file is None:
        remedy = f"give the service LoadCredential={name}:FILE, or name the file itself"
        raise ConfigError("config.credential", f"no $CREDENTIALS_DIRECTORY for '{path}'", "a systemd service", remedy)
    if file.is_file() and read_regular(file) == NO_KEY:
        remedy = f"put it at the path that LoadCredential={name} of the unit names, and restart the service"
        raise ConfigError("config.credential", f"no file behind '{path}'", "a file that belongs to root", remedy)
    return file


def _name(path: Path) -> str | None:
    """Return the name of a credential; None for a plain file."""
    text = str(path)
    return text.removeprefix(_PREFIX) if text.startswith(_PREFIX) else None
