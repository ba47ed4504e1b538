"""Define what an inference runtime offers: the Protocols Backend, Engine and Observer, and what they exchange.

engines/registry.py opens a runtime by name. Optional abilities of an engine have Protocols of their own (ImageEngine,
OverlappingEngine, ProfiledEngine): callers test for them with isinstance.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import onnx
from numpy.typing import NDArray

from calibrate.histogram import AbsHistogram
from calibrate.repair import Extremes
from engines.errors import EngineError
from engines.preprocessing import ImageTransform

Array = NDArray[np.generic]
Progress = Callable[[float, str], None]  # fraction done in [0, 1], what is being done


def silent(_fraction: float, _doing: str) -> None:
    """Discard the progress."""


@dataclass(frozen=True)
class TensorSpec:
    """One input or output: its name, NumPy dtype and shape; a dimension the model leaves open is None."""

    name: str
    dtype: np.dtype[np.generic]
    shape: tuple[int | None, ...]

    def accepts(self, shape: Sequence[int]) -> bool:
        """Return True if a tensor of this shape fits: the same rank, and every size that is not open."""
        return len(shape) == len(self.shape) and all(
            size > 0 and expected in (None, size) for size, expected in zip(shape, self.shape, strict=True)
        )

    def check(self, batch: Array) -> None:
        """Raise EngineError (`engine.batch`) for a batch of another shape or dtype."""
        if self.accepts(batch.shape) and batch.dtype == self.dtype:
            return
        shape = ", ".join("any" if size is None else str(size) for size in self.shape)
        raise EngineError(
            "engine.batch",
            f"{batch.dtype} {list(batch.shape)}",
            f"{self.dtype} [{shape}] for input '{self.name}'",
            "preprocess images for this engine's input",
        )


@dataclass(frozen=True)
class ShapeRange:
    """The shapes of one input in an optimization profile, each (batch, channels, height, width)."""

    min: tuple[int, ...]
    opt: tuple[int, ...]
    max: tuple[int, ...]


Profile = Mapping[str, ShapeRange]  # by input name


@dataclass(frozen=True)
class BuildRequest:
    """A graph to compile, and what a runtime has to know about it.

    graph: FP32, or with INT8 Q/DQ.
    precision: "int8" and "fp16" run all that is not quantised in the runtime's fastest float type, "fp32" in FP32.
    input_shape: used if the graph leaves dimensions open and there is no profile.
    amax: the largest |x| measured per tensor, for the range of FP16; tensors without one are trusted.
    """

    graph: onnx.ModelProto
    precision: str = "fp32"
    input_shape: tuple[int, ...] | None = None
    profiles: tuple[Profile, ...] = ()
    amax: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Built:
    """A compiled engine: its bytes, further files for the artefact by name, and what its manifest shall say.

    without_int8: nodes that read INT8 in the graph and that the runtime has no INT8 kernel for, with the reason. An
    engine that has such nodes is no use: they are to be left float, and the graph built again.
    """

    engine: bytes
    files: Mapping[str, bytes] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    without_int8: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Observation:
    """The result of one observed batch: the reference outputs by name, and |x| histograms by tap name.

    extremes: of the channels that layers read, by the layer's name.
    """

    outputs: dict[str, Array]
    histograms: dict[str, AbsHistogram]
    extremes: dict[str, Extremes] = field(default_factory=dict)


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

    @property
    def product_bits(self) -> int | None:
        """Bits of mantissa that the factors of products keep, 11 with TF32; None for ONNX Runtime on a CPU, with which
        other runtimes are compared."""
        ...

    def observe(self, batch: Array) -> Observation: ...

    def infer(self, batch: Array) -> dict[str, Array]:
        """The reference outputs alone, without what the histograms cost."""
        ...

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
        """The float precisions this runtime executes beside int8: the reference's first, the fastest last."""
        ...

    @property
    def int8_must_gain(self) -> bool:
        """True if INT8 that is slower than float is of no use here, whatever memory it saves."""
        ...

    @property
    def takes_unsigned(self) -> bool:
        """True if activations may be uint8, which tensors that are never negative then are."""
        ...

    @property
    def weight_bits(self) -> int:
        """Bits of weights in INT8: 8, or 7 where the processor's products of eight would saturate."""
        ...

    def describe(self) -> Mapping[str, str]:
        """Runtime name, version and whatever else makes an engine unusable elsewhere; part of the fingerprint."""
        ...

    def flags(self) -> Mapping[str, str]:
        """The builder's options besides the request, e.g. {"best": "True"}; part of the fingerprint too."""
        ...

    def build(self, request: BuildRequest, progress: Progress = silent) -> Built:
        """Compile a graph. Raises EngineError, and whatever `progress` raises, which is how a build is cancelled."""
        ...

    def load(self, engine: bytes) -> Engine:
        """Load an engine that `build` made and whose bytes the store has verified."""
        ...

    def observer(
        self, request: BuildRequest, taps: Sequence[str], progress: Progress = silent, layers: Sequence[str] = ()
    ) -> Observer:
        """Open a float reference graph with histogram taps on the named tensors.

        layers: those whose input's extremes are observed, channel by channel; as for `expose_extremes`.
        """
        ...


@dataclass(frozen=True)
class BackendOptions:
    """How a runtime shall work on this machine.

    threads: bound of its CPU threads. cache: folder for what makes the next build faster; None keeps nothing.
    key: signs and verifies what is kept there. target: the GPU to build for, "sm86", on a machine that need not have
    it: such an engine proves that the builder takes the model, and is never served. dla: build for this DLA core, with
    the GPU for what it cannot run, FP32 engines among them. best: search longest for the fastest kernels. unsigned,
    weight_bits: ONNX Runtime simulates INT8 of a runtime that takes uint8, too, or has weights of so many bits.
    reference: the runtime of the float reference, for one that does not compute what ONNX Runtime does.
    """

    threads: int = 1
    cache: Path | None = None
    key: bytes | None = field(default=None, repr=False)
    target: str | None = None
    dla: int | None = None
    best: bool = False
    unsigned: bool = False
    weight_bits: int = 8
    reference: Literal["own", "onnxruntime"] = "own"

    def check_cpu(self, backend: str) -> None:
        """Raise EngineError (`backend.option`) if there are options that only a GPU's runtime has."""
        gpu_options = {"--target": self.target, "--dla": self.dla, "--best": self.best or None}
        given = [name for name, value in gpu_options.items() if value is not None]
        if given:
            raise EngineError(
                "backend.option",
                f"{' and '.join(given)} with backend {backend}",
                "an option that a runtime on the CPU has",
                "leave it out, or choose --backend tensorrt",
            )


@runtime_checkable
class ImageEngine(Engine, Protocol):
    """An engine that preprocesses frames itself, where its input lies."""

    def infer_image(self, frame: NDArray[np.uint8], transform: ImageTransform) -> dict[str, Array]:
        """Run one BGR frame uint8 (frame_height, frame_width, 3), contiguous or a view. Outputs by name."""
        ...


@runtime_checkable
class OverlappingEngine(ImageEngine, Protocol):
    """An engine that takes the next frame while it computes one; a few may be under way."""

    def start_image(self, frame: NDArray[np.uint8], transform: ImageTransform) -> int:
        """Start a frame, which may change as soon as this returns; return its ticket."""
        ...

    def start(self, batch: Array) -> int:
        """Start a batch as for `infer`, which may change as soon as this returns; return its ticket."""
        ...

    def is_done(self, ticket: int) -> bool:
        """Return True if `finish` need not wait. Called from the thread that started it."""
        ...

    def finish(self, ticket: int) -> dict[str, Array]:
        """Wait for the outputs of a frame or a batch; in the order in which they were started."""
        ...


@runtime_checkable
class ProfiledEngine(Engine, Protocol):
    """An engine that can measure the time of each of its layers."""

    def layer_times_ms(self, batch: Array, runs: int = 20) -> dict[str, float]:
        """Return the median time in ms of every layer over `runs` inferences, by the names of the layer table."""
        ...

    def layer_nodes(self) -> Mapping[str, tuple[str, ...]]:
        """Return, by the same names, the ONNX nodes that a layer computes or is there for; none if unknown."""
        ...


@runtime_checkable
class EntropySearch(Protocol):
    """A backend whose GPU runs the threshold search of method `entropy`."""

    def search_entropy(self, counts: NDArray[np.int64], windows: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return how many bins to keep of each histogram, the same as calibrate.threshold chooses on the CPU.

        Args:
            counts: (tensors, bins).
            windows: (tensors, 2), the fewest and the most bins that may be kept, as `entropy_window` returns them.

        Raises DeviceError when the GPU fails, EngineError `engine.target` where there is none.
        """
        ...
