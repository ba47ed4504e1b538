"""An engine on a device whose work overlaps the caller's."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest
from fiber_executor import COMPILER, FiberExecutor
from numpy.typing import NDArray

from engines.cuda.kernels import CudaExecutor, DevicePreprocess, KernelGeometry
from engines.interface import Array, Engine, TensorSpec
from engines.preprocessing import ImageTransform


class OverlappingDeviceEngine:
    """An engine that preprocesses, as one on a GPU does: here both run on the CPU.

    Takes a second frame before it has finished the first, and never a third.
    """

    def __init__(self, engine: Engine) -> None:
        if COMPILER is None:
            pytest.skip("no C++ compiler to build kernels.cu for the CPU: install g++, or set CXX")
        self._engine = engine
        self._executor = FiberExecutor(KernelGeometry(11, 2, 64))
        self._preprocess = DevicePreprocess(cast(CudaExecutor, self._executor))
        self.inputs: list[TensorSpec] = list(engine.inputs)
        self.outputs: list[TensorSpec] = list(engine.outputs)
        self.under_way: dict[int, dict[str, Array]] = {}
        self.most = 0

    def infer(self, batch: Array) -> dict[str, Array]:
        raise AssertionError(f"a network input {batch.shape} for an engine that takes frames")

    def start_image(self, frame: NDArray[np.uint8], transform: ImageTransform) -> int:
        lying = self._executor.upload(frame)
        made = self._executor.empty(transform.input_shape, transform.dtype)
        self._preprocess.run(transform, lying.address, made.address)
        return self._begun(self._engine.infer(self._executor.download(made)))

    def close(self) -> None:
        self._engine.close()

    def start(self, batch: Array) -> int:
        return self._begun(self._engine.infer(batch))

    def _begun(self, outputs: dict[str, Array]) -> int:
        ticket = max(self.under_way, default=0) + 1
        self.under_way[ticket] = outputs
        self.most = max(self.most, len(self.under_way))
        return ticket

    def is_done(self, ticket: int) -> bool:
        return ticket in self.under_way

    def finish(self, ticket: int) -> dict[str, Array]:
        assert ticket == min(self.under_way), "finished out of order"
        return self.under_way.pop(ticket)
