"""Device memory that is kept for the next who asks for as much: an allocation by the driver could wait for the GPU.

PyCUDA has a pool too, but giving the first block back to that with no context current ends the process. Blocks come
back to this one from any thread and any context.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_LEAST_BYTES = 256


class DevicePool:
    """Not ordered by streams: memory that is dropped serves the next one at once.

    allocate: memory of so many bytes from the driver, with a method `free`. full: what it raises when there is none.
    """

    def __init__(self, allocate: Callable[[int], Any], full: type[Exception]) -> None:
        self._allocate, self._full = allocate, full
        self._kept: dict[int, list[Any]] = {}

    def take(self, nbytes: int) -> PooledMemory:
        """At least so many bytes; a quarter more at most, beyond the least, so that sizes that vary find each other.

        When the device is full, what is kept goes back first. Raises what `allocate` raises.
        """
        step = max(1 << nbytes.bit_length() >> 3, _LEAST_BYTES)
        size = max(-(-nbytes // step), 1) * step
        kept = self._kept.setdefault(size, [])
        if kept:
            return PooledMemory(kept.pop(), kept)
        try:
            return PooledMemory(self._allocate(size), kept)
        except self._full:
            self.clear()
            return PooledMemory(self._allocate(size), kept)

    def clear(self) -> None:
        """Give back to the driver whatever nobody has."""
        for kept in self._kept.values():
            while kept:
                kept.pop().free()


class PooledMemory:
    """`allocation`, which goes back to its pool's list with the last reference to this."""

    def __init__(self, allocation: Any, home: list[Any]) -> None:
        self.allocation = allocation
        self._home = home

    def __del__(self) -> None:
        self._home.append(self.allocation)
