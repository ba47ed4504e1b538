"""The enumerations, value types and callback classes of TensorRT's bindings, with the bindings' own values."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
from onnx import TensorProto


class PybindEnum(enum.Enum):
    """As pybind makes them: no integer, but one comes out of int()."""

    def __int__(self) -> int:
        return int(self.value)


class Severity(PybindEnum):
    INTERNAL_ERROR = 0
    ERROR = 1
    WARNING = 2
    INFO = 3
    VERBOSE = 4


class DataType(PybindEnum):
    FLOAT = 0
    HALF = 1
    INT8 = 2
    INT32 = 3
    BOOL = 4
    UINT8 = 5
    BF16 = 7
    INT64 = 8


class BuilderFlag(PybindEnum):
    GPU_FALLBACK = 3
    TF32 = 6


class ProfilingVerbosity(PybindEnum):
    LAYER_NAMES_ONLY = 0
    NONE = 1
    DETAILED = 2


class MemoryPoolType(PybindEnum):
    WORKSPACE = 0
    TACTIC_DRAM = 4


class DeviceType(PybindEnum):
    GPU = 0
    DLA = 1


class LayerInformationFormat(PybindEnum):
    JSON = 1


class TensorIOMode(PybindEnum):
    NONE = 0
    INPUT = 1
    OUTPUT = 2


class TensorLocation(PybindEnum):
    DEVICE = 0
    HOST = 1


class TypedFlag(PybindEnum):
    """NetworkDefinitionCreationFlag of TensorRT 10"""

    EXPLICIT_BATCH = 0
    STRONGLY_TYPED = 1


class AlwaysTypedFlag(PybindEnum):
    """NetworkDefinitionCreationFlag of TensorRT 11 and TensorRT-RTX"""

    STRONGLY_TYPED = 0


class ComputeCapability(PybindEnum):
    NONE = 0
    CURRENT = 1
    SM75 = 75
    SM80 = 80
    SM86 = 86
    SM89 = 89
    SM120 = 120


NUMPY = {
    DataType.FLOAT: np.float32,
    DataType.HALF: np.float16,
    DataType.INT8: np.int8,
    DataType.INT32: np.int32,
    DataType.BOOL: np.bool_,
    DataType.UINT8: np.uint8,
    DataType.INT64: np.int64,
}
ONNX = {
    int(TensorProto.FLOAT): DataType.FLOAT,
    int(TensorProto.DOUBLE): DataType.FLOAT,  # what TensorRT makes of it, without an error
    int(TensorProto.FLOAT16): DataType.HALF,
    int(TensorProto.BFLOAT16): DataType.BF16,
    int(TensorProto.INT8): DataType.INT8,
    int(TensorProto.INT32): DataType.INT32,
    int(TensorProto.INT64): DataType.INT64,
    int(TensorProto.BOOL): DataType.BOOL,
    int(TensorProto.UINT8): DataType.UINT8,
}


class Dims:
    """A sequence, equal to the tuple of its sizes, and no tuple."""

    __slots__ = ("_sizes",)

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = tuple(sizes)

    def __len__(self) -> int:
        return len(self._sizes)

    def __getitem__(self, index: int) -> int:
        return self._sizes[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self._sizes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Dims | tuple | list) and tuple(other) == self._sizes

    __hash__ = None  # type: ignore[assignment]  # pybind's has none

    def __repr__(self) -> str:
        return repr(self._sizes)


class IHostMemory(bytearray):
    """Memory of TensorRT's: a buffer that knows its size."""

    __slots__ = ()

    @property
    def nbytes(self) -> int:
        return len(self)


# The classes that users of TensorRT derive from. Their methods are abstract in the bindings, too.


class ILogger:
    Severity: ClassVar[Any] = Severity
    INTERNAL_ERROR = Severity.INTERNAL_ERROR
    ERROR = Severity.ERROR
    WARNING = Severity.WARNING
    INFO = Severity.INFO
    VERBOSE = Severity.VERBOSE

    # Callbacks here and in the next three classes are pure virtual in TensorRT: subclasses override all of them.
    def log(self, severity: PybindEnum, message: str) -> None:
        raise NotImplementedError


class IProgressMonitor:
    def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
        raise NotImplementedError

    def step_complete(self, phase_name: str, step: int) -> bool:
        raise NotImplementedError

    def phase_finish(self, phase_name: str) -> None:
        raise NotImplementedError


class IDebugListener:
    def process_debug_tensor(
        self, addr: Any, location: TensorLocation, type: DataType, shape: Dims, name: str, stream: int
    ) -> bool:
        raise NotImplementedError


class IProfiler:
    def report_layer_time(self, layer_name: str, ms: float) -> None:
        raise NotImplementedError


def nptype(kind: DataType) -> type:
    """TypeError where NumPy has no such type."""
    if kind not in NUMPY:
        raise TypeError("Could not resolve TensorRT datatype to an equivalent numpy datatype.")
    return NUMPY[kind]


def namespace(crosses: bool, always_typed: bool) -> dict[str, Any]:
    """The names in the module beside the factories."""
    named = (
        *(DataType, BuilderFlag, ProfilingVerbosity, MemoryPoolType, DeviceType, LayerInformationFormat, TensorIOMode),
        *(TensorLocation, Dims, IHostMemory, ILogger, IProgressMonitor, IDebugListener, IProfiler),
        *((ComputeCapability,) if crosses else ()),
    )
    return {
        **{kind.__name__: kind for kind in named},
        "NetworkDefinitionCreationFlag": AlwaysTypedFlag if always_typed else TypedFlag,
        "nptype": nptype,
    }
