"""Text that strangers chose, for where it is stored and shown."""

from __future__ import annotations


def printable(text: str, most: int = 256) -> str:
    """Its first `most` characters, without those that are none to print: no terminal takes it for an order, and every
    database for text."""
    return "".join(char for char in text[:most] if char.isprintable())
