"""Declare the part of TensorRT's Python bindings that tared uses; mypy holds the code to it.

A Protocol here has the name of the class or enumeration in the bindings, and `tests/engines/trt/test_trt_bindings.py`
looks up every one of its members in the bindings of each supported release. So a call that some release does not have
cannot be written. Source: NVIDIA, TensorRT Python API reference, and the bindings themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol


class NetworkDefinitionCreationFlag(Protocol):
    STRONGLY_TYPED: Any


class BuilderFlag(Protocol):
    GPU_FALLBACK: Any


class ProfilingVerbosity(Protocol):
    DETAILED: Any


class MemoryPoolType(Protocol):
    WORKSPACE: Any
    TACTIC_DRAM: Any


class DeviceType(Protocol):
    DLA: Any


class LayerInformationFormat(Protocol):
    JSON: Any


class TensorIOMode(Protocol):
    INPUT: Any


class ComputeCapability(Protocol):
    """TensorRT-RTX only."""

    __members__: Mapping[str, Any]


class TensorLocation(Protocol):
    DEVICE: Any


class IHostMemory(Protocol):
    nbytes: int

    def __buffer__(self, flags: int, /) -> memoryview: ...


class ITensor(Protocol):
    name: str


class ILayer(Protocol):
    num_outputs: int

    def get_output(self, index: int) -> ITensor: ...


class INetworkDefinition(Protocol):
    num_layers: int
    num_inputs: int

    def get_layer(self, index: int) -> ILayer: ...
    def get_input(self, index: int) -> ITensor: ...
    def mark_debug(self, tensor: ITensor) -> bool: ...
    def mark_output(self, tensor: ITensor) -> None: ...


class ParserError(Protocol):
    def desc(self) -> str: ...
    def node(self) -> int: ...
    def node_name(self) -> str: ...
    def node_operator(self) -> str: ...


class OnnxParser(Protocol):
    num_errors: int

    def parse(self, model: bytes) -> bool: ...
    def get_error(self, index: int) -> ParserError: ...


class IOptimizationProfile(Protocol):
    def set_shape(self, name: str, low: Sequence[int], opt: Sequence[int], high: Sequence[int]) -> None: ...


class ITimingCache(Protocol):
    def serialize(self) -> IHostMemory: ...


class IBuilderConfig(Protocol):
    progress_monitor: Any
    profiling_verbosity: Any
    builder_optimization_level: int
    avg_timing_iterations: int
    default_device_type: Any
    DLA_core: int

    def set_flag(self, flag: Any) -> None: ...
    def set_memory_pool_limit(self, pool: Any, nbytes: int) -> None: ...
    def add_optimization_profile(self, profile: IOptimizationProfile) -> int: ...
    def create_timing_cache(self, content: bytes) -> ITimingCache | None: ...
    def set_timing_cache(self, cache: ITimingCache, ignore_mismatch: bool) -> bool: ...
    def get_timing_cache(self) -> ITimingCache | None: ...


class CrossConfig(IBuilderConfig, Protocol):
    """IBuilderConfig of TensorRT-RTX, which builds for GPUs that this machine does not have."""

    num_compute_capabilities: int

    def set_compute_capability(self, capability: Any, index: int) -> bool: ...


class Builder(Protocol):
    num_DLA_cores: int

    def create_network(self, flags: int) -> INetworkDefinition: ...
    def create_builder_config(self) -> IBuilderConfig: ...
    def create_optimization_profile(self) -> IOptimizationProfile: ...
    def build_serialized_network(self, network: INetworkDefinition, config: IBuilderConfig) -> IHostMemory | None: ...


class EngineInspector(Protocol):
    def get_engine_information(self, form: Any) -> str: ...


class IExecutionContext(Protocol):
    profiler: Any

    def set_optimization_profile_async(self, index: int, stream: int) -> bool: ...
    def set_input_shape(self, name: str, shape: Sequence[int]) -> bool: ...
    def get_tensor_shape(self, name: str) -> Sequence[int]: ...
    def set_tensor_address(self, name: str, address: int) -> bool: ...
    def execute_async_v3(self, stream: int) -> bool: ...
    def set_debug_listener(self, listener: Any) -> bool: ...
    def set_all_tensors_debug_state(self, on: bool) -> bool: ...


class ICudaEngine(Protocol):
    num_io_tensors: int
    num_optimization_profiles: int

    def get_tensor_name(self, index: int) -> str: ...
    def get_tensor_mode(self, name: str) -> Any: ...
    def get_tensor_dtype(self, name: str) -> Any: ...
    def get_tensor_shape(self, name: str) -> Sequence[int]: ...
    def get_tensor_profile_shape(self, name: str, profile: int) -> Sequence[Sequence[int]]: ...
    def create_execution_context(self) -> IExecutionContext | None: ...
    def create_engine_inspector(self) -> EngineInspector: ...


class Runtime(Protocol):
    def deserialize_cuda_engine(self, engine: bytes) -> ICudaEngine | None: ...


class ILogger(Protocol):
    """Subclassed: called with every message."""

    def log(self, severity: Any, message: str) -> None: ...


class IProgressMonitor(Protocol):
    """Subclassed: called by the builder, which stops when step_complete returns False."""

    def phase_start(self, phase: str, parent: str | None, steps: int) -> None: ...
    def step_complete(self, phase: str, step: int) -> bool: ...
    def phase_finish(self, phase: str) -> None: ...


class IDebugListener(Protocol):
    """Subclassed: called while a debug tensor lies at `address`, which it does no longer than the call."""

    def process_debug_tensor(
        self, address: int, location: Any, dtype: Any, shape: Sequence[int], name: str, stream: int
    ) -> bool: ...


class IProfiler(Protocol):
    """Subclassed: called with every layer's time after an inference."""

    def report_layer_time(self, layer: str, milliseconds: float) -> None: ...


class TensorRt(Protocol):
    """The module itself, `tensorrt` or `tensorrt_rtx`."""

    __version__: str
    NetworkDefinitionCreationFlag: NetworkDefinitionCreationFlag
    BuilderFlag: BuilderFlag
    ProfilingVerbosity: ProfilingVerbosity
    MemoryPoolType: MemoryPoolType
    DeviceType: DeviceType
    LayerInformationFormat: LayerInformationFormat
    TensorIOMode: TensorIOMode
    TensorLocation: TensorLocation
    ILogger: Any
    IProgressMonitor: Any
    IDebugListener: Any
    IProfiler: Any
    Builder: Callable[[Any], Builder]
    OnnxParser: Callable[[INetworkDefinition, Any], OnnxParser]
    Runtime: Callable[[Any], Runtime]
    nptype: Callable[[Any], type]


class CrossTensorRt(TensorRt, Protocol):
    """The module `tensorrt_rtx`."""

    ComputeCapability: ComputeCapability


def implement(interface: Any, **methods: Callable[..., object]) -> Any:
    """Return an object of an interface that TensorRT calls back, made of these Python functions by name.

    The interface is known only when the module is there, so that no class of ours can name it as its base.
    """
    return type("Implementation", (interface,), {name: staticmethod(method) for name, method in methods.items()})()
