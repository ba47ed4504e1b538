"""Make text safe to show: without passwords, and without characters that steer a terminal.

Passwords are removed from addresses, in messages and in the command line, which every user can read. Whoever names a
file, a tensor or a device may put anything into the name; `shown` writes it so that no terminal obeys it.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, TextIO

# All of these look at each character a few times at most, whatever the text: strangers write some of it.
_WORD = re.compile(r"\S+")
_QUOTE = re.compile(r"['\"]")
_NAME = re.compile(r"(?<![\w-])[\w-]+\s*=\s*")  # the name of a property, and its equals sign
_SECRET = re.compile(r"user|pw|pass|token|secret|cookie|header", re.I)
_VALUE = re.compile(r"\"[^\"]*\"|'[^']*'|\S+")
# Control characters but tab and line feed; what changes the direction of text, joins or hides nothing that is read, or
# ends a line; halves of surrogate pairs, which a file's name may have and no encoding writes.
_STEERING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)
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


def shown(text: str) -> str:
    """Return the text with each character that steers a terminal, or hides in it, as JSON escapes it: `\\u001b`.

    Tabs and line feeds stay.
    """
    return _STEERING.sub(lambda match: json.dumps(match[0])[1:-1], text)


class ShownStream:
    """A text stream whose writes go through `shown`; a console of rich, which steers terminals itself, passes it by."""

    def __init__(self, stream: TextIO) -> None:
        self.rich_proxied_file = stream  # rich looks for this name

    def write(self, text: str) -> int:
        self.rich_proxied_file.write(shown(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)


@contextmanager
def shown_output() -> Iterator[None]:
    """Let all that the block prints on stdout and stderr go through `shown`."""
    with ExitStack() as stack:
        for redirect, stream in ((redirect_stdout, sys.stdout), (redirect_stderr, sys.stderr)):
            if stream is not None:  # as it is where the process was started without it
                stack.enter_context(redirect(ShownStream(stream)))
        yield


def hide_arguments() -> None:
    """Overwrite the arguments that `ps` shows, if an address among them holds a password.

    Clients of databases do the same. The password could be read since the process started; a file protects it better.
    """
    if sys.platform != "linux" or not any("//" in each and redact(each) != each for each in sys.argv):
        return
    import ctypes  # here, since most commands have no address

    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, size = int(fields[_START]), int(fields[_END]) - int(fields[_START])
    if start <= 0 or size <= 0:  # this kernel does not show where they are
        return
    arguments = ctypes.string_at(start, size).split(b"\0")
    hidden = [redact(each.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape") for each in arguments]
    # Each argument keeps its length: the kernel shows the memory as it is.
    memory = b"\0".join(new.ljust(len(old))[: len(old)] for new, old in zip(hidden, arguments, strict=True))
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
