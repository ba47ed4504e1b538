"""Run graphs with OpenVINO on the CPU, whose integer kernels take a Q/DQ graph as it is.

The engine file is the graph: fixed to one shape unless profiles leave it open, and rewritten so that the kernels
compute what it says (engines/quantise/integer_kernels.py). OpenVINO compiles it when it is loaded. The cache folder
keeps compiled networks, signed, each for one release on one kind of processor.

All that is not INT8 is computed in float32, also where the processor has bfloat16. ONNX Runtime observes for a
calibration, since it computes a graph to the last bit.
"""

from __future__ import annotations

import hashlib
import io
import os
import platform
import re
import time
from collections.abc import Mapping, Sequence, Set
from contextlib import closing
from functools import lru_cache
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx.parser
import openvino as ov
from google.protobuf.message import DecodeError
from onnx import ModelProto

from engines.board import instructions, processor
from engines.errors import EngineError
from engines.graph.load import image_input
from engines.graph.profiles import profiles_for
from engines.graph.topology import QDQ_OPS, graph_inputs, trial_shape
from engines.interface import (
    Array,
    BackendOptions,
    BuildRequest,
    Built,
    Observer,
    Progress,
    TensorSpec,
    closed_engine,
    silent,
)
from engines.kernel_nodes import assign_others
from engines.onnxruntime_backend import OnnxRuntimeBackend
from engines.quantise.integer_kernels import bias_shared, narrow_weights, shift_concatenated
from engines.store.artefact import fingerprint
from engines.store.kept_file import read_kept, write_kept

SETTINGS = {
    "PERFORMANCE_HINT": "LATENCY",
    "NUM_STREAMS": 1,
    "ENABLE_CPU_PINNING": False,  # a pinned thread would keep its core from the camera
    "INFERENCE_PRECISION_HINT": "f32",
}
_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")  # variables that forbid oneDNN instructions
_WARM_UP = 3  # profiled runs that do not count: memory is allocated, caches fill
_DISTURBED = 1.2  # a run that takes longer than this times the median does not count
_EXECUTED = ov.ProfilingInfo.Status.EXECUTED
_BRANCH = re.compile(r"_\d+$")  # where OpenVINO quantises the inputs of a Concat instead of its output
_SOURCE = re.compile(r"^(Exception from \S+:\d+:|Check '.*' failed at \S+:\d+:)\s*$")
_UNSUPPORTED = re.compile(r"not supported|unsupported|does not support|No conversion|not implemented", re.IGNORECASE)


class OpenVinoBackend:
    """Build and load engines with OpenVINO on the CPU, with integer kernels; ONNX Runtime observes."""

    name = "openvino"
    engine_file = "engine.onnx"
    precisions: Sequence[str] = ("fp32",)
    int8_must_gain = True
    takes_unsigned = True

    def __init__(self, options: BackendOptions | None = None) -> None:
        """Open the runtime. Raises EngineError (`backend.option`) for options that only a GPU's runtime has."""
        self._options = options or BackendOptions()
        self._options.check_cpu(self.name)
        self._just_built: tuple[bytes, ov.CompiledModel] | None = None  # as a rule it is loaded next

    def describe(self) -> Mapping[str, str]:
        """Runtime, version and processor, and whether its INT8 products may saturate."""
        return {
            "runtime": self.name,
            "version": ov.get_version(),
            "machine": platform.machine(),
            "processor": processor(),
            "products": "saturate" if _saturates() else "exact",
        }

    @property
    def weight_bits(self) -> int:
        """8, or 7 where products saturate."""
        return 7 if _saturates() else 8

    def flags(self) -> Mapping[str, str]:
        return {"activations": "unsigned", **({"weights": "7 bits"} if self.weight_bits == 7 else {})}

    def build(self, request: BuildRequest, progress: Progress = silent) -> Built:
        """Return the graph in the form that is compiled, once it has been loaded and has run on zeros.

        Raises EngineError: `engine.profile` as `profiles_for`, `engine.unsupported`, `engine.graph` or `engine.run`.
        """
        progress(0.0, "loading the graph")
        graph, facts = _with_shape(request), dict[str, Any]()
        if any(node.op_type in QDQ_OPS for node in graph.graph.node):
            shift_concatenated(graph)
            bias_shared(graph)
            if self.weight_bits == 7:
                facts["weight_bits"] = 7
                facts["narrowed"] = narrow_weights(graph)  # those of a model's own, which are not written here
        content = graph.SerializeToString()
        compiled = _compiled(content, self._options.threads)
        progress(0.6, "running it once")
        profiles = profiles_for(request.graph, request)
        image = image_input(graph)
        shape = profiles[0][image.name].opt if profiles else trial_shape(image.shape)
        with closing(OpenVinoEngine(content, compiled, self._options.threads)) as engine:
            engine.infer(np.zeros(shape, image.dtype))
        self._just_built = content, compiled
        progress(1.0, "built")
        return Built(content, facts=facts)

    def load(self, engine: bytes) -> OpenVinoEngine:
        """Load an engine: compile its graph for this processor, or take the compiled network from the cache.

        Raises EngineError:
            engine.unreadable   bytes that are no graph
            engine.unsupported  an operator that the runtime does not have
            engine.graph        a graph that it refuses
        """
        just_built, self._just_built = self._just_built, None
        if just_built is not None and just_built[0] == engine:
            return OpenVinoEngine(*just_built, self._options.threads)
        kept = self._kept(engine)
        compiled = _imported(read_kept(kept, self._options.key, kept.stem), self._options.threads) if kept else None
        if compiled is None:
            compiled = _compiled(engine, self._options.threads)
            if kept is not None:
                exported = io.BytesIO()
                compiled.export_model(exported)
                write_kept(kept, self._options.key, kept.stem, exported.getvalue())
        return OpenVinoEngine(engine, compiled, self._options.threads)

    def _kept(self, engine: bytes) -> Path | None:
        """Return the file of a compiled network, named for all that it depends on; None where nothing is kept.

        Virtual machines call processors with other instructions by one name, so the instructions count by themselves.
        """
        if self._options.cache is None:
            return None
        identity = {
            "graph": hashlib.sha256(engine).hexdigest(),
            "runtime": dict(self.describe()),
            "instructions": instructions(),
            "limit": {name: os.environ.get(name, "") for name in _LIMITS},
            "settings": {name: str(value) for name, value in _settings(self._options.threads).items()},
        }
        return self._options.cache / f"{fingerprint(identity)}.openvino"

    def observer(
        self, request: BuildRequest, taps: Sequence[str], progress: Progress = silent, layers: Sequence[str] = ()
    ) -> Observer:
        """Open the float reference with histogram taps, with ONNX Runtime.

        Raises EngineError (`observer.tap`, `engine.*`) as OnnxRuntimeBackend does.
        """
        return OnnxRuntimeBackend(BackendOptions(self._options.threads)).observer(request, taps, progress, layers)


class OpenVinoEngine:
    """Engine on one compiled network; `graph` is what it was compiled from."""

    def __init__(self, graph: bytes, compiled: ov.CompiledModel, threads: int) -> None:
        self._graph, self._threads = graph, threads
        model = onnx.load_from_string(graph)
        named = {value.name for value in (*graph_inputs(model), *model.graph.output)}
        self.inputs = [_spec(port, named) for port in compiled.inputs]
        self.outputs = [_spec(port, named) for port in compiled.outputs]
        self._request: ov.InferRequest | None = compiled.create_infer_request()
        self._read: list[Array] = []  # the batch of the last inference, in whose memory the request's input lies

    def infer(self, batch: Array) -> dict[str, Array]:
        """Run the one image input; return the outputs by name. Raises EngineError as Engine says."""
        request = self._running()
        self.inputs[0].check(batch)
        try:
            results = _answer(request, batch, self._read)
        except RuntimeError as error:
            raise _engine_error(error, "engine.run") from error
        return {spec.name: results[index] for index, spec in enumerate(self.outputs)}

    def layer_times_ms(self, batch: Array, runs: int = 20) -> dict[str, float]:
        """Measure in a second network, with the profiler on: means over the runs that no other work disturbed.

        A kernel that takes less than a microsecond has no time: OpenVINO says of it that it was not run.

        Raises EngineError as `infer`.
        """
        self.infer(batch)  # refuses a batch that does not fit
        request = _compiled(self._graph, self._threads, PERF_COUNT=True).create_infer_request()
        averages_ms, runs_ms, read = list[dict[str, float]](), list[float](), list[Array]()
        for _ in range(_WARM_UP + runs):
            started = time.perf_counter()
            _answer(request, batch, read)
            runs_ms.append(1000.0 * (time.perf_counter() - started))
            kernels = (each for each in request.get_profiling_info() if each.status == _EXECUTED)
            averages_ms.append({each.node_name: 1000.0 * each.real_time.total_seconds() for each in kernels})
        return kernel_times_ms(averages_ms, undisturbed(runs_ms))

    def layer_nodes(self) -> dict[str, tuple[str, ...]]:
        """Identify nodes by the names that OpenVINO keeps for each kernel. Raises EngineError (`engine.closed`)."""
        kernels = self._running().get_compiled_model().get_runtime_model().get_ordered_ops()
        names = {port: kernel.get_friendly_name() for kernel in kernels for port in kernel.outputs()}
        readers: dict[str, list[str]] = {kernel.get_friendly_name(): [] for kernel in kernels}
        for kernel in kernels:
            for port in kernel.inputs():
                readers[names[port.get_source_output()]].append(kernel.get_friendly_name())
        graph = onnx.load_from_string(self._graph).graph
        nodes = {name: node.name for node in graph.node for name in (*node.output, node.name)}
        computed = {kernel.get_friendly_name(): _computed(kernel, nodes) for kernel in kernels}
        return assign_others(computed, readers)

    def close(self) -> None:
        self._request, self._graph = None, b""
        self._read.clear()

    def _running(self) -> ov.InferRequest:
        if self._request is None:
            raise closed_engine()
        return self._request


def undisturbed(runs_ms: Sequence[float]) -> list[int]:
    """Return which runs count, by the time that each took: not the first ones, nor those that other work prolonged."""
    usual_ms = median(runs_ms[_WARM_UP:])
    return [run for run in range(_WARM_UP, len(runs_ms)) if runs_ms[run] <= _DISTURBED * usual_ms]


def kernel_times_ms(averages_ms: Sequence[Mapping[str, float]], runs: Sequence[int]) -> dict[str, float]:
    """Return the mean time of every kernel in these runs, from what OpenVINO's profiler says after every run.

    The profiler has the average of all runs since the network was compiled, in whole microseconds: of ten runs, a
    preemption of 5 ms in the first is 0.5 ms in all that it says later. So the time of a run is what it adds.

    Args:
        averages_ms: By run, from the first one on, the averages by kernel.
    """

    def total_ms(run: int, kernel: str) -> float:
        return (run + 1) * averages_ms[run].get(kernel, 0.0) if run >= 0 else 0.0

    return {
        kernel: max(0.0, sum(total_ms(run, kernel) - total_ms(run - 1, kernel) for run in runs) / len(runs))
        for kernel in averages_ms[-1]
    }


def _computed(kernel: ov.Node, nodes: Mapping[str, str]) -> tuple[str, ...]:
    """Return the nodes that a kernel computes: OpenVINO derives its names from theirs, or from those of their outputs.

    nodes: by name, and by the names of their outputs.
    """
    layers = str(kernel.get_rt_info()["originalLayersNames"].astype(str)).split(",")
    found = (_node_behind(layer, nodes) for layer in layers)
    return tuple(dict.fromkeys(node for node in found if node))


def _node_behind(layer: str, nodes: Mapping[str, str]) -> str | None:
    """Return the node from whose name OpenVINO derived this one, such as Conv_0 for "Conv_0/WithoutBiases"."""
    name = layer
    while name:
        for known in (name, _BRANCH.sub("", name)):
            if known in nodes:
                return nodes[known]
        name = name.rpartition("/")[0]
    return None


def write_ir(graph: ModelProto) -> dict[str, bytes]:
    """Return OpenVINO's own form of a graph, `model.xml` and `model.bin`, with its weights as they are.

    Raises EngineError: `engine.unsupported`, `engine.graph`.
    """
    rewritten = ModelProto()
    rewritten.CopyFrom(graph)
    bias_shared(rewritten)
    with TemporaryDirectory(prefix="tared-") as folder:
        path = Path(folder, "model.xml")
        try:
            ov.save_model(_core().read_model(rewritten.SerializeToString()), path, compress_to_fp16=False)
        except RuntimeError as error:
            raise _engine_error(error, "engine.graph") from error
        return {file.name: file.read_bytes() for file in sorted(Path(folder).iterdir())}


def _with_shape(request: BuildRequest) -> ModelProto:
    """Return the graph; sizes that are open, but the same in all profiles, are fixed: so they are compiled for."""
    graph = ModelProto()
    graph.CopyFrom(request.graph)
    image = graph_inputs(graph)[0]
    profiles = [profile[image.name] for profile in profiles_for(request.graph, request)]
    for axis, size in enumerate(image.type.tensor_type.shape.dim):
        sizes = {shape[axis] for each in profiles for shape in (each.min, each.max)}
        if len(sizes) == 1:
            size.dim_value = sizes.pop()
    return graph


def _answer(request: ov.InferRequest, batch: Array, read: list[Array]) -> Any:
    """Infer without a copy of the batch; `read` keeps its memory as long as the request points to it.

    `infer([batch], share_inputs=True)` comes to the same, but spends as much time in Python as five small layers take.
    """
    readable = batch if batch.flags.c_contiguous and batch.flags.writeable else batch.copy(order="C")
    request.set_input_tensor(ov.Tensor(readable, shared_memory=True))
    read[:] = [readable]
    return request.infer()


def _compiled(graph: bytes, threads: int, **more: Any) -> ov.CompiledModel:
    """Compile a graph. Raises EngineError: `engine.unreadable`, `engine.unsupported`, `engine.graph`."""
    try:
        ModelProto.FromString(graph)
    except DecodeError as error:
        raise EngineError(
            "engine.unreadable", str(error), "a complete engine file", "build the engine again"
        ) from error
    try:
        return _core().compile_model(_core().read_model(graph), "CPU", {**_settings(threads), **more})
    except RuntimeError as error:
        raise _engine_error(error, "engine.graph") from error


def _imported(content: bytes | None, threads: int) -> ov.CompiledModel | None:
    """Return a network that was compiled before; None if there is none, or this release or processor refuses it."""
    if content is None:
        return None
    try:
        return _core().import_model(io.BytesIO(content), "CPU", _settings(threads))
    except RuntimeError:
        return None


def _settings(threads: int) -> dict[str, Any]:
    return {**SETTINGS, "INFERENCE_NUM_THREADS": threads}


@lru_cache(maxsize=1)
def _core() -> ov.Core:
    return ov.Core()


@lru_cache(maxsize=1)
def _saturates() -> bool:
    """Return whether INT8 products saturate here: what one convolution with the largest values answers.

    oneDNN's variable ONEDNN_MAX_CPU_ISA, which limits the instructions of its kernels, counts.
    """
    channels = 64
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 13]>
        products (float[1, {channels}, 4, 4] image) => (float[1, 1, 4, 4] sums)
        <float one = {{1.0}}, int8 zero = {{0}}, int8[1, {channels}, 1, 1] weight = {{{", ".join(["127"] * channels)}}}>
        {{
            levels = QuantizeLinear(image, one, zero)
            values = DequantizeLinear(levels, one, zero)
            weights = DequantizeLinear(weight, one, zero)
            sums = Conv(values, weights)
        }}"""
    )
    try:
        request = _compiled(model.SerializeToString(), threads=1).create_infer_request()
        sums = request.infer([np.full((1, channels, 4, 4), 127.0, np.float32)])[0]
    except RuntimeError as error:
        raise _engine_error(error, "engine.run") from error
    return not np.allclose(sums, channels * 127.0 * 127.0, rtol=1e-3)


def _spec(port: ov.ConstOutput, named: Set[str]) -> TensorSpec:
    """Return the input or output; of several names that a tensor has, that of the graph's own."""
    name = next(iter(port.get_names() & named), port.get_any_name())
    shape = tuple(None if size.is_dynamic else size.get_length() for size in port.get_partial_shape())
    return TensorSpec(name, port.get_element_type().to_dtype(), shape)


def _engine_error(error: RuntimeError, code: str) -> EngineError:
    """Sort OpenVINO's exceptions, which have one type; the text begins with lines of its own sources."""
    lines = [line.strip() for line in str(error).splitlines()]
    found = " ".join(line for line in lines if line and not _SOURCE.match(line))
    if _UNSUPPORTED.search(found):
        remedy = f"update openvino ({ov.get_version()} here), or choose --backend onnxruntime"
        return EngineError("engine.unsupported", found, "operators that OpenVINO has on the CPU", remedy)
    return EngineError(code, found, "a graph that OpenVINO runs", "choose --backend onnxruntime for this model")
