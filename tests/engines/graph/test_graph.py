from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper
from zoo import Net, assert_same_bits, residual_net, run

from engines.errors import EngineError
from engines.graph.load import canonical_hash, image_input, load_model, trial_image
from engines.graph.passes import PASSES, TOLERANCE, prepare
from engines.interface import TensorSpec


def save(model: ModelProto, folder: Path) -> Path:
    path = folder / "model.onnx"
    onnx.save(model, path)
    return path


def refused(path: Path) -> str:
    with pytest.raises(EngineError) as caught:
        load_model(path)
    assert all((caught.value.found, caught.value.expected, caught.value.remedy))
    return caught.value.code


def operators(model: ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


# ---- loading


def test_refuses_files_that_are_no_model(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    assert refused(path) == "model.missing"
    path.write_bytes(b"")
    assert refused(path) == "model.empty"
    path.write_bytes(b"\x89PNG\r\n\x1a\n" * 20)
    assert refused(path) == "model.unreadable"
    path.write_bytes(ModelProto(producer_name="nothing").SerializeToString())
    assert refused(path) == "model.unreadable"


def test_refuses_what_the_checker_refuses(tmp_path: Path) -> None:
    model = residual_net()
    model.graph.node[1].input[0] = "nowhere"
    assert refused(save(model, tmp_path)) == "model.invalid"


def test_refuses_names_types_and_versions_that_are_none(tmp_path: Path) -> None:
    path = save(residual_net(), tmp_path)
    path.write_bytes(path.read_bytes().replace(b"Relu_t1", b"Relu_\xff1"))
    with pytest.raises(EngineError, match=r"model\.unreadable: .*not UTF-8"):
        load_model(path)
    model = residual_net()
    model.graph.input[0].type.tensor_type.elem_type = 99
    with pytest.raises(EngineError, match=r"model\.invalid: .*'image' of unknown type 99"):
        load_model(save(model, tmp_path))
    model = residual_net()
    model.opset_import[0].version = 2**62
    assert refused(save(model, tmp_path)) in ("model.invalid", "model.operator")


@pytest.mark.parametrize("location", ["a\0b", "x" * 5000, ".", "/dev/zero", "circle"])
def test_refuses_external_data_that_no_file_can_hold(location: str, tmp_path: Path) -> None:
    model = residual_net()
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    entry = tensor.external_data.add()
    entry.key, entry.value = "location", location
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    assert refused(tmp_path / "model.onnx") == "model.external-data"


def test_names_the_unknown_operator(tmp_path: Path) -> None:
    model = residual_net()
    model.graph.node[1].op_type, model.graph.node[1].domain = "Frobnicate", "acme"
    with pytest.raises(EngineError, match=r"operator acme\.Frobnicate in node 'Relu_t1'"):
        load_model(save(model, tmp_path))


@pytest.mark.parametrize(
    ("operator", "domain"),
    [("ConvInteger", ""), ("QLinearConv", ""), ("QLinearAdd", "com.microsoft"), ("QuantizeLinear", "com.microsoft")],
)
def test_refuses_integer_operators(operator: str, domain: str, tmp_path: Path) -> None:
    model = residual_net()
    model.graph.node[1].op_type, model.graph.node[1].domain = operator, domain
    with pytest.raises(EngineError, match=rf"model\.quantised: operator \S*{operator} in node 'Relu_t1'.*Q/DQ format"):
        load_model(save(model, tmp_path))


@pytest.mark.parametrize(
    ("elem_type", "shape"),
    [
        (TensorProto.FLOAT, [1, 2, 8, 8]),
        (TensorProto.UINT8, [1, 8, 8, "channels"]),
        (TensorProto.FLOAT, [1, "channels", 8, 8]),
        (TensorProto.FLOAT, [1, 3, 64]),
        (TensorProto.INT8, [1, 3, 8, 8]),
        (TensorProto.FLOAT16, [1, 3, 8, 8]),
    ],
)
def test_refuses_an_input_that_is_no_image(elem_type: int, shape: list[int | str], tmp_path: Path) -> None:
    value = helper.make_tensor_value_info("x", elem_type, shape)
    result = helper.make_tensor_value_info("y", elem_type, shape)
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", [value], [result])
    assert refused(save(helper.make_model(graph), tmp_path)) == "model.input"


@pytest.mark.parametrize("elem_type", [TensorProto.FLOAT, TensorProto.UINT8])
@pytest.mark.parametrize("shape", [[1, 3, 8, 8], [1, 8, 8, 3], ["n", "h", "w", 1], [1, 1, "h", "w"]])
def test_an_image_is_float_or_bytes_channels_first_or_last(
    elem_type: int, shape: list[int | str], tmp_path: Path
) -> None:
    value, result = (helper.make_tensor_value_info(name, elem_type, shape) for name in "xy")
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", [value], [result])
    model = load_model(save(helper.make_model(graph), tmp_path))
    dtype = np.dtype(np.float32 if elem_type == TensorProto.FLOAT else np.uint8)
    assert image_input(model) == TensorSpec("x", dtype, tuple(d if isinstance(d, int) else None for d in shape))
    trial = trial_image(model)
    assert (trial.dtype, trial.shape) == (dtype, tuple({"n": 1, "h": 256, "w": 256}.get(str(d), d) for d in shape))
    assert trial.std() > 0


def test_refuses_two_inputs(tmp_path: Path) -> None:
    model = residual_net()
    model.graph.input.append(helper.make_tensor_value_info("second", TensorProto.FLOAT, [1, 3, 8, 8]))
    with pytest.raises(EngineError, match="2 inputs"):
        load_model(save(model, tmp_path))


def test_reads_external_data_beside_the_model(tmp_path: Path) -> None:
    model = residual_net()
    onnx.save(residual_net(), tmp_path / "m.onnx", save_as_external_data=True, location="m.bin", size_threshold=0)
    loaded = load_model(tmp_path / "m.onnx")
    (tmp_path / "m.bin").unlink()
    assert_same_bits(model, loaded)


@pytest.mark.parametrize("location", ["../m.bin", "/etc/passwd", "link.bin", "gone.bin", ""])
def test_refuses_external_data_that_is_elsewhere(location: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "m.bin").write_bytes(bytes(1 << 16))
    (folder / "link.bin").symlink_to(tmp_path / "m.bin")
    onnx.save(residual_net(), folder / "m.onnx", save_as_external_data=True, location="m.bin", size_threshold=0)
    model = onnx.load(folder / "m.onnx", load_external_data=False)
    for entry in model.graph.initializer[0].external_data:
        if entry.key == "location":
            entry.value = location
    (folder / "m.onnx").write_bytes(model.SerializeToString())
    assert refused(folder / "m.onnx") == "model.external-data"


# ---- preparing


def test_prepare_leaves_its_input_alone_and_repeats_itself() -> None:
    net = Net()
    model = net.model(net.node("Relu", net.norm(net.conv("image", 3, 4), 4)), opset=11, ir_version=6)
    before = model.SerializeToString()
    first, second = prepare(model, run), prepare(model, run)
    assert model.SerializeToString() == before
    assert canonical_hash(first) == canonical_hash(second) != canonical_hash(model)
    assert canonical_hash(prepare(first, run)) == canonical_hash(first)


def test_hash_ignores_what_does_not_compute() -> None:
    model, other = residual_net(), residual_net()
    other.producer_name, other.doc_string = "someone", "text"
    other.graph.node[0].doc_string = "text"
    assert canonical_hash(model) == canonical_hash(other)
    other.graph.initializer[0].raw_data = bytes(len(other.graph.initializer[0].raw_data))
    assert canonical_hash(model) != canonical_hash(other)


@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("layer", ["Conv", "ConvTranspose"])
def test_folds_batch_norm_into_convolutions(layer: str, group: int) -> None:
    net = Net((1, 4, 8, 8))
    weight = net.weight(8, 4 // group, 3, 3) if layer == "Conv" else net.weight(4, 8 // group, 3, 3)
    model = net.model(net.norm(net.node(layer, "image", weight, group=group), 8))
    assert operators(prepare(model, run)) == [layer]


@pytest.mark.parametrize("transposed", [0, 1])
def test_folds_batch_norm_into_gemm(transposed: int) -> None:
    net = Net((2, 3, 2, 2))
    weight = net.weight(5, 12) if transposed else net.weight(12, 5)
    product = net.node(
        "Gemm", net.node("Flatten", "image"), weight, net.weight(5), transB=transposed, alpha=0.5, beta=3.0
    )
    assert operators(prepare(net.model(net.norm(product, 5)), run)) == ["Flatten", "Gemm"]


def test_batch_norm_stays_where_others_read_the_convolution() -> None:
    net = Net()
    conv = net.conv("image", 3, 4)
    read_twice = net.model(net.node("Add", net.norm(conv, 4), conv))
    assert "BatchNormalization" in operators(prepare(read_twice, run))
    net = Net()
    conv = net.conv("image", 3, 4)
    assert "BatchNormalization" in operators(prepare(net.model(net.norm(conv, 4), conv), run))


def test_shared_weights_are_folded_apart() -> None:
    net = Net()
    weight = net.weight(4, 3, 3, 3)
    branches = [net.norm(net.node("Conv", "image", weight), 4) for _ in range(2)]
    assert operators(prepare(net.model(net.node("Sub", *branches)), run)) == ["Conv", "Conv", "Sub"]


def test_drops_what_does_nothing() -> None:
    net = Net()
    net.conv("image", 3, 4)  # without a reader
    x = net.node("Dropout", net.node("Identity", net.node("Identity", "image")))
    scale = net.node("Constant", value_float=2.0)
    master = prepare(net.model(net.node("Identity", net.node("Mul", x, scale))), run)
    assert operators(master) == ["Mul", "Identity"]  # the last one makes the output
    assert list(master.graph.node[0].input) == ["image", "t4"]
    assert [tensor.name for tensor in master.graph.initializer] == ["t4"]


def test_names_are_unique_and_deterministic() -> None:
    model = residual_net()
    for node in model.graph.node[:3]:
        node.name = ""
    model.graph.node[4].name = model.graph.node[3].name
    names = [node.name for node in prepare(model, run).graph.node]
    assert names[:5] == ["Conv_t0", "Relu_t1", "Conv_t2", "Relu_t3", "Relu_t3_2"]
    assert len(set(names)) == len(names)


def test_old_opsets_and_initialisers_among_the_inputs() -> None:
    net = Net()
    probabilities = net.node("Softmax", net.node("Flatten", net.conv("image", 3, 4)), axis=1)
    model = net.model(probabilities, opset=9)
    model.ir_version = 3
    for tensor in model.graph.initializer:
        model.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    master = prepare(model, run)
    assert master.opset_import[0].version == 13
    assert [value.name for value in master.graph.input] == ["image"]


def test_bodies_of_control_flow_keep_what_they_capture() -> None:
    net = Net()
    kept = net.node("Identity", net.node("Relu", "image"))
    branches: dict[str, Any] = {
        f"{branch}_branch": helper.make_graph(
            [helper.make_node(operator, [kept], [branch])],
            branch,
            [],
            [helper.make_tensor_value_info(branch, TensorProto.FLOAT, [1, 3, 8, 8])],
        )
        for branch, operator in (("then", "Neg"), ("else", "Abs"))
    }
    model = net.model(net.node("If", net.constant(np.array(True)), **branches))
    assert operators(prepare(model, run)) == ["Relu", "Identity", "If"]


def test_refuses_a_master_with_other_results() -> None:
    results = cycle([{"y": np.ones(3, np.float32)}, {"y": np.full(3, 1 + 2 * TOLERANCE, np.float32)}])
    with pytest.raises(EngineError, match=r"model\.pass.*output 'y'"):
        prepare(residual_net(), lambda _model, _batch: next(results))


@pytest.mark.parametrize(
    ("operator", "noise", "is_same"), [("Sigmoid", 1e-5, True), ("Sigmoid", 1e-2, False), ("Relu", 1e-5, False)]
)
def test_probabilities_next_to_zero_are_compared_by_their_logits(operator: str, noise: float, is_same: bool) -> None:
    """A text detector sees none in noise: what rounding adds to a logit is a thousandth of its probability."""
    net = Net()
    model = net.model(net.node(operator, net.conv("image", 3, 1)))
    logits = cycle([-8.0, -8.0 + noise])

    def runs(graph: ModelProto, _: Any) -> dict[str, Any]:
        logit = next(logits)
        are_logits = graph.graph.node[-1].op_type == "Identity"
        return {graph.graph.output[0].name: np.full((1, 1, 8, 8), logit if are_logits else 1e-4 * (9 + logit) ** 99)}

    if is_same:
        prepare(model, runs)
    else:
        with pytest.raises(EngineError, match=r"model\.pass"):
            prepare(model, runs)


@pytest.mark.parametrize("opset", [12, 13])
def test_open_dimensions_of_paddle_are_open(opset: int, tmp_path: Path) -> None:
    """Paddle2ONNX writes -1 and "?"; two dimensions of one name would have to be equal."""
    net = Net((1, 3, "height", "width"))
    model = net.model(net.node("Sigmoid", net.conv("image", 3, 1)), opset=opset)
    batch, _, height, width = model.graph.input[0].type.tensor_type.shape.dim
    batch.dim_value, height.dim_param, width.dim_param = -1, "?", "?"
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    loaded = load_model(tmp_path / "model.onnx")
    assert image_input(loaded).shape == (None, 3, None, None)
    assert not any(each.dim_param for each in loaded.graph.input[0].type.tensor_type.shape.dim)
    assert image_input(prepare(loaded, run, (1, 3, 8, 16))).shape == (None, 3, None, None)


def test_refuses_a_pass_that_breaks_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    def lose_a_node(model: ModelProto) -> ModelProto:
        del model.graph.node[0]
        return model

    monkeypatch.setattr("engines.graph.passes.PASSES", (*PASSES, lose_a_node))
    with pytest.raises(EngineError, match="lose_a_node"):
        prepare(residual_net(), run)
