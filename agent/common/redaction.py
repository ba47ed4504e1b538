"""Remove passwords from addresses: in messages, and in the command line, which every user can read."""

from __future__ import annotations

import re
import sys
from pathlib import Path

# All of these look at each character a few times at most, whatever the text: strangers write some of it.
_WORD = re.compile(r"\S+")
_QUOTE = re.compile(r"['\"]")
_NAME = re.compile(r"(?<![\w-])[\w-]+\s*=\s*")  # of a property
_SECRET = re.compile(r"user|pw|pass|token|secret|cookie|header", re.I)
_VALUE = re.compile(r"\"[^\"]*\"|'[^']*'|\S+")
# Where the arguments start and end in memory: fields 48 and 49 of proc_pid_stat(5), counted from behind the name.
_START, _END = 45, 46


def redact(text: str) -> str:
    """Return the text without user names, passwords and queries, in addresses and in properties of GStreamer."""
    return _hide_values(_WORD.sub(lambda match: _hide_addresses(match[0]), text))


def redact_location(location: str) -> str:
    """Redact a text that is one location and nothing else, so that its end is known.

    Here a user and a password are recognised without the `//`, too.
    """
    scheme, slashes, address = location.partition("//")
    if slashes:
        return _hide_values(f"{scheme}//{_bare(address)}")
    user, at, host = location.rpartition("@")
    return f"...@{host}" if at and ":" in user else location


def hide_arguments() -> None:
    """Overwrite the arguments that `ps` shows, if an address among them holds a password.

    Clients of databases do the same. The password could be read since the process started; a file protects it better.
    """
    if sys.platform != "linux" or not any("//" in each and redact(each) != each for each in sys.argv):
        return
    import ctypes  # here, since most commands have no address

    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, size = int(fields[_START]), int(fields[_END]) - int(fields[_START])
    if start <= 0 or size <= 0:  # this kernel does not tell where they are
        return
    arguments = ctypes.string_at(start, size).split(b"\0")
    shown = [redact(each.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape") for each in arguments]
    # Each argument keeps its length: the kernel shows the memory as it is.
    memory = b"\0".join(new.ljust(len(old))[: len(old)] for new, old in zip(shown, arguments, strict=True))
    ctypes.memmove(start, memory, size)


def _hide_addresses(word: str) -> str:
    """Return a word, in which each address begins behind `//`.

    A password may contain quotes (RFC 3986, section 3.2.1), so an address ends at the first quote after the last @.
    """
    parts, end, behind_at = list[str](), 0, word.rfind("@") + 1
    while (slashes := word.find("//", end)) >= 0:
        begin = slashes + 2
        quote = _QUOTE.search(word, max(begin, behind_at))
        parts += [word[end:begin], _bare(word[begin : quote.start() if quote is not None else len(word)])]
        end = quote.start() if quote is not None else len(word)
    return "".join(parts) + word[end:]


def _hide_values(text: str) -> str:
    """Return the text without the values of properties whose names speak of secrets."""
    parts, end = list[str](), 0
    for name in _NAME.finditer(text):
        if name.start() < end or not _SECRET.search(name[0]):
            continue
        value = _VALUE.match(text, name.end())
        if value is not None:
            parts += [text[end : name.end()], "..."]
            end = value.end()
    return "".join(parts) + text[end:]


def _bare(address: str) -> str:
    """Return an address (the text behind `//`) without user, password and query.

    An @ behind the first `?` may belong to a password, which may contain a `?`; then all of it is hidden.
    """
    if "@" in address.partition("?")[2]:
        return "..."
    host, mark, _ = address.rpartition("@")[2].partition("?")
    return f"{host}?..." if mark else host
