"""Observe a reference graph on the GPU: its outputs, and histograms of every tap, counted where the tensors lie.

TensorRtObserver is the observer. `open_reference` builds its engines, or takes them from the cache. There are two ways
to see tensors inside an engine: a debug listener (ListeningProbe), and further outputs (OutputProbe). The first whose
values equal ONNX Runtime's is used.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto

from calibrate.errors import TaredError
from calibrate.histogram import AbsHistogram
from calibrate.noise import sqnr_db
from engines.cuda.gpu import Gpu
from engines.cuda.kernels import CudaExecutor, DeviceHistograms
from engines.errors import EngineError
from engines.graph.load import canonical_hash, image_input, trial_image
from engines.graph.taps import ExtremesOutput, element_counts, expose
from engines.graph.topology import Topology
from engines.interface import Array, BuildRequest, Observation, Progress
from engines.onnxruntime_backend import OnnxRuntimeEngine
from engines.store.artefact import Store, find_artefact, write_artefact
from engines.trt.api import implement
from engines.trt.release import TensorRtRelease
from engines.trt.session import Session

log = logging.getLogger(__package__)

_CHUNK = 16  # taps that one engine has as outputs: each lies in memory of its own while an image is observed
_LISTENING, _OUTPUTS = "debug listener", "outputs"
_LEAST_SQNR_DB = 30.0  # TF32 products keep 10 bits, so some 50 dB are left of FP32 after a deep network

_POINTER = ctypes.pythonapi.PyCapsule_GetPointer
_POINTER.restype, _POINTER.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


@dataclass
class Sight:
    """A view of one image: the model's outputs, a histogram per tap, and the values of the taps to be `copied`."""

    copied: Collection[str]
    outputs: dict[str, Array] = field(default_factory=dict)
    histograms: dict[str, AbsHistogram] = field(default_factory=dict)
    values: dict[str, Array] = field(default_factory=dict)


class OutputProbe(Session):
    """One engine with taps among its inputs and outputs. One thread at a time.

    Every tap that is `added` to the model's own outputs is written to memory of its own on every inference.
    """

    def __init__(
        self, release: TensorRtRelease, gpu: Gpu, content: bytes, taps: Sequence[str], added: Collection[str] = ()
    ) -> None:
        super().__init__(release, gpu, content, slots=1, hidden=added)
        visible = {spec.name for spec in self._tensors}
        self._visible = [tap for tap in taps if tap in visible]
        self._known: dict[tuple[str, int], DeviceHistograms] = {}
        try:
            with gpu.current():
                self._executor = CudaExecutor(gpu)
        except BaseException:
            super().close()
            raise

    def see(self, image: Array, copied: Collection[str] = ()) -> Sight:
        """Infer one image, or one batch of a model whose batch is fixed. Raises as `start`."""
        ticket = self.start(image)
        sight = Sight(copied, self.finish(ticket))
        self._count_visible(sight, ticket)
        return sight

    def close(self) -> None:
        """Free everything, idempotent."""
        if not self._closed:
            with self._gpu.current():
                self._executor.close()
        super().close()

    def _count_visible(self, sight: Sight, ticket: int) -> None:
        """Count the taps that are inputs or outputs, of a batch that is done and still in its slot."""
        with self._gpu.current():
            for tap in self._visible:
                self._count(sight, tap, self._slots[ticket].address(tap), self._shapes[tap])

    def _count(self, sight: Sight, tap: str, address: int, shape: tuple[int, ...]) -> None:
        """Count float32 values on the device; waits for the stream. The guess of a range is kept per tap and size."""
        known, elements = self._known, prod(shape)
        if (tap, elements) not in known:
            known[tap, elements] = DeviceHistograms(self._executor, [elements], [np.dtype(np.float32)])
        (sight.histograms[tap],) = known[tap, elements].collect([address], self.stream)
        if tap in sight.copied:
            sight.values[tap] = np.empty(shape, np.float32)
            with self._gpu.working("a tap that is copied"):
                self._gpu.driver.memcpy_dtoh_async(sight.values[tap], address, self.stream)
                self.stream.synchronize()


class ListeningProbe(OutputProbe):
    """Taps marked as debug tensors: they cost nothing while nobody listens, but the fusing of what makes them.

    TensorRT calls `_receive` with every debug tensor while it lies on the device. The bindings swallow what that raises
    and report success: the first error is kept, and `see` raises it after the inference.
    """

    def __init__(
        self, release: TensorRtRelease, gpu: Gpu, content: bytes, taps: Sequence[str], added: Collection[str] = ()
    ) -> None:
        super().__init__(release, gpu, content, taps, added)
        self._sight = Sight(())
        self._error: BaseException | None = None
        self._listening: bool | None = None
        self._listener = implement(release.trt.IDebugListener, process_debug_tensor=self._receive)
        with gpu.current():
            set_up = self.context.set_debug_listener(self._listener)
        if not set_up:
            self.close()
            raise EngineError(
                "observer.listener",
                "a debug listener that TensorRT refused",
                "set_debug_listener to return True",
                "report this release of TensorRT",
            )

    def see(self, image: Array, copied: Collection[str] = ()) -> Sight:
        """Infer one image; the listener counts the tensors as they are computed.

        Raises EngineError and DeviceError as `start` does, EngineError (`observer.listener`), and an interrupt as it
        is.
        """
        self._listen(True)
        self._sight, self._error = Sight(copied), None
        ticket = self.start(image)
        self._sight.outputs = self.finish(ticket)
        self._raise_what_was_kept()
        self._count_visible(self._sight, ticket)
        return self._sight

    def infer(self, batch: Array) -> dict[str, Array]:
        self._listen(False)
        return super().infer(batch)

    def close(self) -> None:
        """Free everything, idempotent."""
        self._listener = None  # it holds this
        super().close()

    def _raise_what_was_kept(self) -> None:
        error, self._error = self._error, None
        try:
            if isinstance(error, TaredError) or not isinstance(error, Exception | None):
                raise error
            if error is not None:
                found = f"{type(error).__name__} while the taps were counted: {error}"
                raise EngineError("observer.listener", found, "a histogram of every tap", "report it") from error
        finally:
            del error  # it holds this frame, which holds the engine: in a cycle it would be freed without a context

    def _listen(self, on: bool) -> None:
        if on != self._listening:
            with self._gpu.current():
                self.context.set_all_tensors_debug_state(on)
            self._listening = on

    def _receive(self, capsule: Any, location: Any, dtype: Any, shape: Any, name: str, stream: int) -> bool:
        try:
            trt = self._release.trt
            kind = np.dtype(trt.nptype(dtype))
            if location != trt.TensorLocation.DEVICE or kind != np.float32:
                raise TypeError(f"tensor '{name}' is {kind} at {location}, expected float32 on the device")
            with self._gpu.current():
                if stream != self.stream.handle:  # PyCUDA cannot adopt another's stream, only wait for everything
                    self._gpu.driver.Context.synchronize()
                # The bindings hand out a void pointer as a capsule without a name.
                address = capsule if isinstance(capsule, int) else int(_POINTER(capsule, None) or 0)
                self._count(self._sight, name, address, tuple(shape))
        except BaseException as error:
            log.debug("event=listener", exc_info=error)
            without_frames = error.with_traceback(None)  # they would keep the engine alive
            self._error = self._error or without_frames
        return True


class TensorRtObserver:
    """Observer on one or more engines that together see every tap; the first one gives the outputs.

    Any size may be observed that a profile allows.
    """

    product_bits: int | None = 11  # TF32's

    def __init__(
        self, reference: ModelProto, taps: Sequence[str], extremes: ExtremesOutput, probes: Sequence[OutputProbe]
    ) -> None:
        self.taps = tuple(taps)
        self._reference = reference
        self._extremes = extremes
        self._probes = list(probes)
        self.inputs = self._probes[0].inputs
        self.outputs = [output for output in self._probes[0].outputs if output.name != extremes.name]
        self._elements: dict[tuple[int, ...], Mapping[str, int | None]] = {}

    def observe(self, batch: Array) -> Observation:
        """Observe an image.

        Raises EngineError: `observer.taps` when a tap is missing, or has other values than its shape says;
        `observer.listener`; as Session.start.
        """
        sight = self._see(batch)
        extremes = self._extremes.take_from(sight.outputs)
        return Observation(sight.outputs, sight.histograms, extremes)

    def infer(self, batch: Array) -> dict[str, Array]:
        """Return the reference outputs as `observe` does, without the taps; of several images, one after the other."""
        rows = [self._probes[0].infer(batch[row : row + 1]) for row in range(len(batch))]
        outputs = rows[0] if len(rows) == 1 else {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
        outputs.pop(self._extremes.name, None)
        return outputs

    def verify(self, image: Array) -> None:
        """Compare outputs and a few taps with ONNX Runtime's on one image (1, C, H, W).

        Raises EngineError (`observer.mismatch`) where they are less alike than TF32 explains, and as `observe`.
        """
        compared = {self.taps[index] for index in (0, len(self.taps) // 2, -1)} if self.taps else set()
        sight = self._see(image, compared)
        exposed = expose(self._reference, sorted(compared)).SerializeToString()
        reference = OnnxRuntimeEngine(exposed, threads=1)
        expected = {reference.inputs[0].name: image, **reference.infer(image)}
        reference.close()
        for name, found in {**sight.outputs, **sight.values}.items():
            alike_db = sqnr_db(expected[name], found)
            if alike_db < _LEAST_SQNR_DB:
                raise EngineError(
                    "observer.mismatch",
                    f"tensor '{name}' is {alike_db:.1f} dB like ONNX Runtime's",
                    f"at least {_LEAST_SQNR_DB:.0f} dB",
                    "report the model and the versions of `tared doctor`; --backend onnxruntime calibrates meanwhile",
                )

    def close(self) -> None:
        """Free every engine, idempotent."""
        with ExitStack() as stack:  # each of them, whatever another raises
            for probe in self._probes:
                stack.callback(probe.close)

    def _see(self, image: Array, copied: Collection[str] = ()) -> Sight:
        whole, *others = (probe.see(image, copied) for probe in self._probes)
        for sight in others:
            whole.histograms |= sight.histograms
            whole.values |= sight.values
        self._check(image.shape, whole.histograms)
        whole.histograms = {tap: whole.histograms[tap] for tap in self.taps}
        return whole

    def _check(self, shape: tuple[int, ...], histograms: Mapping[str, AbsHistogram]) -> None:
        """Refuse an observation in which a tap is missing or incomplete: it would calibrate another network."""
        if shape not in self._elements:
            self._elements[shape] = element_counts(self._reference, shape, self.taps)
        for tap, expected in self._elements[shape].items():
            values = histograms[tap].total + histograms[tap].nonfinite if tap in histograms else 0
            if values == 0 or expected not in (None, values):
                raise EngineError(
                    "observer.taps",
                    f"{values} values of tensor '{tap}'",
                    f"{expected or 'some'} for an input {list(shape)}",
                    "report the model and the versions of `tared doctor`; --backend onnxruntime calibrates meanwhile",
                )


Names = Sequence[str]
Marked = tuple[Names, Names]  # debug tensors, further outputs
Build = Callable[[Names, Names, Progress], bytes]  # the engine of a graph with tensors so marked


@dataclass(frozen=True)
class Reference:
    """Everything that a reference engine depends on, and where it is kept.

    request: of the graph with the output of the extremes.
    build: builds that graph with tensors marked.
    described: the facts that make an engine unusable elsewhere.
    store: keeps the engines for the next start; None keeps nothing.
    """

    release: TensorRtRelease
    gpu: Gpu
    request: BuildRequest
    taps: tuple[str, ...]
    extremes: ExtremesOutput
    build: Build
    described: Mapping[str, str]
    store: Store | None


def open_reference(reference: Reference, progress: Progress) -> TensorRtObserver:
    """The observer, from what is kept of an earlier start or else built and verified.

    Raises EngineError as the builder and `TensorRtObserver.verify`, when no way to see the taps proved right.
    """
    if reference.store is None:
        _, _, observer = _verified(reference, progress)
        return observer
    request = reference.request
    inputs = {
        "reference": canonical_hash(request.graph),
        "taps": list(reference.taps),
        "profiles": [{name: vars(shapes) for name, shapes in profile.items()} for profile in request.profiles],
        "input_shape": request.input_shape,
        "backend": dict(reference.described),
        "chunk": _CHUNK,
    }
    path, key = reference.store.place(inputs), reference.store.key
    kept = find_artefact(path, inputs, key)
    if kept is not None:
        try:
            return _observer(
                reference, kept.manifest["way"], [kept.read_file(name) for name in kept.manifest["engines"]]
            )
        except EngineError as error:
            if error.code != "engine.unreadable":  # another libnvinfer of the same version may refuse it
                raise
            log.warning("event=observer problem=%r", str(error))
        reference.store.discard(path)
    way, engines, observer = _verified(reference, progress)

    def fill(folder: Path) -> Mapping[str, Any]:
        names = [f"reference.{index}.engine" for index in range(len(engines))]
        for name, content in zip(names, engines, strict=True):
            (folder / name).write_bytes(content)
        return {"way": way, "engine": names[0], "engines": names}

    try:
        write_artefact(path, inputs, fill, key)
    except EngineError as error:  # a full disk costs the next start its time, and no more
        log.warning("event=observer problem=%r", str(error))
    return observer


def _verified(reference: Reference, progress: Progress) -> tuple[str, list[bytes], TensorRtObserver]:
    """Build the engines of the first way to see the taps that gives ONNX Runtime's values."""
    request = reference.request
    opt = request.profiles[0][image_input(request.graph).name].opt if request.profiles else None
    image = trial_image(request.graph, request.input_shape or opt)
    for way, marked in _ways(reference).items():
        try:
            engines = [
                reference.build(debug, outputs, _part(progress, index, len(marked)))
                for index, (debug, outputs) in enumerate(marked)
            ]
            observer = _observer(reference, way, engines)
            with ExitStack() as opened:
                opened.callback(observer.close)
                observer.verify(image)
                opened.pop_all()
            break
        except EngineError as error:
            log.warning("event=observer way=%r problem=%r", way, str(error))
            if way == _OUTPUTS:
                raise
    return way, engines, observer


def _observer(reference: Reference, way: str, engines: Sequence[bytes]) -> TensorRtObserver:
    release, gpu, taps = reference.release, reference.gpu, reference.taps
    kind = ListeningProbe if way == _LISTENING else OutputProbe
    probes: list[OutputProbe] = []
    with ExitStack() as opened:
        for engine, (_, added) in zip(engines, _ways(reference)[way], strict=True):
            probes.append(opened.enter_context(closing(kind(release, gpu, engine, taps, added))))
        opened.pop_all()
    return TensorRtObserver(reference.request.graph, taps, reference.extremes, probes)


def _ways(reference: Reference) -> dict[str, list[Marked]]:
    """Return per way to see the taps what is marked in each of its engines.

    Taps that are inputs or outputs of the model need no mark.
    """
    topology = Topology(reference.request.graph)
    inner = [tap for tap in reference.taps if tap not in (*topology.inputs, *topology.outputs)]
    chunks = [inner[start : start + _CHUNK] for start in range(0, max(len(inner), 1), _CHUNK)]
    return {_LISTENING: [(inner, ())], _OUTPUTS: [((), chunk) for chunk in chunks]}


def _part(progress: Progress, index: int, parts: int) -> Progress:
    """Return the progress of one engine of several."""
    return lambda fraction, doing: progress((index + fraction) / parts, doing)
