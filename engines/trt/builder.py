"""The builder: a strongly typed graph in, engine bytes out, and why not when there are none."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import psutil
from onnx import ModelProto

from engines.backend import EngineError, Profile, Progress
from engines.trt.api import Builder, CrossConfig, CrossTensorRt, IBuilderConfig
from engines.trt.dialect import Dialect
from engines.trt.layers import LISTING, Layer, layers_from_log
from engines.trt.log import Record, messages
from engines.trt.network import Network, parse
from engines.trt.progress import BuildProgress
from engines.trt.timings import keep_timings, start_timings

_LEAST_WORKSPACE_BYTES = 64 << 20
_MOST_LEVEL, _MOST_TIMINGS = 5, 8  # builder optimisation level (3 by default), and runs averaged per kernel (1)
_NO_KERNEL = re.compile(r"[Cc]ould not find any implementation for node (.+?)(?: due to|\.? ?\(|\.\s|\.?$)")
_NO_MEMORY = ("out of memory", "outofmemory", "cudaerrormemoryallocation", "insufficient memory", "bad_alloc")


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
    dialect: Dialect,
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
    log = messages(dialect)
    builder = log.create(dialect.trt.Builder)
    network = parse(dialect, builder, graph)
    _mark(dialect, network, debug, outputs)
    config = _config(dialect, builder, profiles, options)
    told = BuildProgress(dialect, progress)
    config.progress_monitor = told.monitor
    with log.recorded(LISTING) as record:
        built = builder.build_serialized_network(network.definition, config)
    told.reraise()
    if built is None or built.nbytes == 0:
        raise _failure(dialect, record)
    if dialect.release.times and options.timing_cache is not None:
        keep_timings(config, options.timing_cache, options.key)
    return BuiltEngine(bytes(built), layers_from_log(record.verbose[-1]) if record.verbose else ())


def _mark(dialect: Dialect, network: Network, debug: Sequence[str], outputs: Sequence[str]) -> None:
    for name in (*debug, *outputs):
        tensor = network.tensor(name)
        if tensor is None or (name in debug and not network.definition.mark_debug(tensor)):
            raise EngineError(
                "engine.tensor", f"tensor '{name}'", f"a tensor that {dialect.name} can hand out", "report the model"
            )
        if name in outputs:
            network.definition.mark_output(tensor)


def _config(dialect: Dialect, builder: Builder, profiles: Sequence[Profile], options: BuilderOptions) -> IBuilderConfig:
    trt = dialect.trt
    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED  # names and types of layers, some kilobytes
    free = options.free_bytes or psutil.virtual_memory().available
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, max(free // 4, _LEAST_WORKSPACE_BYTES))
    config.set_memory_pool_limit(trt.MemoryPoolType.TACTIC_DRAM, max(free // 2, _LEAST_WORKSPACE_BYTES))
    if options.best:
        config.builder_optimization_level = _MOST_LEVEL
        config.avg_timing_iterations = _MOST_TIMINGS
    if options.dla is not None:
        _use_dla(dialect, config, options.dla)
    if options.target is not None:
        _aim(dialect, config, options.target)
    for profile in profiles:
        _add_profile(builder, config, profile)
    if dialect.release.times and options.timing_cache is not None:
        start_timings(config, options.timing_cache, options.key)
    return config


def _use_dla(dialect: Dialect, config: IBuilderConfig, core: int) -> None:
    if not dialect.has_dla:
        raise EngineError(
            "engine.dla", f"DLA core {core} with {dialect.name}", "a release with DLA support", "build for the GPU"
        )
    config.default_device_type = dialect.trt.DeviceType.DLA
    config.DLA_core = core
    config.set_flag(dialect.trt.BuilderFlag.GPU_FALLBACK)


def _aim(dialect: Dialect, config: IBuilderConfig, target: str) -> None:
    members = cast(CrossTensorRt, dialect.trt).ComputeCapability.__members__
    known = {name.lower(): capability for name, capability in members.items() if name.startswith("SM")}
    if target not in known:
        raise EngineError("engine.target", f"target '{target}'", ", ".join(known), "choose one of them with --target")
    cross = cast(CrossConfig, config)
    cross.num_compute_capabilities = 1
    cross.set_compute_capability(known[target], 0)


def _add_profile(builder: Builder, config: IBuilderConfig, shapes: Profile) -> None:
    profile = builder.create_optimization_profile()
    for name, bounds in shapes.items():
        profile.set_shape(name, bounds.min, bounds.opt, bounds.max)
    config.add_optimization_profile(profile)


def _failure(dialect: Dialect, record: Record) -> EngineError:
    """Why there is no engine: the builder returns None, and its log has the reason."""
    said = record.last_error
    for message in record.errors:
        missing = _NO_KERNEL.search(message)
        if missing:
            return MissingKernelError(missing[1], " ".join(message.split()))
        if any(words in message.lower() for words in _NO_MEMORY):
            remedy = "end other programs, add swap, or build with smaller profiles; the engine in service serves on"
            return EngineError("engine.memory", f"{dialect.name} ran out of memory: {said}", "memory to build", remedy)
    return EngineError("engine.build", said, f"a graph that {dialect.name} builds", "see the layer that it names")
