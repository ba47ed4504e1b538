"""Read docstrings: the first paragraphs, and the meaning of each argument.

Arguments stand in a list under `Args:`, or, of small classes, in a sentence of the form `name: meaning.`.
"""

from __future__ import annotations

import inspect
import re
import textwrap


def summary(subject: object) -> list[str]:
    """Return the paragraphs that describe no arguments."""
    before, _, listed = (inspect.getdoc(subject) or "").partition("Args:\n")
    after = [each for each in listed.split("\n\n") if not each.startswith(" ")]
    texts = [" ".join(each.split()) for each in [*before.split("\n\n"), *after]]
    return [each for each in texts if each and not _INLINE.match(each)]


_INLINE = re.compile(r"^([a-z_0-9]+(?:, [a-z_0-9]+)*): ")
_NEXT = re.compile(r"(?:^|(?<=[.;] ))([a-z_0-9]+): ")


def arguments(subject: type) -> dict[str, str]:
    """Return the meaning of each field of a class, also of the classes that it is derived from."""
    found: dict[str, str] = {}
    for each in reversed(subject.__mro__):
        if each.__module__.startswith(("agent.", "fleet.")):
            found.update(_arguments(inspect.cleandoc(each.__doc__ or "")))
    return found


def _arguments(text: str) -> dict[str, str]:
    head, _, listed = text.partition("Args:\n")
    found: dict[str, str] = {}
    for paragraph in head.split("\n\n"):
        joined = " ".join(paragraph.split())
        if _NEXT.match(joined) or _NEXT.search(joined):
            parts = _NEXT.split(joined)
            found.update({name: _sentence(text) for name, text in zip(parts[1::2], parts[2::2], strict=True)})
    name = ""
    for line in textwrap.dedent(listed.partition("\n\n")[0]).splitlines():
        if new := re.match(r"(\w+): (.*)", line):
            name = new[1]
            found[name] = new[2]
        elif line.startswith(" ") and name:
            found[name] += f" {line.strip()}"
        else:
            name = ""
    return found


def _sentence(text: str) -> str:
    return text.strip().rstrip(";").strip()
