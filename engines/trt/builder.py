"""Build an engine of a strongly typed graph.

`build_engine` runs the builder in a thread of its own, so that signals stay with the caller. `parse` makes TensorRT's
network of the graph, and BuildProgress reports how far the builder is.

How fast each kernel was is kept in a timing cache on disk, so that the next build need not try them again. TensorRT
parses that file, so it gets only bytes that were written here (engines/store/kept_file.py).
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import psutil
from onnx import ModelProto, TensorProto

from engines.errors import EngineError
from engines.graph.topology import value_type
from engines.interface import Profile, Progress
from engines.store.kept_file import read_kept, write_kept
from engines.trt.api import (
    Builder,
    CrossConfig,
    CrossTensorRt,
    IBuilderConfig,
    INetworkDefinition,
    OnnxParser,
    implement,
)
from engines.trt.layers import Layer, layers_from_log
from engines.trt.log import LogRecord, messages
from engines.trt.release import TensorRtRelease

_PURPOSE = "timing cache"  # the kind that its signature states
_LEAST_WORKSPACE_BYTES = 64 << 20
_MOST_LEVEL, _MOST_TIMINGS = 5, 8  # builder optimisation level (3 by default), and runs averaged per kernel (1)
_SIGNALS_S = 0.2  # how often an interrupt is polled for, where waiting does not end by itself
_NO_KERNEL = re.compile(r"[Cc]ould not find any implementation for node (.+?)(?: due to|\.? ?\(|\.?\)|\.\s|\.?$)")
_UNSUPPORTED = "UNSUPPORTED"
_MOST_CHARACTERS = 400  # kept of the parser's reason: behind it the parser lists consequences
_NO_MEMORY = re.compile(  # TensorRT's own spellings, "insuficient" among them
    r"out ?of ?memory|MemoryAllocation|insuff?icient (memory|workspace)|bad_alloc|could not be allocated", re.IGNORECASE
)


@dataclass(frozen=True)
class BuilderOptions:
    """Options of a build.

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
    if build_progress.stopped is not None:
        raise build_progress.stopped
    return results[0]  # there is one, since nothing stopped the builder


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
    network, _parser = parse(release, builder, graph)
    layers = [network.get_layer(index) for index in range(network.num_layers)]
    tensors = [network.get_input(index) for index in range(network.num_inputs)]
    tensors += [layer.get_output(index) for layer in layers for index in range(layer.num_outputs)]
    named = {tensor.name: tensor for tensor in tensors}  # the parser keeps ONNX's names
    for name in (*debug, *outputs):
        if name not in named or (name in debug and not network.mark_debug(named[name])):
            raise EngineError(
                "engine.tensor", f"tensor '{name}'", f"a tensor that {release.name} can hand out", "report the model"
            )
        if name in outputs:
            network.mark_output(named[name])
    config = _config(release, builder, profiles, options)
    config.progress_monitor = progress.monitor
    with log.recorded() as record:
        built = builder.build_serialized_network(network, config)
    if built is None or built.nbytes == 0:
        raise _failure(release, record)
    if release.traits.times and options.timing_cache is not None:
        _keep_timings(config, options.timing_cache, options.key)
    return BuiltEngine(bytes(built), layers_from_log(record.listing))


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
        if not release.has_dla:
            found = f"DLA core {options.dla} with {release.name}"
            raise EngineError("engine.dla", found, "a release with DLA support", "build for the GPU")
        if options.dla >= builder.num_DLA_cores:
            found = f"DLA core {options.dla} on a board with {builder.num_DLA_cores}"
            raise EngineError(
                "engine.dla", found, "one of its cores, counted from 0", "choose another core, or build for the GPU"
            )
        config.default_device_type = trt.DeviceType.DLA
        config.DLA_core = options.dla
        config.set_flag(trt.BuilderFlag.GPU_FALLBACK)
    if options.target is not None:
        members = cast(CrossTensorRt, trt).ComputeCapability.__members__
        known = {name.lower(): capability for name, capability in members.items() if name.startswith("SM")}
        if options.target not in known:
            found = f"target '{options.target}'"
            raise EngineError("engine.target", found, ", ".join(known), "choose one of them with --target")
        cross = cast(CrossConfig, config)
        cross.num_compute_capabilities = 1
        cross.set_compute_capability(known[options.target], 0)
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


def _failure(release: TensorRtRelease, record: LogRecord) -> EngineError:
    """Return why there is no engine: the builder returns None, and its log has the reason."""
    said = record.last_error
    short = next((text for text in (*record.errors, *record.warnings) if _NO_MEMORY.search(text)), None)
    if short is not None:  # a kernel that needs more memory than there is counts as missing, too
        remedy = "end other programs, add swap, or build with smaller profiles; the engine in service keeps serving"
        found = f"{release.name} ran out of memory: {' '.join(short.split())}"
        return EngineError("engine.memory", found, "memory to build", remedy)
    missing = next((match for match in map(_NO_KERNEL.search, record.errors) if match), None)
    if missing is not None:
        return MissingKernelError(missing[1], said)
    return EngineError(
        "engine.build", said, f"a graph that {release.name} builds", "check the layer that the error names"
    )


def _start_timings(config: IBuilderConfig, path: Path, key: bytes | None) -> None:
    """Start with what earlier builds measured; a file that is damaged, or of another GPU, counts as none."""
    content = read_kept(path, key, _PURPOSE) or b""
    cache = config.create_timing_cache(content) or config.create_timing_cache(b"")
    if cache is not None:
        config.set_timing_cache(cache, False)


def _keep_timings(config: IBuilderConfig, path: Path, key: bytes | None) -> None:
    """Write what is known after a build; if the disk refuses, the next build measures again."""
    cache = config.get_timing_cache()
    if cache is not None:
        write_kept(path, key, _PURPOSE, bytes(cache.serialize()))


def parse(release: TensorRtRelease, builder: Builder, graph: ModelProto) -> tuple[INetworkDefinition, OnnxParser]:
    """Parse a graph strongly typed: every tensor has the type that the graph gives it, and no other.

    The parser owns memory that the network refers to, and has to live as long.

    Raises EngineError, where it can with operator, node name and index:
        engine.double       double-precision inputs or outputs, which TensorRT would silently make float
        engine.unsupported  an operator that it does not have
        engine.graph        anything else that the parser refuses
        engine.empty        nothing was left to compute
    """
    for value in (*graph.graph.input, *graph.graph.output):
        if value_type(value).elem_type == TensorProto.DOUBLE:
            raise EngineError(
                "engine.double",
                f"'{value.name}' in double precision",
                "float32",
                "export the model in single precision",
            )
    trt = release.trt
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    log = messages(release)
    parser = trt.OnnxParser(network, log.logger)
    with log.recorded() as record:
        done = parser.parse(graph.SerializeToString())
    if not done or parser.num_errors:
        raise _refusal(release, parser, record.last_error)
    if network.num_layers == 0:  # it has taken an empty file for a model
        raise EngineError(
            "engine.empty", "a network of no layers", "layers that compute an output", "check the model's outputs"
        )
    return network, parser


def _refusal(release: TensorRtRelease, parser: OnnxParser, said: str) -> EngineError:
    if parser.num_errors == 0:
        return EngineError("engine.graph", said, f"a graph that {release.name} parses", "check the model with trtexec")
    error = parser.get_error(0)
    where = f"operator {error.node_operator()} in node '{error.node_name()}', number {error.node()} of the graph"
    reason = " ".join(error.desc().split())[:_MOST_CHARACTERS]
    if _UNSUPPORTED in str(error):  # its printed form names the kind of error; code() changed its type between releases
        return EngineError(
            "engine.unsupported",
            f"{where} ({reason})",
            f"operators that {release.name} has",
            "export the model without it, for instance with its decoding steps moved into the decoder",
        )
    return EngineError("engine.graph", f"{where}: {reason}", f"a graph that {release.name} parses", "check this node")


@dataclass
class _Phase:
    """A phase under way: `done` of its `steps`."""

    parent: str | None
    steps: int
    done: int = 0


class BuildProgress:
    """Report the progress of a build, whose phases nest.

    A phase's share of the whole is that of the step of its parent during which it runs.

    What `progress` raises, a KeyboardInterrupt too, must not pass through TensorRT's C++: it is kept in `stopped`, the
    builder is asked to stop, and `build_engine` raises it once the builder has returned.
    """

    def __init__(self, release: TensorRtRelease, progress: Progress) -> None:
        self._progress = progress
        self._phases: dict[str, _Phase] = {}
        self._fraction = 0.0
        self.stopped: BaseException | None = None
        self.monitor = implement(
            release.trt.IProgressMonitor, phase_start=self._start, step_complete=self._step, phase_finish=self._finish
        )

    def _start(self, phase: str, parent: str | None, steps: int) -> None:
        self._phases[phase] = _Phase(parent, max(steps, 1))

    def _step(self, phase: str, step: int) -> bool:
        """Report the fraction, never less than before: a root phase may follow another. False stops the builder."""
        if phase in self._phases and self.stopped is None:
            self._phases[phase].done = step + 1
            self._fraction = max(self._fraction, self._share(phase))
            with self.stopping():
                self._progress(self._fraction, phase)
        return self.stopped is None

    def _finish(self, phase: str) -> None:
        """Report the last step too, which TensorRT does not always do."""
        if phase in self._phases:
            self._step(phase, self._phases[phase].steps - 1)
            del self._phases[phase]

    @contextlib.contextmanager
    def stopping(self) -> Iterator[None]:
        """Stop the builder at its next step if the `with` raises, which goes no further; the first reason counts."""
        try:
            yield
        except BaseException as error:
            self.stopped = self.stopped or error

    def _share(self, name: str) -> float:
        """Return the fraction of the root phase that is done, seen from a phase inside it."""
        phase = self._phases[name]
        share = min(phase.done / phase.steps, 1.0)
        while phase.parent in self._phases:
            phase = self._phases[phase.parent]
            share = min((phase.done + share) / phase.steps, 1.0)
        return share
