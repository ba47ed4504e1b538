"""The reference engine: built once per model and board, verified against ONNX Runtime, kept for the next start."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from engines.artefact import find_artefact, write_artefact
from engines.backend import Array, BuildRequest, EngineError, Progress
from engines.cuda import Gpu
from engines.graph import canonical_hash, image_input, trial_image
from engines.store import Store
from engines.topology import Topology
from engines.trt.dialect import Dialect
from engines.trt.observer import TensorRtObserver
from engines.trt.probes import ListeningProbe, OutputProbe, Probe

log = logging.getLogger(__name__)

_CHUNK = 16  # taps that one engine has as outputs: each lies in memory of its own while an image is observed
_LISTENING, _OUTPUTS = "debug listener", "outputs"

Names = Sequence[str]
Marked = tuple[Names, Names]  # debug tensors, further outputs
Build = Callable[[Names, Names, Progress], bytes]  # the engine of a graph with tensors so marked


@dataclass(frozen=True)
class Reference:
    """What a reference engine follows from, and where it is kept.

    build: builds the reference graph with tensors marked. described: what makes an engine unusable elsewhere. store:
    None keeps nothing.
    """

    dialect: Dialect
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
    inputs = _inputs(reference)
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


def _inputs(reference: Reference) -> dict[str, Any]:
    """What the engines follow from."""
    request = reference.request
    return {
        "reference": canonical_hash(request.graph),
        "taps": list(reference.taps),
        "profiles": [{name: vars(shapes) for name, shapes in profile.items()} for profile in request.profiles],
        "input_shape": request.input_shape,
        "backend": dict(reference.described),
        "chunk": _CHUNK,
    }


def _verified(reference: Reference, progress: Progress) -> tuple[str, list[bytes], TensorRtObserver]:
    """The first way to see the taps that gives ONNX Runtime's values."""
    inner = _inner_taps(reference)
    ways: dict[str, list[Marked]] = {_LISTENING: [(inner, ())], _OUTPUTS: [((), chunk) for chunk in _chunks(inner)]}
    for way, marked in ways.items():
        try:
            engines = [
                reference.build(debug, outputs, _part(progress, index, len(marked)))
                for index, (debug, outputs) in enumerate(marked)
            ]
            observer = _observer(reference, way, engines)
            _verify(observer, reference)
            break
        except EngineError as error:
            log.warning("event=observer way=%r problem=%r", way, str(error))
            if way == _OUTPUTS:
                raise
    return way, engines, observer


def _verify(observer: TensorRtObserver, reference: Reference) -> None:
    try:
        observer.verify(_image(reference.request))
    except BaseException:
        observer.close()
        raise


def _observer(reference: Reference, way: str, engines: Sequence[bytes]) -> TensorRtObserver:
    dialect, gpu, taps = reference.dialect, reference.gpu, reference.taps
    if way == _LISTENING:
        probes: list[Probe] = [ListeningProbe(dialect, gpu, engines[0], taps)]
    else:
        probes = []
        try:
            for engine, chunk in zip(engines, _chunks(_inner_taps(reference)), strict=True):
                probes.append(OutputProbe(dialect, gpu, engine, taps, chunk))
        except BaseException:
            for probe in probes:
                probe.close()
            raise
    return TensorRtObserver(reference.request.graph, taps, probes)


def _inner_taps(reference: Reference) -> tuple[str, ...]:
    """The taps that are neither inputs nor outputs of the model: these have to be marked."""
    topology = Topology(reference.request.graph)
    visible = {*topology.inputs, *topology.outputs}
    return tuple(tap for tap in reference.taps if tap not in visible)


def _chunks(taps: Sequence[str]) -> list[Sequence[str]]:
    return [taps[start : start + _CHUNK] for start in range(0, max(len(taps), 1), _CHUNK)]


def _part(progress: Progress, index: int, parts: int) -> Progress:
    """The progress of one engine of several."""
    return lambda fraction, doing: progress((index + fraction) / parts, doing)


def _image(request: BuildRequest) -> Array:
    opt = request.profiles[0][image_input(request.graph).name].opt if request.profiles else None
    return trial_image(request.graph, request.input_shape or opt)


def _fill(way: str, engines: Sequence[bytes], folder: Path) -> Mapping[str, Any]:
    names = [f"reference.{index}.engine" for index in range(len(engines))]
    for name, content in zip(names, engines, strict=True):
        (folder / name).write_bytes(content)
    return {"way": way, "engine": names[0], "engines": names}
