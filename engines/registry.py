"""Open an inference runtime by its name, with the options that a board has for it; or choose the fastest that works."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Literal

from calibrate.errors import TaredError, install_extra
from engines.errors import EngineError
from engines.interface import Backend, BackendOptions, BuildRequest
from engines.store.signing import find_key
from engines.trial import why_not

log = logging.getLogger(__package__)

AUTO = "auto"


def _tensorrt(options: BackendOptions) -> Backend:
    from engines.trt.backend import TensorRtBackend

    return TensorRtBackend(options)


def _openvino(options: BackendOptions) -> Backend:
    try:
        from engines.openvino_backend import OpenVinoBackend
    except Exception as error:
        raise _missing("openvino", install_extra("openvino"), error) from error
    return OpenVinoBackend(options)


def _onnxruntime(options: BackendOptions) -> Backend:
    try:
        from engines.onnxruntime_backend import OnnxRuntimeBackend
    except Exception as error:
        raise _missing("onnxruntime", "pip install onnxruntime", error) from error
    return OnnxRuntimeBackend(options)


def _missing(name: str, remedy: str, error: Exception) -> EngineError:
    """Return the error of a package that is missing, or that is there and fails when it is imported."""
    if isinstance(error, ImportError):
        return EngineError("backend.missing", f"no usable {name} package: {error}", f"an installed {name}", remedy)
    _log_traceback(name, type(error).__name__)
    found = f"no usable {name} package: {type(error).__name__}: {error}"
    return EngineError("backend.missing", found, "an import without an error", "see its traceback in the log")


@lru_cache
def _log_traceback(name: str, kind: str) -> None:
    """Log the exception that is being handled, once for each package and kind."""
    log.warning("event=import package=%s error=%s", name, kind, exc_info=True)


BACKENDS: Mapping[str, Callable[[BackendOptions], Backend]] = {  # the fastest first
    "tensorrt": _tensorrt,
    "openvino": _openvino,
    "onnxruntime": _onnxruntime,
}

# Runtimes whose kernels are made for this processor and this graph when an engine is loaded, in a second or two: a
# process of its own tries them first. TensorRT takes minutes for an engine, and says by itself what it lacks.
_TRIED_APART = frozenset({"openvino"})


@dataclass(frozen=True)
class ChosenBackend:
    """Hold an opened runtime, and why the faster ones were not taken.

    Args:
        not_taken: The reason for each faster one, by name.
    """

    backend: Backend
    not_taken: Mapping[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The choice in one line, for people."""
        reasons = "".join(f"; not {name}: {reason}" for name, reason in self.not_taken.items())
        return f"{self.backend.name}{reasons}"


def open_backend(name: str, options: BackendOptions | None = None) -> Backend:
    """Open a runtime.

    Args:
        name: "tensorrt", "openvino", "onnxruntime", or "auto" for the fastest that works.
        options: How it shall work here; None: the defaults of BackendOptions.

    Raises EngineError:
        backend.missing  the runtime is not installed, or no runtime has this name; a named one never falls back
        backend.option   an option that this runtime does not have
    """
    return choose_backend(name, options).backend


def backend_of(described: Mapping[str, str]) -> str:
    """Return the name of the runtime that described itself so; "auto" for an unknown one.

    Args:
        described: The result of `Backend.describe`, as a manifest keeps it.

    >>> backend_of({"runtime": "tensorrt_rtx 1.7"}), backend_of({"runtime": "another"})
    ('tensorrt', 'auto')
    """
    runtime = str(described.get("runtime"))
    return next((name for name in BACKENDS if runtime.startswith(name)), AUTO)  # tensorrt_rtx is a tensorrt


def open_simulator(backend: Backend, threads: int) -> Backend:
    """Open ONNX Runtime to try plans for a runtime: it computes the INT8 graph that this runtime is given.

    Args:
        threads: The most CPU threads that it uses.

    Raises EngineError (`backend.missing`) where ONNX Runtime is not installed.
    """
    options = BackendOptions(threads, unsigned=backend.takes_unsigned, weight_bits=backend.weight_bits)
    return open_backend("onnxruntime", options)


def choose_backend(
    name: str, options: BackendOptions | None = None, request: BuildRequest | None = None
) -> ChosenBackend:
    """Open a runtime as `open_backend` does, and return it with the reasons against the others.

    Args:
        name: "tensorrt", "openvino", "onnxruntime", or "auto" for the fastest that works.
        options: How it shall work here; None: the defaults of BackendOptions.
        request: The float graph that will be served: "auto" takes no runtime for CPUs that cannot build it. None: any
            runtime that computes.

    Raises EngineError (`backend.missing`, `backend.option`) as `open_backend` does.
    """
    options = options or BackendOptions()
    if name != AUTO:
        if name not in BACKENDS:
            expected = ", ".join(repr(each) for each in (AUTO, *BACKENDS))
            raise EngineError("backend.missing", f"backend '{name}'", f"one of {expected}", "choose with --backend")
        return ChosenBackend(BACKENDS[name](options))
    not_taken: dict[str, str] = {}
    for each in BACKENDS:
        backend = _working(each, options, request, not_taken)
        if backend is not None:
            return ChosenBackend(backend, not_taken)
    reasons = "; ".join(f"{each}: {reason}" for each, reason in not_taken.items())
    raise EngineError("backend.missing", reasons, "a runtime that works", "pip install onnxruntime")


def _working(
    name: str, options: BackendOptions, request: BuildRequest | None, not_taken: dict[str, str]
) -> Backend | None:
    """Open a runtime; where it does not work, note the reason and return None."""
    if name in _TRIED_APART:
        reason = why_not(name, options.threads, request) if request is not None else _why_not_at_all(name)
        if reason:
            not_taken[name] = reason
            return None
    try:
        backend = BACKENDS[name](options)
        backend.describe()  # a runtime that computes nothing here says so now
    except TaredError as error:
        not_taken[name] = error.found
        return None
    return backend


@lru_cache
def _why_not_at_all(name: str) -> str:
    """Return `why_not` without a graph, once for a process: it takes half a second."""
    return why_not(name, threads=1, request=None)


def options_for(
    state_dir: Path, threads: int, dla: int | None, reference: Literal["own", "onnxruntime"] = "own"
) -> BackendOptions:
    """Return the options of a runtime that keeps its cache in a state directory, with the key that signs there.

    Args:
        state_dir: The daemon's state directory; the cache is its folder `cache`.
        threads: The most CPU threads that the runtime uses.
        dla: Number of the DLA core to build for; None: the GPU alone.
        reference: The runtime of the float reference, as in BackendOptions.

    Raises EngineError (`artefact.key`) for a key that cannot be used.
    """
    return BackendOptions(threads, state_dir / "cache", find_key(), dla=dla, reference=reference)
