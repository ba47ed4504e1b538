"""Open an inference runtime by its name, with the options that a board has for it."""

from __future__ import annotations

from pathlib import Path

from engines.errors import EngineError
from engines.interface import Backend, BackendOptions
from engines.store.signing import find_key


def open_backend(name: str, options: BackendOptions | None = None) -> Backend:
    """Open a runtime by name. Raises EngineError (`backend.missing`) if it is missing: there is no silent fallback."""
    if name == "onnxruntime":
        try:
            from engines.onnxruntime_backend import OnnxRuntimeBackend
        except ImportError as error:
            found = f"no usable onnxruntime package: {error}"
            raise EngineError("backend.missing", found, "its wheel", "pip install onnxruntime") from error
        return OnnxRuntimeBackend(options)
    if name == "tensorrt":
        from engines.trt.backend import TensorRtBackend

        return TensorRtBackend(options)
    raise EngineError(
        "backend.missing",
        f"backend '{name}'",
        "'onnxruntime' or 'tensorrt'",
        "choose one of them with --backend",
    )


def options_for(state_dir: Path, threads: int, dla: int | None) -> BackendOptions:
    """Return the options of a runtime that keeps its cache in a state directory, with the key that signs there.

    Raises EngineError (`artefact.key`).
    """
    return BackendOptions(threads, state_dir / "cache", find_key(), dla=dla)
