"""Observe a reference graph on the GPU: its outputs, and histograms of every tap, counted where the tensors lie.

TensorRtObserver is the observer. `open_reference` builds its engines, or takes them from the cache. There are two ways
to see the taps: a debug listener, and further outputs. The first whose values equal ONNX Runtime's is used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto

from calibrate.histogram import AbsHistogram, merge
from engines.cuda.gpu import Gpu
from engines.errors import EngineError
from engines.graph.load import canonical_hash, image_input, trial_image
from engines.graph.taps import element_counts, expose
from engines.graph.topology import Topology
from engines.interface import Array, BuildRequest, Observation, Progress
from engines.onnxruntime_backend import OnnxRuntimeEngine
from engines.store.artefact import Store, find_artefact, write_artefact
from engines.trt.release import TensorRtRelease
from engines.trt.taps import ListeningProbe, OutputProbe, Probe, Sight

log = logging.getLogger(__package__)

_CHUNK = 16  # taps that one engine has as outputs: each lies in memory of its own while an image is observed
_LISTENING, _OUTPUTS = "debug listener", "outputs"
_LEAST_SQNR_DB = 30.0  # TF32 products keep 10 bits, so some 50 dB are left of FP32 after a deep network


class TensorRtObserver:
    """Observer on one or more engines that together see every tap; the first one gives the outputs.

    It runs image by image, as ONNX Runtime's does: histograms depend on the images alone. Any size may be observed that
    a profile allows.
    """

    def __init__(self, reference: ModelProto, taps: Sequence[str], probes: Sequence[Probe]) -> None:
        self.taps = tuple(taps)
        self._reference = reference
        self._probes = list(probes)
        self.inputs = self._probes[0].inputs
        self.outputs = self._probes[0].outputs
        self._elements: dict[tuple[int, ...], Mapping[str, int | None]] = {}
        self._step = self.inputs[0].shape[0] or 1

    def observe(self, batch: Array) -> Observation:
        """Batch (N, C, H, W), N a multiple of a fixed batch size.

        Raises EngineError: `observer.taps` when a tap is missing, or has other values than its shape says;
        `observer.listener`; as Session.start.
        """
        histograms: dict[str, AbsHistogram] = {}
        parts: list[dict[str, Array]] = []
        for start in range(0, len(batch), self._step):
            sight = self._see(batch[start : start + self._step])
            parts.append(sight.outputs)
            for tap, found in sight.histograms.items():
                histograms[tap] = merge(histograms[tap], found) if tap in histograms else found
        return Observation(self._joined(parts), histograms)

    def infer(self, batch: Array) -> dict[str, Array]:
        """As `observe`, without the taps."""
        steps = range(0, len(batch), self._step)
        return self._joined([self._probes[0].infer(batch[start : start + self._step]) for start in steps])

    def verify(self, image: Array) -> None:
        """Compare outputs and a few taps with ONNX Runtime's on one image (N, C, H, W), N the fixed batch size or 1.

        Raises EngineError (`observer.mismatch`) where they are less alike than TF32 explains, and as `observe`.
        """
        compared = {self.taps[index] for index in (0, len(self.taps) // 2, -1)} if self.taps else set()
        sight = self._see(image, compared)
        exposed = expose(self._reference, sorted(compared)).SerializeToString()
        reference = OnnxRuntimeEngine(exposed, threads=1)
        expected = {reference.inputs[0].name: image, **reference.infer(image)}
        reference.close()
        for name, found in {**sight.outputs, **sight.values}.items():
            alike_db = _sqnr_db(expected[name], found)
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
        sights = [probe.see(image, copied) for probe in self._probes]
        histograms = {tap: found for sight in sights for tap, found in sight.histograms.items()}
        values = {tap: found for sight in sights for tap, found in sight.values.items()}
        self._check(image.shape, histograms)
        return Sight(sights[0].outputs, {tap: histograms[tap] for tap in self.taps}, values)

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

    def _joined(self, parts: Sequence[dict[str, Array]]) -> dict[str, Array]:
        if len(parts) == 1:
            return parts[0]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _sqnr_db(expected: Array, actual: Array) -> float:
    """Return signal to difference in dB; minus infinity if shapes or non-finite values differ."""
    a, b = expected.astype(np.float64).ravel(), actual.astype(np.float64).ravel()
    if expected.shape != actual.shape or not np.array_equal(np.isfinite(a), np.isfinite(b)):
        return -np.inf
    a, b = a[np.isfinite(a)], b[np.isfinite(b)]
    noise, signal = float(np.sum((a - b) ** 2)), float(np.sum(a**2))
    return np.inf if noise == 0.0 else float(10.0 * np.log10(signal / noise)) if signal else -np.inf


Names = Sequence[str]
Marked = tuple[Names, Names]  # debug tensors, further outputs
Build = Callable[[Names, Names, Progress], bytes]  # the engine of a graph with tensors so marked


@dataclass(frozen=True)
class Reference:
    """Everything that a reference engine depends on, and where it is kept.

    build: builds the reference graph with tensors marked.
    described: the facts that make an engine unusable elsewhere.
    store: keeps the engines for the next start; None keeps nothing.
    """

    release: TensorRtRelease
    gpu: Gpu
    request: BuildRequest
    taps: tuple[str, ...]
    build: Build
    described: Mapping[str, str]
    store: Store | None


def open_reference(reference: Reference, progress: Progress) -> TensorRtObserver:
    """The observer, from what is kept of an earlier start or else built and verified.

    Raises EngineError as the builder and `TensorRtObserver.verify`, when no way to see the taps proved right.
    """
    if reference.store is None:
        return _verified(reference, progress)[2]
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
            engines = [kept.read_file(name) for name in kept.manifest["engines"]]
            return _observer(reference, str(kept.manifest["way"]), engines)
        except EngineError as error:
            if error.code != "engine.unreadable":  # what another libnvinfer than before refuses, under the same version
                raise
            log.warning("event=observer problem=%r", str(error))
        reference.store.discard(path)
    way, engines, observer = _verified(reference, progress)
    try:
        write_artefact(path, inputs, partial(_fill, way, engines), key)
    except EngineError as error:  # a full disk costs the next start its time, and no more
        log.warning("event=observer problem=%r", str(error))
    return observer


def _verified(reference: Reference, progress: Progress) -> tuple[str, list[bytes], TensorRtObserver]:
    """Build the engines of the first way to see the taps that gives ONNX Runtime's values."""
    inner = _inner_taps(reference)
    ways: dict[str, list[Marked]] = {_LISTENING: [(inner, ())], _OUTPUTS: [((), chunk) for chunk in _chunks(inner)]}
    for way, marked in ways.items():
        try:
            engines = [
                reference.build(debug, outputs, _part(progress, index, len(marked)))
                for index, (debug, outputs) in enumerate(marked)
            ]
            observer = _observer(reference, way, engines)
            try:
                observer.verify(trial_image(reference.request.graph, _trial_shape(reference.request)))
            except BaseException:
                observer.close()
                raise
            break
        except EngineError as error:
            log.warning("event=observer way=%r problem=%r", way, str(error))
            if way == _OUTPUTS:
                raise
    return way, engines, observer


def _observer(reference: Reference, way: str, engines: Sequence[bytes]) -> TensorRtObserver:
    release, gpu, taps = reference.release, reference.gpu, reference.taps
    if way == _LISTENING:
        probes: list[Probe] = [ListeningProbe(release, gpu, engines[0], taps)]
    else:
        probes = []
        try:
            for engine, chunk in zip(engines, _chunks(_inner_taps(reference)), strict=True):
                probes.append(OutputProbe(release, gpu, engine, taps, chunk))
        except BaseException:
            for probe in probes:
                probe.close()
            raise
    return TensorRtObserver(reference.request.graph, taps, probes)


def _inner_taps(reference: Reference) -> tuple[str, ...]:
    """Return the taps that are neither inputs nor outputs of the model: these have to be marked."""
    topology = Topology(reference.request.graph)
    visible = {*topology.inputs, *topology.outputs}
    return tuple(tap for tap in reference.taps if tap not in visible)


def _chunks(taps: Sequence[str]) -> list[Sequence[str]]:
    return [taps[start : start + _CHUNK] for start in range(0, max(len(taps), 1), _CHUNK)]


def _part(progress: Progress, index: int, parts: int) -> Progress:
    """Return the progress of one engine of several."""
    return lambda fraction, doing: progress((index + fraction) / parts, doing)


def _trial_shape(request: BuildRequest) -> Sequence[int] | None:
    opt = request.profiles[0][image_input(request.graph).name].opt if request.profiles else None
    return request.input_shape or opt


def _fill(way: str, engines: Sequence[bytes], folder: Path) -> Mapping[str, Any]:
    names = [f"reference.{index}.engine" for index in range(len(engines))]
    for name, content in zip(names, engines, strict=True):
        (folder / name).write_bytes(content)
    return {"way": way, "engine": names[0], "engines": names}
