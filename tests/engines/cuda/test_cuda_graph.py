"""Engines captured as CUDA graphs: kept only where that is faster, given up where it is not possible."""

from __future__ import annotations

import time
from contextlib import closing

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


@pytest.fixture
def slow_enqueue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queueing kernel by kernel costs the host something."""
    real = TensorRtEngine._execute

    def execute(self: TensorRtEngine, slot: object) -> None:
        time.sleep(0.002)
        real(self, slot)  # type: ignore[arg-type]  # a Slot

    monkeypatch.setattr(TensorRtEngine, "_execute", execute)


@pytest.mark.usefixtures("slow_enqueue")
def test_a_faster_graph_serves(graphs: FakeCudaGraphs) -> None:
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
    real = cuda_graph.CudaGraph.launch

    def launch(self: cuda_graph.CudaGraph) -> None:
        time.sleep(0.005)
        real(self)

    monkeypatch.setattr(cuda_graph.CudaGraph, "launch", launch)
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


def test_without_nvidias_bindings_nothing_is_captured() -> None:
    with closing(loaded(BuildRequest(residual_net((1, 3, 8, 8))))) as engine:
        assert engine.infer(image(residual_net()))["t9"].shape == (1, 5)
