"""The one error of the GPU check; nothing but the standard library, for it must speak on the barest machine."""

from __future__ import annotations


class GpuCheckError(Exception):
    """Shown as one line, exit code 2. `found`, `expected` and `remedy` are sentence fragments without a full stop."""

    def __init__(self, found: str, expected: str, remedy: str) -> None:
        super().__init__(f"found {found}; expected {expected}; {remedy}")
