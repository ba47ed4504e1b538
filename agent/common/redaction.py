"""Passwords in the addresses of cameras: out of every message, and out of the command line that everybody may read."""

from __future__ import annotations

import re
import sys
from pathlib import Path

# A password may hold quotes (RFC 3986, section 3.2.1): what ends an address is looked for behind the last @ of a word.
_ADDRESS = re.compile(r"(?<=//)(?:\S*@)?[^\s'\"]*")
_PROPERTY = re.compile(
    r"([\w-]*(?:user|pw|pass|token|secret|cookie|header)[\w-]*\s*=\s*)(?:\"[^\"]*\"|'[^']*'|\S+)", re.I
)
_START, _END = 45, 46  # of the arguments in memory: fields 48 and 49 of proc_pid_stat(5), counted behind the name


def redact(text: str) -> str:
    """The text without user names, passwords and what queries say, in addresses and in properties of GStreamer."""
    return _PROPERTY.sub(r"\1...", _ADDRESS.sub(lambda found: _bare(found[0]), text))


def redact_location(location: str) -> str:
    """As `redact`, of a text that is one location and nothing else: whatever is not allowed in one is known, too.

    What looks like a user and a password is hidden where the `//` is missing as well.
    """
    scheme, slashes, address = location.partition("//")
    if slashes:
        return _PROPERTY.sub(r"\1...", f"{scheme}//{_bare(address)}")
    before, at, where = location.rpartition("@")
    return f"...@{where}" if at and ":" in before else location


def hide_arguments() -> None:
    """Overwrite what `ps` shows of this process's arguments, where an address in them holds a password.

    As the clients of databases do. They were readable until now, since the process began; a file keeps them better.
    """
    if sys.platform != "linux" or not any("//" in each and redact(each) != each for each in sys.argv):
        return
    import ctypes  # most commands have no address

    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, size = int(fields[_START]), int(fields[_END]) - int(fields[_START])
    if start <= 0 or size <= 0:  # a kernel that does not say where they are
        return
    arguments = ctypes.string_at(start, size).split(b"\0")
    shown = [redact(each.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape") for each in arguments]
    # Each keeps its length: the kernel shows the memory as it is.
    memory = b"\0".join(new.ljust(len(old))[: len(old)] for new, old in zip(shown, arguments, strict=True))
    ctypes.memmove(start, memory, size)


def _bare(address: str) -> str:
    """Behind the `//`. What cannot be told apart, for a password may hold a `?`, is hidden as a whole."""
    if "@" in address.partition("?")[2]:
        return "..."
    where, mark, _ = address.rpartition("@")[2].partition("?")
    return f"{where}?..." if mark else where
