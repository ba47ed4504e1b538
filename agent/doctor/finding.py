"""Define a finding of `tared doctor`, and share small helpers among its examinations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from calibrate.errors import TaredError


@dataclass(frozen=True)
class Finding:
    """The result of examining one thing.

    Args:
        found: What there is, in words.
        ok: It can be used.
        needed: tared cannot run without it.
        remedy: What to do if it is not ok.
    """

    name: str
    found: str
    ok: bool
    needed: bool
    remedy: str = ""


def attempt(name: str, probe: Callable[[], str], needed: bool = False) -> Finding:
    """Return the text of `probe` as a finding, or its error."""
    try:
        return Finding(name, probe(), True, needed)
    except TaredError as error:
        return Finding(name, error.found, False, needed, error.remedy)


def gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"
