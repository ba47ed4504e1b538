"""Run and observe graphs with ONNX Runtime on the CPU.

The engine file is the graph itself; loading optimises it. Layer times come from the session's profile, and the nodes of
a layer from the graph that the optimiser wrote.
"""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
import onnx
import onnxruntime as ort
from onnx import ModelProto, NodeProto
from onnxruntime.capi import onnxruntime_pybind11_state as ort_state

from calibrate.histogram import abs_histogram
from engines.errors import EngineError
from engines.graph.taps import expose, expose_extremes
from engines.graph.topology import Topology, trial_shape
from engines.interface import (
    Array,
    BackendOptions,
    BuildRequest,
    Built,
    Observation,
    Progress,
    TensorSpec,
    closed_engine,
    silent,
)
from engines.kernel_nodes import assign_others

_KERNEL = "_kernel_time"
_BLOCKED = re.compile(r"_nchwc(_token_\d+)?$")  # a kernel on blocked channels is named after the tensor it makes


def kernel_times_ms(profile: str, warm_up: int) -> dict[str, float]:
    """Return the median time of every node in ms, by name, from the text of a profile; its first runs do not count."""
    times: dict[str, list[float]] = {}
    for event in json.loads(profile):
        if event.get("cat") == "Node" and event["name"].endswith(_KERNEL):
            times.setdefault(event["name"].removesuffix(_KERNEL), []).append(event["dur"] / 1000.0)
    return {name: median(values[warm_up:]) for name, values in times.items() if len(values) > warm_up}


def nodes_by_kernel(graph: ModelProto, optimised: ModelProto) -> dict[str, tuple[str, ...]]:
    """Return, per node of the optimised graph, the names of the nodes of `graph` that it computes, in graph order.

    1. Fused nodes, and constants folded into them, are found from the tensor that the node makes.
    2. The others get nodes as `assign_others` has it.
    """
    topology = Topology(optimised)
    readers = {
        node.name: [reader.name for name in node.output for reader, _ in topology.readers(name)]
        for node in topology.nodes
    }
    return assign_others(_claimed(graph, optimised), readers)


def _claimed(graph: ModelProto, optimised: ModelProto) -> dict[str, tuple[str, ...]]:
    """Assign each node of the graph to the first that computes it; both graphs are topologically sorted."""
    topology = Topology(graph)
    named = {node.name: node for node in topology.nodes}
    position = {node.name: index for index, node in enumerate(topology.nodes)}
    taken: set[str] = set()
    claimed = {}
    for kernel in optimised.graph.node:
        own: set[str] = set()
        waiting = _last_nodes(kernel, topology, named)
        while waiting:
            node = waiting.pop()
            if node.name not in taken:
                taken.add(node.name)
                own.add(node.name)
                waiting.extend(topology.producers[name] for name in node.input if name in topology.producers)
        claimed[kernel.name] = tuple(sorted(own, key=position.__getitem__))
    return claimed


def _last_nodes(kernel: NodeProto, topology: Topology, named: Mapping[str, NodeProto]) -> list[NodeProto]:
    """Return the nodes whose results a kernel makes: by the tensors' names or, if they are new, by its own."""
    blocked = _BLOCKED.search(kernel.name)
    tensors = [*kernel.output, *([kernel.name[: blocked.start()]] if blocked else [])]
    nodes = [topology.producers[name] for name in tensors if name in topology.producers]
    name = kernel.name
    while name and not nodes:  # "Mul_43/QuickGeluFusion/"
        nodes = [named[name]] if name in named else []
        name = name.rpartition("/")[0]
    return nodes


_DTYPES = {
    "tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(double)": np.float64,
    "tensor(int8)": np.int8, "tensor(uint8)": np.uint8, "tensor(int32)": np.int32, "tensor(int64)": np.int64,
    "tensor(bool)": np.bool_,
}  # fmt: skip
_WARM_UP = 3  # profiled runs that do not count: memory is allocated, caches fill
_LOG_ERRORS = 3  # ONNX Runtime's severity scale: 0 verbose ... 4 fatal
_FAILURES = tuple(v for v in vars(ort_state).values() if isinstance(v, type) and issubclass(v, Exception))
_PREFIX = re.compile(r"^\[ONNXRuntimeError\] : \d+ : [A-Z_]+ : ")


class OnnxRuntimeBackend:
    """Build, load and observe engines with ONNX Runtime on the CPU. Its engine is the graph; loading optimises it."""

    name = "onnxruntime"
    engine_file = "engine.onnx"
    precisions: Sequence[str] = ("fp32",)
    int8_must_gain = False  # with few of its kernels INT8 is faster: it saves memory

    def __init__(self, options: BackendOptions | None = None) -> None:
        """Open the runtime. Raises EngineError (`backend.option`) for options that only a GPU's runtime has."""
        options = options or BackendOptions()
        options.check_cpu(self.name)
        self._threads = options.threads
        # As written it computes any: the graph for TensorRT is the usual one.
        self.takes_unsigned, self.weight_bits = options.unsigned, options.weight_bits

    def describe(self) -> Mapping[str, str]:
        return {
            "runtime": self.name,
            "version": ort.__version__,
            "provider": "CPUExecutionProvider",
            "machine": platform.machine(),
        }

    def flags(self) -> Mapping[str, str]:
        return {"activations": "unsigned"} if self.takes_unsigned else {}

    def build(self, request: BuildRequest, progress: Progress = silent) -> Built:
        """Return the graph itself, once it has been loaded and has run on zeros.

        Raises EngineError, which names the node:
            engine.unsupported  an operator that the runtime does not have
            engine.graph        a graph that it refuses
            engine.run          a graph that fails on zeros
        """
        progress(0.0, "loading the graph")
        graph = request.graph.SerializeToString()
        engine = self.load(graph)
        progress(0.6, "running it once")
        image = engine.inputs[0]
        engine.infer(np.zeros(request.input_shape or trial_shape(image.shape), image.dtype))
        engine.close()
        progress(1.0, "built")
        return Built(graph, facts={"portable": True})

    def load(self, engine: bytes) -> OnnxRuntimeEngine:
        """Load an engine, which optimises its graph for this processor.

        Raises EngineError:
            engine.unreadable   bytes that are no graph
            engine.unsupported  an operator that the runtime does not have
            engine.graph        a graph that it refuses
        """
        return OnnxRuntimeEngine(engine, self._threads)

    def observer(
        self,
        request: BuildRequest,
        taps: Sequence[str],
        progress: Progress = silent,  # noqa: ARG002  (a session opens at once)
        layers: Sequence[str] = (),
    ) -> OnnxRuntimeObserver:
        """Open the float reference with histogram taps.

        Raises EngineError:
            observer.tap  a tap that is not a float32 tensor of the graph
            engine.*      as `load` does
        """
        return OnnxRuntimeObserver(request.graph, taps, self._threads, layers)


class OnnxRuntimeEngine:
    """Engine on one session; `model` is the serialised graph.

    `plans_memory`: one block for all activations of a run. It saves time where activations share its parts; an
    observer's do not, they are outputs, and the block would come on top of them.
    """

    def __init__(self, model: bytes, threads: int, plans_memory: bool = True) -> None:
        self._model, self._threads, self._plans_memory = model, threads, plans_memory
        session = self._open(self._options())
        self._session: ort.InferenceSession | None = session
        self.inputs = [_spec(value) for value in session.get_inputs()]
        self.outputs = [_spec(value) for value in session.get_outputs()]

    def infer(self, batch: Array, names: Sequence[str] | None = None) -> dict[str, Array]:
        """Return the outputs of these `names`; by default all.

        Raises EngineError: `engine.batch` (other shape or dtype), `engine.run`, `engine.closed`.
        """
        session, spec = self._running(), self.inputs[0]
        spec.check(batch)
        try:
            results: list[Array] = session.run(names, {spec.name: batch})
        except _FAILURES as error:
            raise _engine_error(error, "engine.run") from error
        return dict(zip(names or (output.name for output in self.outputs), results, strict=True))

    def layer_times_ms(self, batch: Array, runs: int = 20) -> dict[str, float]:
        """Measure in a second session, with the profiler on. Raises EngineError as `infer`."""
        self.infer(batch)  # refuses a batch that does not fit
        with TemporaryDirectory(prefix="tared-") as folder:
            options = self._options()
            options.enable_profiling = True
            options.profile_file_prefix = f"{folder}/profile"
            session = self._open(options)
            for _ in range(_WARM_UP + runs):
                session.run(None, {self.inputs[0].name: batch})
            return kernel_times_ms(Path(session.end_profiling()).read_text(encoding="utf-8"), _WARM_UP)

    def layer_nodes(self) -> dict[str, tuple[str, ...]]:
        """Identify nodes by the tensors that the optimised graph has kept. Raises EngineError (`engine.closed`)."""
        self._running()
        with TemporaryDirectory(prefix="tared-") as folder:
            options = self._options()
            options.optimized_model_filepath = f"{folder}/optimised.onnx"
            self._open(options)
            optimised = onnx.load(options.optimized_model_filepath)
        return nodes_by_kernel(onnx.load_from_string(self._model), optimised)

    def close(self) -> None:
        self._session, self._model = None, b""

    def _running(self) -> ort.InferenceSession:
        if self._session is None:
            raise closed_engine()
        return self._session

    def _options(self) -> ort.SessionOptions:
        options = ort.SessionOptions()
        options.intra_op_num_threads = self._threads
        options.inter_op_num_threads = 1
        options.enable_mem_pattern = self._plans_memory
        options.log_severity_level = _LOG_ERRORS
        # A spinning thread would hold a core of a two-core board that the camera needs.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.add_session_config_entry("session.disable_quant_qdq", "1")
        return options

    def _open(self, options: ort.SessionOptions) -> ort.InferenceSession:
        try:
            return ort.InferenceSession(self._model, options, providers=["CPUExecutionProvider"])
        except _FAILURES as error:
            raise _engine_error(error, "engine.graph") from error


class OnnxRuntimeObserver:
    """Observer: the reference graph with its taps, and the extremes of what layers read, as further outputs."""

    product_bits: int | None = None

    def __init__(
        self, reference: onnx.ModelProto, taps: Sequence[str], threads: int, layers: Sequence[str] = ()
    ) -> None:
        self.taps = tuple(taps)
        self._outputs = [output.name for output in reference.graph.output]
        graph, self._extremes = expose_extremes(expose(reference, self.taps), layers)
        self._engine = OnnxRuntimeEngine(graph.SerializeToString(), threads, plans_memory=False)
        self.inputs = self._engine.inputs
        self.outputs = [output for output in self._engine.outputs if output.name in self._outputs]

    def observe(self, batch: Array) -> Observation:
        """Observe an image. Non-finite values are counted. Raises EngineError as `infer`."""
        tensors = {self.inputs[0].name: batch} | self._engine.infer(batch)
        histograms = {tap: abs_histogram(tensors[tap].astype(np.float32, copy=False)) for tap in self.taps}
        extremes = self._extremes.take_from(tensors)
        return Observation({name: tensors[name] for name in self._outputs}, histograms, extremes)

    def infer(self, batch: Array) -> dict[str, Array]:
        """Return the reference outputs alone, by name."""
        return self._engine.infer(batch, self._outputs)

    def close(self) -> None:
        self._engine.close()


def _spec(value: ort.NodeArg) -> TensorSpec:
    if value.type not in _DTYPES:
        raise EngineError(
            "engine.dtype",
            f"'{value.name}' of type {value.type}",
            "inputs and outputs of numeric tensors",
            "export the model without it",
        )
    shape = tuple(size if isinstance(size, int) else None for size in value.shape)
    return TensorSpec(value.name, np.dtype(_DTYPES[value.type]), shape)


def _engine_error(error: Exception, code: str) -> EngineError:
    """Sort ONNX Runtime's exceptions; its text names the node and the operator."""
    kind = type(error).__name__
    found = _PREFIX.sub("", str(error)).strip()
    if kind == "InvalidProtobuf":
        return EngineError("engine.unreadable", found, "a complete engine file", "build the engine again")
    if kind == "NotImplemented":
        remedy = f"update onnxruntime ({ort.__version__} here), or export the model with other operators"
        return EngineError("engine.unsupported", found, "operators that ONNX Runtime has on the CPU", remedy)
    return EngineError(code, found, "a graph that ONNX Runtime runs", "check the model with onnxruntime alone")
