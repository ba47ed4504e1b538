"""What a look at one thing brings, and how long it may take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from calibrate.errors import TaredError


@dataclass(frozen=True)
class Finding:
    """One thing looked at. ok: whether it serves; needed: whether tared cannot run without it."""

    name: str
    found: str
    ok: bool
    needed: bool
    remedy: str = ""


def tried(name: str, look: Callable[[], str], needed: bool = False) -> Finding:
    """What a look finds, or why it finds nothing."""
    try:
        return Finding(name, look(), True, needed)
    except TaredError as error:
        return Finding(name, error.found, False, needed, error.remedy)


def read(path: Path) -> str:
    """A small file's text without its end, empty where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip("\0\n ")
    except OSError:
        return ""


def gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"
