"""Build an engine of a strongly typed graph.

`profiles_for` chooses the shapes and `build_engine` runs the builder in a thread of its own, so that signals stay with
the caller. How fast each kernel was is kept in a timing cache on disk, so that the next build need not try them again.
TensorRT parses that file, so it gets only bytes that were written here: an HMAC stands before them, with the key that
signs artefacts if there is one; without a key it shows damage only.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import psutil
from onnx import ModelProto

from engines.errors import EngineError
from engines.graph.load import image_input
from engines.graph.topology import trial_shape
from engines.interface import BuildRequest, Profile, Progress, ShapeRange, TensorSpec
from engines.store.files import replace_files
from engines.store.signing import is_signed, sign
from engines.trt.api import Builder, CrossConfig, CrossTensorRt, IBuilderConfig
from engines.trt.layers import LISTING, Layer, layers_from_log
from engines.trt.log import LogRecord, messages
from engines.trt.network import parse
from engines.trt.progress import BuildProgress
from engines.trt.release import TensorRtRelease

_PURPOSE = "timing cache"  # of the signature
_LEAST_WORKSPACE_BYTES = 64 << 20
_MOST_LEVEL, _MOST_TIMINGS = 5, 8  # builder optimisation level (3 by default), and runs averaged per kernel (1)
_SIGNALS_S = 0.2  # how often an interrupt is polled for, where waiting does not end by itself
_NO_KERNEL = re.compile(r"[Cc]ould not find any implementation for node (.+?)(?: due to|\.? ?\(|\.?\)|\.\s|\.?$)")
_NO_MEMORY = re.compile(  # TensorRT's own spellings, "insuficient" among them
    r"out ?of ?memory|MemoryAllocation|insuff?icient (memory|workspace)|bad_alloc|could not be allocated", re.IGNORECASE
)


def profiles_for(graph: ModelProto, request: BuildRequest) -> tuple[Profile, ...]:
    """Return the profiles of a graph: none if no dimension is open, those of the request, or one of its input shape.

    Raises EngineError (`engine.profile`) for a profile of another input or another rank, or that changes a dimension
    which the model fixes.
    """
    image = image_input(graph)
    for profile in request.profiles:
        _check(profile, image)
    if None not in image.shape:
        return ()
    shape = request.input_shape or trial_shape(image.shape)
    return request.profiles or ({image.name: ShapeRange(shape, shape, shape)},)


def _check(profile: Profile, image: TensorSpec) -> None:
    if set(profile) != {image.name}:
        raise _wrong(f"a profile for {', '.join(map(repr, profile)) or 'no input'}", f"one for input '{image.name}'")
    shapes = profile[image.name]
    for bound in ("min", "opt", "max"):
        shape: tuple[int, ...] = getattr(shapes, bound)
        fixed = [size if size is not None else "any" for size in image.shape]
        fits = len(shape) == len(image.shape) and all(
            size > 0 and expected in (None, size) for size, expected in zip(shape, image.shape, strict=True)
        )
        if not fits:
            raise _wrong(f"{bound} {list(shape)}", f"{fixed}, as the model has '{image.name}'")
    if not all(a <= b <= c for a, b, c in zip(shapes.min, shapes.opt, shapes.max, strict=True)):
        raise _wrong(f"{shapes}", "min <= opt <= max in every dimension")


def _wrong(found: str, expected: str) -> EngineError:
    return EngineError("engine.profile", found, expected, "correct `profiles` in the model spec")


@dataclass(frozen=True)
class BuilderOptions:
    """How to build.

    target: GPU to build for, "sm86", None for this machine's. dla: core of a deep learning accelerator, with the GPU
    for what it cannot run. best: try every kernel long. timing_cache: file of kernel timings, read and kept up to date,
    signed with the key. free_bytes: memory of the GPU that nobody uses; of a board, which shares its memory, None
    suffices.
    """

    target: str | None = None
    dla: int | None = None
    best: bool = False
    timing_cache: Path | None = None
    key: bytes | None = field(default=None, repr=False)
    free_bytes: int | None = None


@dataclass(frozen=True)
class BuiltEngine:
    """Engine bytes, and the layers where the log lists them, else none."""

    content: bytes
    layers: Sequence[Layer]


class MissingKernelError(EngineError):
    """The builder found no kernel for a layer. `layer`: its name, which the ONNX nodes' names are part of."""

    def __init__(self, layer: str, said: str) -> None:
        super().__init__("engine.kernel", said, "kernels for every layer", "leave the layer float, in plan.json")
        self.layer = layer


def build_engine(
    release: TensorRtRelease,
    graph: ModelProto,
    profiles: Sequence[Profile],
    options: BuilderOptions,
    progress: Progress,
    debug: Sequence[str] = (),
    outputs: Sequence[str] = (),
) -> BuiltEngine:
    """Build an engine of a strongly typed graph.

    debug: tensors to mark for a debug listener; outputs: tensors that become further outputs. Raises EngineError as
    `parse`, MissingKernelError, `engine.tensor` (no such tensor to mark), `engine.memory`, `engine.build` with what the
    log says, `engine.target` and `engine.dla`; and whatever `progress` raises, after the builder has stopped.
    """
    build_progress = BuildProgress(release, progress)
    results: list[BuiltEngine] = []
    done = threading.Event()

    def work() -> None:
        with build_progress.stopping():
            results.append(_build(release, graph, profiles, options, build_progress, debug, outputs))
        done.set()

    # Signals arrive in the calling thread. Inside TensorRT, Python would raise an interrupt in whichever callback comes
    # next, and the bindings swallow it.
    threading.Thread(target=work, name="builder", daemon=True).start()
    while not done.is_set():
        with build_progress.stopping():
            done.wait(_SIGNALS_S)
    build_progress.reraise()
    return results[0]  # there is one, or `reraise` has raised


def _build(
    release: TensorRtRelease,
    graph: ModelProto,
    profiles: Sequence[Profile],
    options: BuilderOptions,
    progress: BuildProgress,
    debug: Sequence[str],
    outputs: Sequence[str],
) -> BuiltEngine:
    log = messages(release)
    builder = log.create(release.trt.Builder)
    network = parse(release, builder, graph)
    for name in (*debug, *outputs):
        tensor = network.tensor(name)
        if tensor is None or (name in debug and not network.definition.mark_debug(tensor)):
            raise EngineError(
                "engine.tensor", f"tensor '{name}'", f"a tensor that {release.name} can hand out", "report the model"
            )
        if name in outputs:
            network.definition.mark_output(tensor)
    config = _config(release, builder, profiles, options)
    config.progress_monitor = progress.monitor
    with log.recorded(LISTING) as record:
        built = builder.build_serialized_network(network.definition, config)
    if built is None or built.nbytes == 0:
        raise _failure(release, record)
    if release.traits.times and options.timing_cache is not None:
        _keep_timings(config, options.timing_cache, options.key)
    return BuiltEngine(bytes(built), layers_from_log(record.verbose[-1]) if record.verbose else ())


def _config(
    release: TensorRtRelease, builder: Builder, profiles: Sequence[Profile], options: BuilderOptions
) -> IBuilderConfig:
    trt = release.trt
    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED  # names and types of layers, some kilobytes
    free = psutil.virtual_memory().available if options.free_bytes is None else options.free_bytes
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, max(free // 4, _LEAST_WORKSPACE_BYTES))
    config.set_memory_pool_limit(trt.MemoryPoolType.TACTIC_DRAM, max(free // 2, _LEAST_WORKSPACE_BYTES))
    if options.best:
        config.builder_optimization_level = _MOST_LEVEL
        config.avg_timing_iterations = _MOST_TIMINGS
    if options.dla is not None:
        _use_dla(release, builder, config, options.dla)
    if options.target is not None:
        _build_for(release, config, options.target)
    for shapes in profiles:
        profile = builder.create_optimization_profile()
        for name, bounds in shapes.items():
            profile.set_shape(name, bounds.min, bounds.opt, bounds.max)
        if config.add_optimization_profile(profile) < 0:
            found = f"{shapes}"
            raise EngineError("engine.profile", found, "a profile that the builder takes", "correct the model spec")
    if release.traits.times and options.timing_cache is not None:
        _start_timings(config, options.timing_cache, options.key)
    return config


def _use_dla(release: TensorRtRelease, builder: Builder, config: IBuilderConfig, core: int) -> None:
    if not release.has_dla:
        raise EngineError(
            "engine.dla", f"DLA core {core} with {release.name}", "a release with DLA support", "build for the GPU"
        )
    if core >= builder.num_DLA_cores:
        found = f"DLA core {core} on a board with {builder.num_DLA_cores}"
        raise EngineError("engine.dla", found, "one of the board's", "choose another, or build for the GPU")
    config.default_device_type = release.trt.DeviceType.DLA
    config.DLA_core = core
    config.set_flag(release.trt.BuilderFlag.GPU_FALLBACK)


def _build_for(release: TensorRtRelease, config: IBuilderConfig, target: str) -> None:
    members = cast(CrossTensorRt, release.trt).ComputeCapability.__members__
    known = {name.lower(): capability for name, capability in members.items() if name.startswith("SM")}
    if target not in known:
        raise EngineError("engine.target", f"target '{target}'", ", ".join(known), "choose one of them with --target")
    cross = cast(CrossConfig, config)
    cross.num_compute_capabilities = 1
    cross.set_compute_capability(known[target], 0)


def _failure(release: TensorRtRelease, record: LogRecord) -> EngineError:
    """Return why there is no engine: the builder returns None, and its log has the reason."""
    said = record.last_error
    short = next((text for text in (*record.errors, *record.warnings) if _NO_MEMORY.search(text)), None)
    if short is not None:  # a kernel that needs more memory than there is counts as missing, too
        remedy = "end other programs, add swap, or build with smaller profiles; the engine in service serves on"
        found = f"{release.name} ran out of memory: {' '.join(short.split())}"
        return EngineError("engine.memory", found, "memory to build", remedy)
    missing = next((match for match in map(_NO_KERNEL.search, record.errors) if match), None)
    if missing is not None:
        return MissingKernelError(missing[1], said)
    return EngineError("engine.build", said, f"a graph that {release.name} builds", "see the layer that it names")


def _start_timings(config: IBuilderConfig, path: Path, key: bytes | None) -> None:
    """Start with what earlier builds measured; a file that is damaged, or of another GPU, counts as none."""
    content = b""
    with contextlib.suppress(OSError):
        signature, _, written = path.read_bytes().partition(b"\n")
        if is_signed(key or b"", _PURPOSE, written, signature.decode(errors="replace")):
            content = written
    cache = config.create_timing_cache(content) or config.create_timing_cache(b"")
    if cache is not None:
        config.set_timing_cache(cache, False)


def _keep_timings(config: IBuilderConfig, path: Path, key: bytes | None) -> None:
    """Write what is known after a build; if the disk refuses, the next build measures again."""
    cache = config.get_timing_cache()
    if cache is None:
        return
    content = bytes(cache.serialize())
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_files({path: sign(key or b"", _PURPOSE, content).encode() + b"\n" + content})
