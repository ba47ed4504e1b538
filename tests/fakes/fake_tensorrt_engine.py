"""The fake's runtime and engines: which plans load, and what an engine says about itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fake_tensorrt_config import Shape
from fake_tensorrt_context import IExecutionContext
from fake_tensorrt_layers import Row, inspector_json, listing
from fake_tensorrt_plan import Plan, Program
from fake_tensorrt_types import DataType, Dims, LayerInformationFormat, TensorIOMode
from onnx import ModelProto

if TYPE_CHECKING:
    from fake_tensorrt import FakeTensorRt

_FAILED = "IRuntime::deserializeCudaEngine: Error Code 1: Serialization ({})"
_VERSION = "Serialization assertion stdVersionRead == serializationVersion failed.Version tag does not match"
_GPU = (
    "IRuntime::deserializeCudaEngine: Error Code 6: API Usage Error (The engine plan file is generated on an "
    "incompatible device, expecting compute {here} got compute {there}, please rebuild.)"
)
_CROSS_SUPPORTS = {(7, 5), (8, 0), (8, 6), (8, 7), (8, 9), (12, 0), (12, 1)}  # 8.7, which no PC has, for the tests
_UNSUPPORTED = (
    "IRuntime::deserializeCudaEngine: Error Code 6: API Usage Error (The engine cannot run on this GPU, which has "
    "compute capability {}. Supported compute capabilities: 8.0 8.6 8.9 12.0 12.1 >12.0. TensorRT-RTX does not support"
)


class Runtime:
    def __init__(self, world: FakeTensorRt, logger: Any) -> None:
        world.require_context("Runtime()")
        world.register(logger, "Runtime")
        world.watch(self, "runtime")
        self._world = world

    def deserialize_cuda_engine(self, serialized_engine: bytes) -> ICudaEngine | None:
        world = self._world
        world.require_context("deserialize_cuda_engine")
        if world.fails("deserialize"):
            return None
        try:
            plan = Plan.from_bytes(bytes(serialized_engine))
        except ValueError as error:
            world.error(_FAILED.format(error))
            return None
        major, minor = world.pycuda.device.compute_capability()
        if plan.home != (world.name, world.version):
            world.error(_FAILED.format(_VERSION))
            return None
        if plan.capability != 10 * major + minor:
            there = "{}.{}".format(*divmod(plan.capability, 10))
            world.error(_GPU.format(here=f"{major}.{minor}", there=there))
            return None
        if world.is_cross and (major, minor) not in _CROSS_SUPPORTS:
            world.error(_UNSUPPORTED.format(f"{major}.{minor}"))
            return None
        return ICudaEngine(world, self, plan)


class ICudaEngine:
    """Keeps its runtime alive, as the bindings do."""

    def __init__(self, world: FakeTensorRt, runtime: Runtime, plan: Plan) -> None:
        world.watch(self, "engine")
        self._world, self._runtime = world, runtime
        self.plan, self.program = plan, Program(plan)
        self.names = [*self.program.inputs, *self.program.outputs]

    @property
    def num_io_tensors(self) -> int:
        return len(self.names)

    @property
    def num_optimization_profiles(self) -> int:
        return max(len(self.plan.profiles), 1)

    def get_tensor_name(self, index: int) -> str:
        return self.names[index]

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        if name not in self.names:
            return TensorIOMode.NONE
        return TensorIOMode.INPUT if name in self.program.inputs else TensorIOMode.OUTPUT

    def get_tensor_dtype(self, name: str) -> DataType:
        return self.program.types[name]

    def get_tensor_shape(self, name: str) -> Dims:
        return Dims(self.program.dims[name])

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[Dims]:
        return [Dims(shape) for shape in self.profile(name, profile_index)]

    def create_execution_context(self) -> IExecutionContext | None:
        self._world.require_context("create_execution_context")
        return None if self._world.fails("context") else IExecutionContext(self._world, self)

    def create_engine_inspector(self) -> EngineInspector:
        self._world.require_context("create_engine_inspector")
        return EngineInspector(self)

    def profile(self, name: str, index: int) -> Sequence[Shape]:
        """Smallest, best and largest shape of an input; its own where that is fixed."""
        fixed = self.program.inputs[name]
        shapes = self.plan.profiles[index] if self.plan.profiles else {}
        return [tuple(shape) for shape in shapes.get(name, (fixed,) * 3)]

    def rows(self) -> list[Row]:
        model = ModelProto.FromString(self.plan.graph)
        return listing(model, {*self.plan.debug, *self.plan.outputs}, self.plan.without_int8)

    def information(self) -> str:
        return inspector_json(self.rows(), self.names, self.plan.is_detailed)


class EngineInspector:
    """Keeps its engine alive."""

    def __init__(self, engine: ICudaEngine) -> None:
        self._engine = engine

    def get_engine_information(self, format: LayerInformationFormat) -> str:
        assert format is LayerInformationFormat.JSON, "the other format is for people"
        return self._engine.information()
