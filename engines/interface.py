"""Define what an inference runtime offers: the Protocols Backend, Engine and Observer, and what they exchange.

Read in this order: Backend builds an engine from a BuildRequest and loads it; Engine infers; Observer is the float
reference, which counts histograms beside its answers. engines/registry.py opens a runtime by name. Optional abilities
of an engine have Protocols of their own (OverlappingEngine, ProfiledEngine): callers test for them with isinstance.

In shapes, N is the number of images in a batch, and H and W are the size of the network input.
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

Array = NDArray[Any]
Progress = Callable[[float, str], None]  # fraction done in [0, 1], what is being done


def silent(_fraction: float, _doing: str) -> None:
    """Discard the progress of a build."""


def closed_engine() -> EngineError:
    """Return the error of a call to an engine after its `close`."""
    return EngineError(
        "engine.closed", "a call to a closed engine", "calls before its `close`", "load the engine again"
    )


@dataclass(frozen=True)
class TensorSpec:
    """Describe one input or output.

    Args:
        name: As the graph names it.
        dtype: NumPy type of its values.
        shape: Sizes of its dimensions; None for one that the model leaves open.

    >>> image = TensorSpec("images", np.dtype(np.float32), (None, 3, 416, 416))
    >>> image.accepts((8, 3, 416, 416)), image.accepts((1, 3, 640, 640))
    (True, False)
    """

    name: str
    dtype: np.dtype[np.generic]
    shape: tuple[int | None, ...]

    def accepts(self, shape: Sequence[int]) -> bool:
        """Return True if a tensor of this shape fits: the same rank, and every size that is not open."""
        return len(shape) == len(self.shape) and all(
            size > 0 and expected in (None, size) for size, expected in zip(shape, self.shape, strict=True)
        )

    def check(self, batch: Array) -> None:
        """Check a batch against shape and dtype.

        Raises EngineError (`engine.batch`) for a batch of another shape or dtype.
        """
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
    """Bound the shapes of one input in an optimization profile.

    Args:
        min: The smallest shape, (batch, channels, height, width).
        opt: The shape that kernels are chosen for.
        max: The largest shape.
    """

    min: tuple[int, ...]
    opt: tuple[int, ...]
    max: tuple[int, ...]


Profile = Mapping[str, ShapeRange]  # by input name


@dataclass(frozen=True)
class BuildRequest:
    """Describe a graph to compile, and what a runtime has to know about it.

    Args:
        graph: FP32, or with INT8 Q/DQ.
        precision: "int8" and "fp16" run all that is not quantised in the runtime's fastest float type, "fp32" in FP32.
        input_shape: (N, 3, H, W), used if the graph leaves dimensions open and there is no profile; None: as the graph
            has it.
        profiles: The ranges of shapes to compile for; empty: one shape.
        amax: The largest |x| measured of each tensor, for the range of FP16; tensors without one are trusted.
    """

    graph: onnx.ModelProto
    precision: str = "fp32"
    input_shape: tuple[int, ...] | None = None
    profiles: tuple[Profile, ...] = ()
    amax: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Built:
    """Hold a compiled engine.

    Args:
        engine: Its bytes, for `Backend.load`.
        files: Further files for the artefact, by name.
        facts: Entries for the artefact's manifest, in JSON's types.
        without_int8: Nodes that read INT8 in the graph and that the runtime has no INT8 kernel for, with the reason. An
            engine that has such nodes is no use: they are to be left float, and the graph built again.
    """

    engine: bytes
    files: Mapping[str, bytes] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    without_int8: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Observation:
    """Hold the result of one observed image.

    Args:
        outputs: The reference outputs, by name.
        histograms: Histograms of |x|, by the name of the tap.
        extremes: (2, channels), the least and the largest value of the channels that layers read, by the layer's name.
    """

    outputs: dict[str, Array]
    histograms: dict[str, AbsHistogram]
    extremes: dict[str, Extremes] = field(default_factory=dict)


class Engine(Protocol):
    """Run a loaded engine. Not thread-safe: one thread infers."""

    @property
    def inputs(self) -> Sequence[TensorSpec]:
        """The inputs; the first is the image."""
        ...

    @property
    def outputs(self) -> Sequence[TensorSpec]:
        """The outputs."""
        ...

    def infer(self, batch: Array) -> dict[str, Array]:
        """Run the one image input.

        Args:
            batch: Fits `inputs[0]`, e.g. float32 (N, 3, H, W).

        Returns:
            The outputs by name.

        Raises EngineError:
            engine.batch   a batch of another shape or dtype
            engine.run     the runtime fails on it
            engine.closed  `close` was called

        Raises DeviceError when the GPU fails.
        """
        ...

    def close(self) -> None:
        """Free the engine; a second call does nothing."""
        ...


class Observer(Engine, Protocol):
    """Run the reference engine with taps: every observed image also yields the taps' histograms.

    Histograms, not activations, cross this seam: on a GPU they are counted where the tensors live. `outputs` are the
    model's, without the taps, and `infer` returns them without the cost of the histograms.
    """

    @property
    def taps(self) -> Sequence[str]:
        """Names of the observed tensors."""
        ...

    @property
    def product_bits(self) -> int | None:
        """Bits of mantissa that the factors of products keep, 11 with TF32; None for ONNX Runtime on a CPU, with which
        other runtimes are compared."""
        ...

    def observe(self, batch: Array) -> Observation:
        """Run an image, and count |x| of every tap.

        One image at a time: kernels sum in another order for other batch sizes, and the last bits that this changes can
        move a value into the next bin. So histograms depend on the images alone.

        Args:
            batch: Fits `inputs[0]`, e.g. float32 (1, 3, H, W).

        Raises EngineError:
            engine.batch   a batch of another shape or dtype
            engine.run     the runtime fails on it
            engine.closed  `close` was called

        Raises DeviceError when the GPU fails.
        """
        ...


class Backend(Protocol):
    """Build, load and observe engines with one inference runtime."""

    name: str  # name of the runtime, as engines/registry.py opens it
    engine_file: str  # name of the engine's file inside an artefact
    precisions: Sequence[str]  # float ones that it executes beside int8: the reference's first, the fastest last
    int8_must_gain: bool  # INT8 that is slower than float is of no use here, whatever memory it saves
    takes_unsigned: bool  # activations may be uint8, which tensors that are never negative then are

    @property
    def weight_bits(self) -> int:
        """Bits of weights in INT8: 8, or 7 where the processor's products of eight would saturate."""
        ...

    def describe(self) -> Mapping[str, str]:
        """Return the runtime's name and version, and everything else that makes an engine unusable elsewhere.

        It is part of an engine's fingerprint.
        """
        ...

    def flags(self) -> Mapping[str, str]:
        """Return the builder's options besides the request, e.g. {"best": "True"}; part of the fingerprint too."""
        ...

    def build(self, request: BuildRequest, progress: Progress = silent) -> Built:
        """Compile a graph.

        Args:
            request: The graph, its precision and its shapes.
            progress: Called with the fraction done and what is being done. An exception that it raises cancels the
                build.

        Raises EngineError for a graph that the runtime does not compile, and whatever `progress` raises.
        """
        ...

    def load(self, engine: bytes) -> Engine:
        """Load an engine.

        Args:
            engine: The bytes of `Built.engine`, verified by the store: an engine is code.

        Raises EngineError for an engine that this runtime does not load, DeviceError when the GPU fails.
        """
        ...

    def observer(
        self, request: BuildRequest, taps: Sequence[str], progress: Progress = silent, layers: Sequence[str] = ()
    ) -> Observer:
        """Open a float reference graph with histogram taps.

        Args:
            request: The float graph, its precision and its shapes.
            taps: Names of the tensors to observe.
            progress: Called with the fraction done and what is being done. An exception that it raises cancels the
                build.
            layers: Layers whose input's extremes are observed, channel by channel; as for `expose_extremes`.

        Raises EngineError for a graph that the runtime does not compile, and whatever `progress` raises.
        """
        ...


@dataclass(frozen=True)
class BackendOptions:
    """State how a runtime shall work on this machine.

    Args:
        threads: The most CPU threads that it uses.
        cache: Folder for what makes the next build faster; None: nothing is kept.
        key: Signs and verifies what is kept there; None: damage is found, forgery is not.
        target: The GPU to build for, "sm86", on a machine that need not have it; None: the GPU of this machine. Such an
            engine proves that the builder takes the model, and is never served.
        dla: Number of the DLA core to build for, with the GPU for what it cannot run, FP32 engines among them; None:
            the GPU alone.
        best: True to search longest for the fastest kernels.
        unsigned: True if ONNX Runtime simulates INT8 of a runtime that takes uint8, too.
        weight_bits: Bits of the weights that ONNX Runtime simulates, 7 or 8.
        reference: "onnxruntime" takes ONNX Runtime for the float reference, for a runtime that does not compute what
            ONNX Runtime does; "own": the runtime itself.
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
        """Check that no option is set that only a GPU's runtime has.

        Args:
            backend: Name of the runtime on the CPU.

        Raises EngineError (`backend.option`), which names the options, if there are any.
        """
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
class OverlappingEngine(Engine, Protocol):
    """Preprocess frames where the engine's input lies, and take the next one while one is computed.

    A few may be under way.
    """

    def start_image(self, frame: NDArray[np.uint8], transform: ImageTransform) -> int:
        """Start a frame, which may change as soon as this returns; return its ticket.

        Args:
            frame: BGR uint8 (frame_height, frame_width, 3), contiguous or a view.
            transform: How the frame becomes the network input.
        """
        ...

    def start(self, batch: Array) -> int:
        """Start a batch as for `infer`, which may change as soon as this returns; return its ticket."""
        ...

    def is_done(self, ticket: int) -> bool:
        """Return True if `finish` need not wait. Called from the thread that started it."""
        ...

    def finish(self, ticket: int) -> dict[str, Array]:
        """Wait for the outputs of a frame or a batch, and return them by name.

        Args:
            ticket: The oldest one that is not finished: results come in the order of the starts.
        """
        ...


@runtime_checkable
class ProfiledEngine(Engine, Protocol):
    """Measure the time of each layer of the engine."""

    def layer_times_ms(self, batch: Array, runs: int = 20) -> dict[str, float]:
        """Return the median time in ms of every layer, by the names of the layer table.

        Args:
            batch: Fits `inputs[0]`.
            runs: Number of inferences.
        """
        ...

    def layer_nodes(self) -> Mapping[str, tuple[str, ...]]:
        """Return the ONNX nodes behind each layer, by the names of the layer table; none if they are unknown."""
        ...


@runtime_checkable
class EntropySearch(Protocol):
    """Run the threshold search of method `entropy` on the backend's GPU."""

    def search_entropy(self, counts: NDArray[np.int64], windows: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return how many bins to keep of each histogram, the same as calibrate.threshold chooses on the CPU.

        Args:
            counts: int64 (tensors, bins).
            windows: int32 (tensors, 2), the fewest and the most bins that may be kept, as `entropy_window` returns
                them.

        Returns:
            int32 (tensors,).

        Raises DeviceError when the GPU fails, EngineError `engine.target` where there is none.
        """
        ...
