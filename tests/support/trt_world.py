"""A process with TensorRT that has none: the fakes installed for one test, and what its rules say at the end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fake_pycuda import ORIN, FakePycuda
from fake_tensorrt import FakeTensorRt, install
from onnx import ModelProto
from zoo import residual_net

import engines.trt.backend as tensorrt_backend
from engines.interface import BuildRequest
from engines.quantise.apply_plan import insert_qdq
from engines.quantise.placement import place

PC = {**ORIN, "INTEGRATED": 0}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[FakeTensorRt]:
    """TensorRT on a board, whose memory is one; by indirect parametrisation with PC on another machine."""
    installed = install(monkeypatch, pycuda=FakePycuda(board=getattr(request, "param", ORIN)))
    tensorrt_backend._gpu.cache_clear()
    yield installed
    installed.assert_order()
    tensorrt_backend._gpu.cache_clear()


def net() -> ModelProto:
    """Every rule of a ResNet once."""
    return residual_net((1, 3, 8, 8))


def int8(model: ModelProto) -> BuildRequest:
    """The model under Q/DQ wherever it may be, as if every tensor reached 4."""
    placement = place(model)
    amax = dict.fromkeys(placement.taps, 4.0)
    return BuildRequest(insert_qdq(model, placement, amax), "int8", amax=amax)
