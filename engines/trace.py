"""Mark named ranges on NVIDIA's timeline (NVTX): the steps of the frame path beside the work of the GPU.

`TARED_NVTX=1 nsys profile tared run ...` shows them in Nsight Systems. Off, a range costs one call that does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from calibrate.errors import TaredError

Item = TypeVar("Item", bound=tuple[object, ...])

_NOTHING = nullcontext()
_annotate: Callable[[str], AbstractContextManager[Any]] | None = None


def start_tracing() -> None:
    """Record ranges from here on. Raises TaredError (`trace.missing`) without the package nvtx."""
    global _annotate
    try:
        import nvtx
    except ImportError as error:
        raise TaredError("trace.missing", "no package nvtx", "it, for TARED_NVTX", "pip install nvtx") from error
    _annotate = nvtx.annotate


def spanned(name: str, items: Iterable[Item]) -> Iterator[Item]:
    """Yield the items, each waited for in a range of its own."""
    iterator = iter(items)
    while True:
        with span(name):
            item = next(iterator, None)
        if item is None:
            return
        yield item


def span(name: str) -> AbstractContextManager[Any]:
    """Return the range of a `with`; ranges nest."""
    return _NOTHING if _annotate is None else _annotate(name)
