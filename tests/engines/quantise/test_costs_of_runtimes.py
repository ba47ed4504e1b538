"""The runtimes list times and nodes of their layers, and the costs measured by them hold."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import onnxruntime as ort
import pytest
from onnx import ModelProto, helper
from trt_world import int8, net
from zoo import Net, image, residual_net

from calibrate.plan import ALL_INT8, PrecisionPlan
from engines.interface import BuildRequest, ProfiledEngine
from engines.onnxruntime_backend import kernel_times_ms, nodes_by_kernel
from engines.quantise.apply_plan import insert_qdq
from engines.quantise.costs import measure_costs
from engines.quantise.fusion import fusion_groups
from engines.quantise.placement import place
from engines.registry import open_backend
from engines.trt.backend import TensorRtBackend
from engines.trt.layers import Layer, nodes_by_layer

# ---- ONNX Runtime


def quantised(model: ModelProto, plan: PrecisionPlan = ALL_INT8) -> ModelProto:
    """As if every tensor reached 4."""
    return insert_qdq(model, place(model, plan), dict.fromkeys(place(model).taps, 4.0))


def profiled(model: ModelProto) -> ProfiledEngine:
    engine = open_backend("onnxruntime").load(model.SerializeToString())
    assert isinstance(engine, ProfiledEngine)
    return engine


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files go."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("prepared", [residual_net, lambda: quantised(residual_net())])
def test_onnxruntime_lists_every_kernel_and_its_nodes(prepared: Callable[[], ModelProto], scratch: Path) -> None:
    model = prepared()
    with closing(profiled(model)) as engine:
        times, nodes = engine.layer_times_ms(image(model), runs=3), engine.layer_nodes()
    assert times.keys() == nodes.keys()
    assert all(nodes.values())
    assert {node for found in nodes.values() for node in found} == {node.name for node in model.graph.node}
    assert min(times.values()) >= 0.0
    assert list(scratch.iterdir()) == []


def test_an_interrupted_profile_leaves_no_files(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Path] = []
    inference = ort.InferenceSession.run

    def interrupted(session: ort.InferenceSession, *arguments: Any) -> Any:
        written.extend(path for path in scratch.rglob("*") if path.is_file())
        if written:
            raise KeyboardInterrupt
        return inference(session, *arguments)

    with closing(profiled(residual_net())) as engine:
        monkeypatch.setattr(ort.InferenceSession, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.layer_times_ms(image(residual_net()))
    assert written
    assert list(scratch.iterdir()) == []


def test_a_profile_is_read_without_its_first_runs() -> None:
    def event(name: str, microseconds: int, category: str = "Node") -> dict[str, object]:
        return {"cat": category, "name": name, "dur": microseconds}

    runs = [event("conv_kernel_time", dur) for dur in (900, 10, 30, 20)]
    others = [event("model_run", 50, "Session"), event("conv_fence_before", 7), event("once_kernel_time", 5)]
    assert kernel_times_ms(json.dumps([*runs, *others]), 1) == {"conv": 0.02}


def test_kernels_are_matched_by_their_tensors_or_their_names() -> None:
    test_net = Net((1, 3, 8, 8))
    conv = test_net.conv("image", 3, 4)
    silu = test_net.node("Mul", conv, test_net.node("Sigmoid", conv))
    graph = test_net.model(test_net.conv(silu, 4, 2))
    kernels = [  # as ONNX Runtime names them on x86
        ("Conv", ["image"], "reorder_token_0", "t0_nchwc"),
        ("QuickGelu", ["reorder_token_0"], "reorder_token_1", "Mul_t2/QuickGeluFusion/"),
        ("ReorderOutput", ["reorder_token_1"], "t2", "ReorderOutput"),
        ("FusedConv", ["t2"], "t3", "fused Conv_t3"),
        ("ReorderOutput", ["t3"], "again", "ReorderOutput_token_9"),
    ]
    nodes = [helper.make_node(kind, inputs, [output], name=name) for kind, inputs, output, name in kernels]
    optimised = helper.make_model(helper.make_graph(nodes, "optimised", graph.graph.input, []))
    assert nodes_by_kernel(graph, optimised) == {
        "t0_nchwc": ("Conv_t0",),
        "Mul_t2/QuickGeluFusion/": ("Sigmoid_t1", "Mul_t2"),
        "ReorderOutput": ("Conv_t3",),  # for its reader's sake
        "fused Conv_t3": ("Conv_t3",),
        "ReorderOutput_token_9": ("Conv_t3",),
    }


# ---- TensorRT


@pytest.mark.usefixtures("fake")
def test_tensorrt_lists_the_nodes_of_its_layers() -> None:
    request = int8(net())
    backend = TensorRtBackend()
    with closing(backend.load(backend.build(request).engine)) as engine:
        assert isinstance(engine, ProfiledEngine)
        times, nodes = engine.layer_times_ms(image(net()), runs=2), engine.layer_nodes()
    assert times.keys() == nodes.keys()
    assert ("Conv_t0", "Relu_t1") in nodes.values()
    layers = {layer for group in fusion_groups(net(), place(net())).groups for layer in group.layers}
    assert layers <= {node for found in nodes.values() for node in found}


@pytest.mark.usefixtures("fake")
def test_tensorrt_engines_are_measured() -> None:
    model, backend = net(), TensorRtBackend()
    grouping = fusion_groups(model, place(model))

    def build(plan: PrecisionPlan) -> ProfiledEngine:
        return backend.load(backend.build(BuildRequest(quantised(model, plan), "int8")).engine)

    costs = measure_costs(grouping, build, image(model), runs=2)
    assert costs.builds == 8
    assert costs.residual < 1e-6  # the fake's layers take what they take, in any type


def test_a_reformatting_is_its_layers() -> None:
    layers = [
        Layer("Conv_0 + Relu_1", "CaskConvolution", ("Conv_0", "Relu_1")),
        Layer("Reformatting CopyNode for Input Tensor 0 to Conv_0 + Relu_1", "Reformat"),
        Layer("Reformatting CopyNode for Output Tensor 0 to Conv_0 + Relu_1", "Reformat"),
        Layer("Reformatting CopyNode for Network Output scores", "Reformat"),
    ]
    assert list(nodes_by_layer(layers).values()) == [("Conv_0", "Relu_1")] * 3 + [()]
