"""Named ranges on NVIDIA's timeline (NVTX): what the frame path does when, beside what the GPU does.

`TARED_NVTX=1 nsys profile tared run ...` shows them in Nsight Systems. Off, a range costs one call that does nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from engines.backend import EngineError

_NOTHING = nullcontext()
_annotate: Callable[[str], AbstractContextManager[Any]] | None = None


def start_tracing() -> None:
    """From here on ranges are told. Raises EngineError (`trace.missing`) without the package nvtx."""
    global _annotate
    try:
        import nvtx
    except ImportError as error:
        raise EngineError("trace.missing", "no package nvtx", "it, for TARED_NVTX", "pip install nvtx") from error
    _annotate = nvtx.annotate


def span(name: str) -> AbstractContextManager[Any]:
    """The range of a `with`; they nest."""
    return _NOTHING if _annotate is None else _annotate(name)
