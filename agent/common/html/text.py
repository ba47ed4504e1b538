"""Show text from strangers: names of devices, labels and tags may hold anything."""

from __future__ import annotations

import unicodedata

_MOST = 200
# Characters that reorder or hide what stands beside them: the bidirectional controls, and zero-width ones.
_HIDING = {"Cf", "Cc", "Cs", "Co", "Zl", "Zp"}


def visible(text: object, most: int = _MOST) -> str:
    """Return at most `most` characters of a text in one line, each of them visible and in its place.

    Control characters, and the marks by which Unicode turns the direction of text, become U+FFFD. What templates do on
    top of this is to escape.

    >>> visible("left\\u202eright")
    'left\\ufffdright'
    """
    shown = str(text)
    shown = shown if len(shown) <= most else shown[: most - 1] + "…"
    return "".join("\ufffd" if unicodedata.category(char) in _HIDING else char for char in shown)
