"""Run one engine: queue batches on a stream, and collect their outputs.

A Session has one execution context and several Slots. A Slot is the memory of one batch under way, the event that ends
it and, where that is faster, its captured graph. TensorRtEngine is a Session that preprocesses frames on the device.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engines.cuda.cuda_graph import CudaGraph, faster_graph
from engines.cuda.gpu import DeviceMemory, Gpu, HostMemory
from engines.cuda.kernels import CudaExecutor, DevicePreprocess
from engines.errors import EngineError
from engines.interface import Array, TensorSpec, closed_engine
from engines.preprocessing import ImageTransform
from engines.trace import span
from engines.trt.api import ICudaEngine, IExecutionContext, Runtime, implement
from engines.trt.layers import Layer, layers_from_inspector, nodes_by_layer
from engines.trt.log import messages
from engines.trt.release import TensorRtRelease

_WARM_UP = 3  # runs that are not timed: clocks rise, kernels are loaded

Shape = tuple[int, ...]


class Slot:
    """The memory of one batch under way, and the event that ends it.

    sizes: bytes of each input and output.
    inputs: their memory is not mapped, since the GPU reads it more than once.
    hidden: outputs that only the GPU has.
    """

    def __init__(self, gpu: Gpu, sizes: Mapping[str, int], inputs: Collection[str], hidden: Collection[str]) -> None:
        shown = {name: nbytes for name, nbytes in sizes.items() if name not in hidden}
        self.memory = {name: HostMemory(gpu, nbytes, mapped=name not in inputs) for name, nbytes in shown.items()}
        self._hidden = {name: DeviceMemory(gpu, sizes[name]) for name in hidden}
        self.event: Any = gpu.driver.Event()
        self.shapes: dict[str, Shape] = {}
        self.pending = False
        self.graph: CudaGraph | None = None

    def close(self) -> None:
        """Give everything back now: an error under way may still hold this. The context must be current."""
        self.memory.clear()
        self._hidden.clear()
        self.event = None

    def address(self, name: str) -> int:
        """Return the address at which the GPU finds an input or output."""
        return (self._hidden[name] if name in self._hidden else self.memory[name]).address


Range = tuple[Shape, Shape, Shape]  # smallest, best and largest shape of an optimization profile


class Session:
    """Hold one engine, one execution context, one stream; one thread at a time.

    All memory of the GPU is allocated here, for the largest shapes of all profiles, and none for a frame.

    Args:
        release: The opened TensorRT.
        gpu: The GPU to load onto.
        content: The engine's bytes.
        slots: Batches under way at once: the next is uploaded while one is computed.
        hidden: Outputs that stay on the device.

    Raises DeviceError when the GPU fails, and EngineError:
        engine.unreadable  damaged, of another release, or of another GPU; the message is the log's
        engine.memory      too little memory for the activations
        engine.output      an output whose size depends on values
    """

    def __init__(
        self, release: TensorRtRelease, gpu: Gpu, content: bytes, slots: int = 2, hidden: Collection[str] = ()
    ) -> None:
        self._release = release
        self._gpu = gpu
        self._log = messages(release)
        self._slots: list[Slot] = []
        self._selected: tuple[int, Shape] | None = None
        self._shapes: dict[str, Shape] = {}
        self._next = 0
        self._closed = False
        with gpu.current():
            try:
                self._open(content, slots, hidden)
            except BaseException:
                self._free()
                raise

    def _open(self, content: bytes, slots: int, hidden: Collection[str]) -> None:
        self._runtime: Runtime = self._log.create(self._release.trt.Runtime)
        self.engine: ICudaEngine = self._deserialise(content)
        self.stream = self._gpu.stream()
        self.context = self._create_context()
        self.inputs: list[TensorSpec] = []
        outputs: list[TensorSpec] = []
        trt = self._release.trt
        for index in range(self.engine.num_io_tensors):
            name = self.engine.get_tensor_name(index)
            dtype = np.dtype(trt.nptype(self.engine.get_tensor_dtype(name)))
            shape = tuple(size if size >= 0 else None for size in self.engine.get_tensor_shape(name))
            is_input = self.engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT
            (self.inputs if is_input else outputs).append(TensorSpec(name, dtype, shape))
        self.outputs = [spec for spec in outputs if spec.name not in hidden]
        self._tensors = (*self.inputs, *outputs)
        self._image = self.inputs[0]
        self._ranges: list[Range] = []
        for index in range(self.engine.num_optimization_profiles):
            low, best, high = self.engine.get_tensor_profile_shape(self._image.name, index)
            self._ranges.append((tuple(low), tuple(best), tuple(high)))
        sizes = dict.fromkeys((spec.name for spec in self._tensors), 0)  # bytes at the largest shape of any profile
        for profile, (_, _, high) in enumerate(self._ranges):
            self._use_profile(profile)
            shapes = self._shapes_for(high)
            for spec in self._tensors:
                sizes[spec.name] = max(sizes[spec.name], int(np.prod(shapes[spec.name])) * spec.dtype.itemsize)
        self._slots = [Slot(self._gpu, sizes, {self._image.name}, hidden) for _ in range(slots)]

    def start(self, batch: Array) -> int:
        """Queue a batch; returns its ticket for `finish`. The batch may change as soon as this returns.

        Raises EngineError: `engine.batch` (a shape no profile has, or another type), `engine.run`, `engine.closed`.
        """
        with self._gpu.current():
            self.select(batch.shape, batch.dtype)
            memory = self.free_slot().memory[self._image.name]
            np.copyto(memory.array(batch.shape, batch.dtype), batch)
            memory.upload(batch.nbytes, self.stream)
            return self.enqueue()

    def infer(self, batch: Array) -> dict[str, Array]:
        """Run a batch; return the outputs by name. Raises EngineError and DeviceError as `start`."""
        return self.finish(self.start(batch))

    def select(self, shape: Sequence[int], dtype: np.dtype[np.generic]) -> None:
        """Make the engine ready for inputs of a shape; does nothing when it is."""
        if self._closed:
            raise closed_engine()
        requested = tuple(shape)
        if self._selected is not None and self._selected[1] == requested and dtype == self._image.dtype:
            return
        profile = self._profile_of(requested, dtype)
        if self._selected is None or self._selected[0] != profile:
            self._use_profile(profile)
        self._shapes = self._shapes_for(requested)
        self._selected = profile, requested

    def free_slot(self) -> Slot:
        """Return the slot whose input the next `enqueue` reads. Raises RuntimeError if its batch is still under way."""
        slot = self._slots[self._next]
        if slot.pending:
            raise RuntimeError(f"{len(self._slots)} batches under way, and none of them finished")
        return slot

    def enqueue(self) -> int:
        """Queue the engine on the free slot's input, and return the ticket. The context must be current."""
        ticket, slot = self._next, self._slots[self._next]
        if slot.graph is None:
            self._execute(slot)
        else:
            slot.graph.launch()
        for spec in self.outputs:
            nbytes = int(np.prod(self._shapes[spec.name])) * spec.dtype.itemsize
            slot.memory[spec.name].download(nbytes, self.stream)
        slot.event.record(self.stream)  # the batch is done when the stream is past this point
        slot.pending, slot.shapes = True, self._shapes
        self._next = (ticket + 1) % len(self._slots)
        return ticket

    def warm_up(self) -> None:
        """Run an engine of one shape before it serves: kernels are loaded, and captured where that is faster."""
        (low, _, high), *others = self._ranges
        if others or low != high:
            return
        with self._gpu.current():
            self.select(low, self._image.dtype)
            for slot in self._slots:
                self._execute(slot)
                self.synchronise()
                slot.graph = faster_graph(self.stream, partial(self._execute, slot))

    def drop_graphs(self) -> None:
        """Continue without captured graphs, in which layers cannot be distinguished."""
        with self._gpu.current():
            self.synchronise()
            for slot in self._slots:
                if slot.graph is not None:
                    slot.graph.close()
                    slot.graph = None

    def _execute(self, slot: Slot) -> None:
        for spec in self._tensors:
            self.context.set_tensor_address(spec.name, slot.address(spec.name))
        with self._log.recorded() as record:
            done = self.context.execute_async_v3(self.stream.handle)
        if not done:  # for an address that was refused, too
            remedy = "restart the process: after a fault its context is lost"
            raise EngineError("engine.run", record.last_error, "an inference", remedy)

    def is_done(self, ticket: int) -> bool:
        """Return True if a started batch has been computed and lies on the host."""
        with self._gpu.current(), self._gpu.working("an inference that is polled"):
            return bool(self._slots[ticket].event.query())

    def finish(self, ticket: int) -> dict[str, Array]:
        """Wait for the outputs of a started batch, and return them by name, in memory of their own."""
        slot = self._slots[ticket]
        with self._gpu.current(), self._gpu.working("an inference that ends"):
            slot.event.synchronize()
        slot.pending = False
        return {
            spec.name: slot.memory[spec.name].array(slot.shapes[spec.name], spec.dtype).copy() for spec in self.outputs
        }

    def zeros(self) -> Array:
        """Return a batch of zeros of the shape that the first profile is tuned for."""
        return np.zeros(self._ranges[0][1], self._image.dtype)

    def layers(self) -> list[Layer]:
        """Return the engine inspector's list. Raises EngineError as `layers_from_inspector`."""
        with self._gpu.current():
            inspector = self.engine.create_engine_inspector()
            return layers_from_inspector(
                inspector.get_engine_information(self._release.trt.LayerInformationFormat.JSON)
            )

    def layer_times_ms(self, batch: Array, runs: int = 20) -> dict[str, float]:
        """Return the median time in ms of every layer, by name, over `runs` inferences of one batch.

        TensorRT waits for every layer meanwhile, so their sum is more than an inference without a profiler takes.
        Raises EngineError and DeviceError as `start`.
        """
        times: dict[str, list[float]] = {}

        def report(layer: str, milliseconds: float) -> None:
            times.setdefault(layer, []).append(milliseconds)

        self.drop_graphs()
        self.context.profiler = implement(self._release.trt.IProfiler, report_layer_time=report)
        for _ in range(_WARM_UP + runs):
            self.infer(batch)
        self.context.profiler = None
        return {layer: median(values[_WARM_UP:]) for layer, values in times.items() if len(values) > _WARM_UP}

    def synchronise(self) -> None:
        """Wait until nothing is under way. The context must be current."""
        with self._gpu.working("an engine that comes to rest"):
            self.stream.synchronize()

    def close(self) -> None:
        """Free what belongs to the context while it is current: context before engine before runtime."""
        if self._closed:
            return
        self._closed = True
        with self._gpu.current():
            try:
                self.drop_graphs()
            finally:
                self._free()

    def _free(self) -> None:
        """Drop what there is, users before what they use. The context must be current."""
        for slot in self._slots:
            slot.close()
        for name in ("context", "stream", "engine", "_runtime"):
            with suppress(AttributeError):  # each of them only if it came that far
                delattr(self, name)

    def _create_context(self) -> IExecutionContext:
        """In a frame of its own: an error that `_open` raises later must not keep the context from being freed."""
        with self._log.recorded() as record:
            context = self.engine.create_execution_context()
        if context is None:
            raise EngineError(
                "engine.memory", record.last_error, "memory for the engine's activations", "free memory on the GPU"
            )
        return context

    def _deserialise(self, content: bytes) -> ICudaEngine:
        with self._log.recorded() as record:
            engine: ICudaEngine | None = self._runtime.deserialize_cuda_engine(content)
        if engine is None:
            raise EngineError(
                "engine.unreadable",
                record.last_error,
                f"an engine of {self._release.name} for this GPU",
                "build it again on this board",
            )
        return engine

    def _profile_of(self, shape: Shape, dtype: np.dtype[np.generic]) -> int:
        for index, (low, _, high) in enumerate(self._ranges):
            fits = len(shape) == len(low) and all(a <= b <= c for a, b, c in zip(low, shape, high, strict=True))
            if fits and dtype == self._image.dtype:
                return index
        ranges = " or ".join(f"{list(low)} to {list(high)}" for low, _, high in self._ranges)
        raise EngineError(
            "engine.batch",
            f"{dtype} {list(shape)}",
            f"{self._image.dtype} {ranges} for input '{self._image.name}'",
            "preprocess images for this engine's input, or add a profile to the model spec",
        )

    def _use_profile(self, profile: int) -> None:
        if not self.context.set_optimization_profile_async(profile, self.stream.handle):
            raise EngineError("engine.profile", f"profile {profile}", "a profile of the engine", "build it again")
        self.synchronise()

    def _shapes_for(self, shape: Shape) -> dict[str, Shape]:
        """Return the shape of every input and output for an input of `shape`."""
        if not self.context.set_input_shape(self._image.name, shape):
            raise EngineError("engine.batch", f"shape {list(shape)}", "a shape that the engine takes", "build it again")
        shapes = {spec.name: tuple(self.context.get_tensor_shape(spec.name)) for spec in self._tensors}
        for name, found in shapes.items():
            if any(size < 0 for size in found):
                raise EngineError(
                    "engine.output",
                    f"output '{name}' of shape {list(found)}, which depends on values",
                    "outputs whose shapes follow from the input's",
                    "export the model without NonZero and NonMaxSuppression; the decoder suppresses boxes",
                )
        return shapes


class TensorRtEngine(Session):
    """OverlappingEngine: a frame's bytes are uploaded as they are, a quarter of what its float32 input weighs.

    Raises EngineError and DeviceError as Session; DeviceError (`cuda.compiler`) where the kernels cannot be compiled.
    """

    def __init__(self, release: TensorRtRelease, gpu: Gpu, content: bytes) -> None:
        super().__init__(release, gpu, content)
        self._frame_bytes = 0
        self._frames: list[HostMemory] = []
        try:
            with gpu.current():  # here and not at the first frame, which would wait for nvcc
                self._executor = CudaExecutor(gpu)
                self._preprocess: DevicePreprocess | None = DevicePreprocess(self._executor)
            self.warm_up()
        except BaseException:
            self.close()
            raise

    def start_image(self, frame: NDArray[np.uint8], transform: ImageTransform) -> int:
        """Queue a BGR frame uint8 (H, W, 3), preprocessed on the device; return its ticket for `finish`.

        Raises EngineError and DeviceError as `start`.
        """
        with self._gpu.current():
            self.select(transform.input_shape, np.dtype(transform.dtype))
            slot = self.free_slot()
            assert self._preprocess is not None  # until it is closed, and then `select` has refused
            with span("preprocess"):
                nbytes = transform.frame_height * transform.frame_width * 3
                if nbytes > self._frame_bytes:  # the largest so far: those of several cameras may take turns
                    self.synchronise()  # smaller frames may still be read
                    self._frames = [HostMemory(self._gpu, nbytes) for _ in self._slots]
                    self._frame_bytes = nbytes
                if not self._preprocess.has_room(transform):
                    self.synchronise()
                memory = self._frames[self._next]
                np.copyto(memory.array(frame.shape, np.uint8), frame)
                memory.upload(frame.nbytes, self.stream)
                self._preprocess.run(transform, memory.address, slot.address(self._image.name), self.stream)
            return self.enqueue()

    def layer_nodes(self) -> Mapping[str, tuple[str, ...]]:
        """By the engine inspector. Raises EngineError as `layers_from_inspector`."""
        return nodes_by_layer(self.layers())

    def close(self) -> None:
        """Free everything, idempotent."""
        with ExitStack() as stack:
            stack.callback(super().close)
            if not self._closed:
                stack.enter_context(self._gpu.current())
                stack.callback(self._free_frames)
                self.synchronise()

    def _free_frames(self) -> None:
        self._frames.clear()
        self._preprocess = None
        with suppress(AttributeError):  # if it could not be compiled
            self._executor.close()
