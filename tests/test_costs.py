from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import ModelProto, helper
from trt_world import int8, net
from zoo import Net, image, residual_net

from agent.model import open_model
from agent.model_spec import load_model_spec
from calibrate.plan import ALL_INT8, PrecisionPlan
from engines.backend import Array, BuildRequest, EngineError, ProfiledEngine, open_backend
from engines.costs import Costs, layer_shares, macs_costs, measure_costs
from engines.fusion import Grouping, fusion_groups
from engines.onnxruntime_profile import kernel_times_ms, nodes_by_kernel
from engines.placement import place
from engines.qdq import insert_qdq
from engines.tensorrt_backend import TensorRtBackend
from engines.trt.layers import Layer, nodes_by_layer

ROOT = Path(__file__).resolve().parents[1]
BATCH = np.zeros((1, 3, 8, 8), np.float32)
Sample = tuple[Grouping, Callable[[PrecisionPlan], ProfiledEngine], Costs, Array]


# ---- a machine whose times are known


class Machine:
    """Builds engines that report planted times, each inference `slowdown` times slower than the one before."""

    def __init__(self, grouping: Grouping, slowdown: float = 1.0) -> None:
        self.grouping, self.slowdown, self.clock = grouping, slowdown, 1.0
        self.boundary = np.arange(1, len(grouping.edges) + 1) / 10.0
        self.open = self.most_open = self.built = 0
        self.random: np.random.Generator | None = None

    def build(self, plan: PrecisionPlan) -> PlantedEngine:
        self.built += 1
        self.open += 1
        self.most_open = max(self.open, self.most_open)
        return PlantedEngine(self, [group.name not in plan.floats for group in self.grouping.groups])

    def layers(self, labels: list[bool]) -> dict[str, tuple[float, tuple[str, ...]]]:
        """Per layer its time and nodes: the groups', reformats by name of their reader, and what no plan changes."""
        groups = self.grouping.groups
        made = {group.name: ((2.0 if labels[i] else 5.0) * (i + 1), group.nodes) for i, group in enumerate(groups)}
        for (i, j, _), time_ms in zip(self.grouping.edges, self.boundary, strict=True):
            if labels[i] != labels[j]:
                made[f"reformat {i} {j}"] = time_ms, groups[j].nodes
        return {**made, "decode": (7.0, ("Reshape_9",))}


class PlantedEngine:
    """What the machine says of one plan."""

    def __init__(self, machine: Machine, labels: list[bool]) -> None:
        self.machine, self.labels = machine, labels
        self.inputs, self.outputs = (), ()

    def infer(self, batch: Array) -> dict[str, Array]:
        raise NotImplementedError

    # ARG002: the Protocol's; planted times do not depend on what is inferred.
    def layer_times_ms(self, batch: Array, runs: int = 20) -> dict[str, float]:  # noqa: ARG002
        machine = self.machine
        machine.clock *= machine.slowdown
        if machine.random is not None:
            return {layer: machine.random.lognormal() for layer in machine.layers(self.labels)}
        return {layer: time_ms * machine.clock for layer, (time_ms, _) in machine.layers(self.labels).items()}

    def layer_nodes(self) -> Mapping[str, tuple[str, ...]]:
        return {layer: nodes for layer, (_, nodes) in self.machine.layers(self.labels).items()}

    def close(self) -> None:
        self.machine.open -= 1


@pytest.fixture
def machine() -> Machine:
    model = residual_net()
    return Machine(fusion_groups(model, place(model)))


def unseen(grouping: Grouping) -> NDArray[np.bool_]:
    return np.random.default_rng(3).random((20, len(grouping.groups))) < 0.5


@pytest.mark.parametrize("slowdown", [1.0, 1.01])
def test_planted_costs_are_found_while_the_machine_slows_down(machine: Machine, slowdown: float) -> None:
    machine.slowdown = slowdown
    costs = measure_costs(machine.grouping, machine.build, BATCH)
    assert (costs.source, costs.builds) == ("measured", machine.built)
    assert machine.built <= 8
    assert (machine.open, machine.most_open) == (0, 2)
    assert costs.residual < 0.01
    scale = costs.fixed_ms / 7.0
    for labels in unseen(machine.grouping):
        expected = sum(time_ms for time_ms, _ in machine.layers(labels.tolist()).values())
        assert costs.total_ms(machine.grouping, labels) == pytest.approx(scale * expected, rel=0.02)


def test_random_times_fall_back_to_macs_and_say_so(machine: Machine) -> None:
    machine.random = np.random.default_rng(0)
    told: list[str] = []
    costs = measure_costs(machine.grouping, machine.build, BATCH, lambda _, doing: told.append(doing))
    assert costs.source == "macs"
    assert costs.builds == machine.built
    assert costs.noise > 0.1
    np.testing.assert_array_equal(costs.int8_ms, macs_costs(machine.grouping).int8_ms)
    assert "multiply-accumulates" in told[-1]


def test_progress_counts_the_builds(machine: Machine) -> None:
    seen: list[float] = []
    measure_costs(machine.grouping, machine.build, BATCH, lambda fraction, _: seen.append(fraction))
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == (0.0, 1.0)
    assert len(seen) == machine.built + 1


class Cancelled(Exception):
    pass


@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_cancelled_measurement_closes_its_engines(machine: Machine, at: int) -> None:
    def progress(_fraction: float, _doing: str) -> None:
        if machine.built == at:
            raise Cancelled

    with pytest.raises(Cancelled):
        measure_costs(machine.grouping, machine.build, BATCH, progress)
    assert machine.open == 0


def test_an_engine_that_does_not_tell_its_layers_is_closed(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(_engine: PlantedEngine) -> Mapping[str, tuple[str, ...]]:
        raise EngineError("engine.layers", "names only", "JSON", "build it again")

    monkeypatch.setattr(PlantedEngine, "layer_nodes", damaged)
    with pytest.raises(EngineError, match=r"engine\.layers"):
        measure_costs(machine.grouping, machine.build, BATCH)
    assert (machine.built, machine.open) == (1, 0)


def test_a_group_that_cannot_be_int8_costs_the_same_in_both() -> None:
    model = residual_net()
    machine = Machine(fusion_groups(model, place(model, PrecisionPlan({"Conv_t2": "no kernel"}))))
    costs = measure_costs(machine.grouping, machine.build, BATCH)
    assert costs.int8_ms[1] == costs.float_ms[1] == pytest.approx(10.0, rel=0.05)
    assert macs_costs(machine.grouping).int8_ms[1] == macs_costs(machine.grouping).float_ms[1]


def test_macs_without_a_measurement(machine: Machine) -> None:
    costs = macs_costs(machine.grouping)
    assert (costs.source, costs.builds) == ("macs", 0)
    np.testing.assert_allclose(costs.int8_ms, costs.float_ms / 2.0)
    assert costs.boundary_ms.tolist() == [edge[2] * 9.0 / 1e6 for edge in machine.grouping.edges]
    assert costs.float_ms[0] == 64 * 27 * 4 / 1e6


@pytest.mark.parametrize(
    ("nodes", "shares"),
    [
        (("Conv_t0", "Relu_t1", "t1.int8"), {0: 1.0}),  # the next layer's Q is fused into this one
        (("Conv_t0", "Conv_t2"), {0: 27 / 63, 1: 36 / 63}),  # by their multiply-accumulates
        (("t1.int8",), {1: 1.0}),  # there for the reader that is INT8, not for the other
        (("Flatten_t8",), {3: 1.0}),
        (("GlobalAveragePool_t7",), {}),
        ((), {}),
    ],
)
def test_whose_a_layers_time_is(machine: Machine, nodes: tuple[str, ...], shares: dict[int, float]) -> None:
    labels = np.array([True, True, False, True])
    assert layer_shares(machine.grouping, labels, nodes) == pytest.approx(shares)


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
def test_onnxruntime_tells_every_kernel_and_its_nodes(prepared: Callable[[], ModelProto], scratch: Path) -> None:
    model = prepared()
    with closing(profiled(model)) as engine:
        times, nodes = engine.layer_times_ms(image(model), runs=3), engine.layer_nodes()
    assert times.keys() == nodes.keys()
    assert all(nodes.values())
    assert {node for found in nodes.values() for node in found} == {node.name for node in model.graph.node}
    assert min(times.values()) >= 0.0
    assert list(scratch.iterdir()) == []


def test_what_onnxruntime_fuses_is_in_one_layer() -> None:
    with closing(profiled(residual_net())) as engine:
        nodes = engine.layer_nodes()
    assert ("Conv_t0", "Relu_t1") in nodes.values()


def test_a_closed_engine_and_a_wrong_batch_are_refused() -> None:
    engine = profiled(residual_net())
    with pytest.raises(EngineError, match=r"engine\.batch"):
        engine.layer_times_ms(np.zeros((1, 3, 9, 9), np.float32))
    engine.close()
    with pytest.raises(EngineError, match=r"engine\.closed"):
        engine.layer_times_ms(image(residual_net()))
    with pytest.raises(EngineError, match=r"engine\.closed"):
        engine.layer_nodes()


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


@pytest.fixture(scope="module")
def sample() -> Sample:
    """The sample detector with its measured costs."""
    model = open_model(load_model_spec(ROOT / "examples" / "street" / "model.yaml"))
    grouping = fusion_groups(model.master, model.placement)
    batch = np.zeros(model.input_shape, np.float32)

    def build(plan: PrecisionPlan) -> ProfiledEngine:
        return profiled(quantised(model.master, plan))

    return grouping, build, measure_costs(grouping, build, batch, runs=10), batch


def test_an_unseen_plan_takes_what_the_costs_say(
    sample: Sample,
) -> None:
    grouping, build, costs, batch = sample
    assert costs.source == "measured"
    assert costs.residual < 0.2
    labels = np.random.default_rng(7).random(len(grouping.groups)) < 0.5
    nothing = np.zeros_like(labels)

    def engine(int8: NDArray[np.bool_]) -> ProfiledEngine:
        return build(PrecisionPlan(grouping.plan(int8.tolist(), "planned")))

    with (
        closing(engine(labels)) as mixed,
        closing(engine(nothing)) as plain,
    ):  # side by side: no clock is the same twice
        ratios = [
            sum(mixed.layer_times_ms(batch, 10).values()) / sum(plain.layer_times_ms(batch, 10).values())
            for _ in range(5)
        ]
    predicted = costs.total_ms(grouping, labels) / costs.total_ms(grouping, nothing)
    assert predicted == pytest.approx(np.median(ratios), rel=0.25)


# ---- TensorRT


@pytest.mark.usefixtures("fake")
def test_tensorrt_tells_the_nodes_of_its_layers() -> None:
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
