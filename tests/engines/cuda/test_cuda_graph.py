"""Engines captured as CUDA graphs: kept only where that is faster, given up where it is not possible."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from fake_cuda_graphs import FakeCudaGraphs
from fake_tensorrt import FakeTensorRt
from zoo import Net, image, residual_net, run

from engines.cuda import cuda_graph
from engines.interface import BuildRequest, ShapeRange
from engines.trt.backend import TensorRtBackend
from engines.trt.session import TensorRtEngine

pytestmark = pytest.mark.usefixtures("fake")

OPEN_PROFILE = ({"image": ShapeRange((1, 3, 8, 8), (1, 3, 8, 8), (2, 3, 16, 16))},)


@pytest.fixture
def graphs(fake: FakeTensorRt, monkeypatch: pytest.MonkeyPatch) -> FakeCudaGraphs:
    installed = FakeCudaGraphs(fake.pycuda)
    installed.install(monkeypatch)
    return installed


def loaded(request: BuildRequest) -> TensorRtEngine:
    backend = TensorRtBackend()
    return backend.load(backend.build(request).engine)


def plant_times(monkeypatch: pytest.MonkeyPatch, graph_s: float) -> None:
    """Let a graph take so long where its work, queued kernel by kernel, takes 1 s."""
    real = cuda_graph._timed

    def timed(stream: Any, work: Callable[[], object]) -> float:
        real(stream, work)
        return graph_s if isinstance(getattr(work, "__self__", None), cuda_graph.CudaGraph) else 1.0

    monkeypatch.setattr(cuda_graph, "_timed", timed)


def test_a_faster_graph_serves(graphs: FakeCudaGraphs, monkeypatch: pytest.MonkeyPatch) -> None:
    plant_times(monkeypatch, 0.5)
    with closing(loaded(BuildRequest(residual_net((1, 3, 8, 8))))) as engine:
        launched = graphs.launches
        for seed in range(4):
            batch = image(residual_net(), seed)
            expected = run(residual_net((1, 3, 8, 8)), batch)["t9"]
            np.testing.assert_allclose(engine.infer(batch)["t9"], expected, rtol=1e-4, atol=1e-4)
        assert graphs.launches == launched + 4
        assert engine.layer_times_ms(image(residual_net()), runs=2)  # a graph has no times of layers
        assert graphs.launches == launched + 4
    assert [graph.users for graph in graphs.graphs] == [0, 0]


def test_a_graph_that_is_no_faster_is_dropped(graphs: FakeCudaGraphs, monkeypatch: pytest.MonkeyPatch) -> None:
    plant_times(monkeypatch, 1.0)
    with closing(loaded(BuildRequest(residual_net((1, 3, 8, 8))))) as engine:
        launched = graphs.launches
        assert launched > 0
        engine.infer(image(residual_net()))
        assert graphs.launches == launched
    assert [graph.users for graph in graphs.graphs] == [0, 0]


def test_an_engine_of_several_shapes_is_not_captured(graphs: FakeCudaGraphs) -> None:
    net = Net(("n", 3, "h", "w"))
    with closing(loaded(BuildRequest(net.model(net.conv("image", 3, 4)), profiles=OPEN_PROFILE))) as engine:
        engine.infer(np.zeros((2, 3, 9, 16), np.float32))
    assert graphs.graphs == []


def test_work_that_cannot_be_captured_serves_without_a_graph(
    fake: FakeTensorRt, graphs: FakeCudaGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = TensorRtEngine._execute

    def execute(self: TensorRtEngine, slot: object) -> None:
        if fake.pycuda.queue(self.stream.handle).captured is not None:
            fake.fail["execute"] = "cudaErrorStreamCaptureUnsupported"
        try:
            real(self, slot)  # type: ignore[arg-type]  # a Slot
        finally:
            fake.fail.clear()

    monkeypatch.setattr(TensorRtEngine, "_execute", execute)
    with closing(loaded(BuildRequest(residual_net((1, 3, 8, 8))))) as engine:
        assert engine.infer(image(residual_net()))["t9"].shape == (1, 5)
    assert graphs.launches == 0
