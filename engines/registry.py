"""Open an inference runtime by its name."""

from __future__ import annotations

from engines.errors import EngineError
from engines.interface import Backend, BackendOptions


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
