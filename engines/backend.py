"""What an inference runtime must offer: three Protocols and the registry that opens one by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import onnx
from numpy.typing import NDArray

from calibrate.errors import TaredError
from calibrate.histogram import AbsHistogram

Array = NDArray[np.generic]
Progress = Callable[[float, str], None]  # fraction done in [0, 1], what is being done


class EngineError(TaredError):
    """A model, graph, artefact or runtime that cannot be used."""


@dataclass(frozen=True)
class TensorSpec:
    """One input or output: its name, NumPy dtype and shape; a dimension the model leaves open is None."""

    name: str
    dtype: np.dtype[np.generic]
    shape: tuple[int | None, ...]


@dataclass(frozen=True)
class Observation:
    """What one observed batch gave: the reference outputs by name, and |x| histograms by tap name."""

    outputs: dict[str, Array]
    histograms: dict[str, AbsHistogram]


class Engine(Protocol):
    """A loaded engine. Not thread-safe: one thread infers; `close` frees it and is idempotent."""

    @property
    def inputs(self) -> Sequence[TensorSpec]: ...

    @property
    def outputs(self) -> Sequence[TensorSpec]: ...

    def infer(self, batch: Array) -> dict[str, Array]:
        """Run the one image input; batch as in `inputs[0]`, e.g. float32 (N, 3, H, W). Outputs by name."""
        ...

    def close(self) -> None: ...


class Observer(Protocol):
    """The reference engine with taps: every observed batch also yields the taps' histograms.

    Histograms, not activations, cross this seam: on a GPU they are counted where the tensors live.
    """

    @property
    def inputs(self) -> Sequence[TensorSpec]: ...

    @property
    def outputs(self) -> Sequence[TensorSpec]:
        """The model's outputs; the taps are not among them."""
        ...

    @property
    def taps(self) -> Sequence[str]: ...

    def observe(self, batch: Array) -> Observation: ...

    def close(self) -> None: ...


class Backend(Protocol):
    """One inference runtime."""

    @property
    def name(self) -> str: ...

    @property
    def engine_file(self) -> str:
        """File name of the engine inside an artefact."""
        ...

    @property
    def precisions(self) -> Sequence[str]:
        """The float precisions this runtime executes beside int8, e.g. ("fp32",)."""
        ...

    def describe(self) -> Mapping[str, str]:
        """Runtime name, version and whatever else makes an engine unusable elsewhere; part of the fingerprint."""
        ...

    def build(
        self, graph: onnx.ModelProto, path: Path, progress: Progress, input_shape: Sequence[int] | None = None
    ) -> None:
        """Compile the graph (FP32 or Q/DQ) into an engine file; `input_shape` settles dimensions it leaves open.

        Raises EngineError; leaves no partial file.
        """
        ...

    def load(self, path: Path) -> Engine:
        """Load a built engine file whose hash the store has verified."""
        ...

    def observer(self, reference: onnx.ModelProto, taps: Sequence[str]) -> Observer:
        """Open the float reference graph with histogram taps on the named tensors."""
        ...


def open_backend(name: str, threads: int = 1) -> Backend:
    """Open a runtime by name; `threads` bounds its CPU threads.

    No silent fallback: a runtime that is missing is an EngineError (`backend.missing`) with its remedy.
    """
    if name == "onnxruntime":
        try:
            from engines.onnxruntime_backend import OnnxRuntimeBackend
        except ImportError as error:
            found = f"no usable onnxruntime package: {error}"
            raise EngineError("backend.missing", found, "its wheel", "pip install onnxruntime") from error
        return OnnxRuntimeBackend(threads)
    raise EngineError(
        "backend.missing",
        f"backend '{name}'",
        "'onnxruntime', the one backend of this version",
        "choose --backend onnxruntime",
    )
