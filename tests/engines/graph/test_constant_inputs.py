"""Inputs beside the image become constants of the graph, before anybody else reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from model_families import IMAGE, family, rtdetr_deployed
from onnx import ModelProto, TensorProto, helper
from zoo import Net, residual_net, run

from engines.errors import EngineError
from engines.graph.constant_inputs import box_size
from engines.graph.load import canonical_hash, image_input, load_model

SIZE = "orig_target_sizes"
PICTURE = np.random.default_rng(0).random(IMAGE, np.float32)


def saved(folder: Path, model: ModelProto) -> Path:
    (folder / "m.onnx").write_bytes(model.SerializeToString())
    return folder / "m.onnx"


def with_input(kind: int, shape: list[int | str] | None, name: str = "more") -> ModelProto:
    """A classifier with an input that it does not read."""
    model = residual_net()
    model.graph.input.insert(0, helper.make_tensor_value_info(name, kind, shape))
    return model


def refusal(path: Path, constants: dict[str, Any]) -> EngineError:
    with pytest.raises(EngineError) as caught:
        load_model(path, constants)
    return caught.value


@pytest.mark.parametrize("batch", [1, "batch"])
@pytest.mark.parametrize("value", [[640, 480], [[640, 480]], [640.0, 480.0]])
def test_a_graph_computes_with_a_constant_as_with_the_input(batch: int | str, value: Any, tmp_path: Path) -> None:
    model = family(rtdetr_deployed, (batch, *IMAGE[1:]))
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    expected = session.run(None, {"image": PICTURE, SIZE: np.array([[640, 480]])})
    pinned = load_model(saved(tmp_path, model), {SIZE: value})
    assert image_input(pinned).name == "image"
    for name, output in zip(("scores", "boxes", "labels"), expected, strict=True):
        np.testing.assert_array_equal(run(pinned, PICTURE)[name], output)


def test_a_constant_is_broadcast_over_a_batch(tmp_path: Path) -> None:
    net = Net(("batch", *IMAGE[1:]))
    means = net.node("Flatten", net.node("GlobalAveragePool", net.conv("image", 3, 2)))
    model = net.model(net.node("Mul", means, SIZE))
    model.graph.input.append(helper.make_tensor_value_info(SIZE, TensorProto.FLOAT, ["batch", 2]))
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info(model.graph.output[0].name, 1, ["batch", 2]))
    pinned = load_model(saved(tmp_path, model), {SIZE: [96, 64]})
    (both,), (one,) = (run(pinned, each).values() for each in (np.concatenate((PICTURE, PICTURE)), PICTURE))
    np.testing.assert_allclose(both, np.concatenate((one, one)), rtol=1e-5)


def test_models_of_two_constants_are_two_models(tmp_path: Path) -> None:
    path = saved(tmp_path, family(rtdetr_deployed))
    first, same, other = (canonical_hash(load_model(path, {SIZE: value})) for value in ([9, 8], [[9, 8]], [8, 9]))
    assert first == same != other


def test_the_order_of_the_inputs_and_an_old_ir_version_do_not_matter(tmp_path: Path) -> None:
    model = with_input(TensorProto.FLOAT, [1, 2], "scale_factor")
    model.ir_version = 3
    model.graph.input.extend(
        helper.make_tensor_value_info(each.name, each.data_type, list(each.dims)) for each in model.graph.initializer
    )
    path = saved(tmp_path, model)
    assert "scale_factor: [1, 1]" in refusal(path, {}).remedy
    assert image_input(load_model(path, {"scale_factor": [1, 1]})).name == "image"


@pytest.mark.parametrize(
    ("kind", "shape", "value"),
    [
        (TensorProto.INT64, [1, 2], [640, 480, 3]),
        (TensorProto.INT64, [1, 2], [[[640, 480]]]),
        (TensorProto.INT64, [1, 2], [640.5, 480]),
        (TensorProto.INT64, [1, 2], [640, [480]]),
        (TensorProto.INT64, [1, 2], "640"),
        (TensorProto.INT64, [1, 2], None),
        (TensorProto.UINT8, [2], [256, 0]),
        (TensorProto.BOOL, [2], [2, 0]),
        (TensorProto.FLOAT16, [2], [1e6, 0]),
        (TensorProto.FLOAT, [1, 2], [[]]),
        (TensorProto.STRING, [1], 1),
        (TensorProto.FLOAT, None, 1),
        (TensorProto.FLOAT, [1 << 20, 1 << 20], 1),
    ],
)
def test_a_constant_that_the_input_cannot_take_is_refused(
    kind: int, shape: list[int | str] | None, value: Any, tmp_path: Path
) -> None:
    found = refusal(saved(tmp_path, with_input(kind, shape)), {"more": value})
    assert found.code == "model.constant"
    assert "'more'" in found.found


def test_a_constant_for_no_input_lists_the_inputs(tmp_path: Path) -> None:
    found = refusal(saved(tmp_path, family(rtdetr_deployed)), {"orig_size": [640, 480]})
    assert found.code == "model.constant"
    assert "'orig_size'" in found.found
    assert "'image': float [1, 3, 64, 96]" in found.found
    assert f"'{SIZE}': int64 [1, 2]" in found.found


def test_a_missing_constant_is_described_and_proposed(tmp_path: Path) -> None:
    """Width before height for RT-DETR, height before width for PaddleDetection."""
    model = family(rtdetr_deployed)
    more: tuple[tuple[str, int, list[int | str]], ...] = (
        ("im_shape", TensorProto.FLOAT, ["N", 2]),
        ("im_info", TensorProto.FLOAT, [1, 2]),  # of another form than Caffe's
        ("threshold", TensorProto.DOUBLE, []),
    )
    model.graph.input.extend(helper.make_tensor_value_info(*each) for each in more)
    found = refusal(saved(tmp_path, model), {})
    assert found.code == "model.input"
    assert "5 inputs" in found.found
    assert "'threshold': double []" in found.found
    written = f"{SIZE}: [96, 64], im_shape: [64, 96], im_info: ..., threshold: ..."
    assert f"inputs: {{{written}}}" in found.remedy


def test_nothing_is_proposed_for_a_model_of_two_images(tmp_path: Path) -> None:
    found = refusal(saved(tmp_path, with_input(TensorProto.FLOAT, [1, 3, 8, 8])), {})
    assert (found.code, found.remedy) == ("model.input", "export it with the image as its only input")


def test_a_constant_for_the_image_leaves_no_image(tmp_path: Path) -> None:
    assert refusal(saved(tmp_path, residual_net()), {"image": 0}).found.startswith("0 inputs")


@pytest.mark.parametrize(
    ("value", "size"), [([640, 480], (480.0, 640.0)), ([[640, 480]], (480.0, 640.0)), (640, (640.0, 640.0))]
)
def test_a_picture_has_width_before_height(value: Any, size: tuple[float, float]) -> None:
    assert box_size({SIZE: value}) == size
    assert box_size({"im_shape": value}) is None


@pytest.mark.parametrize("value", [[0, 480], [640, -1], 0])
def test_a_picture_without_an_area_is_refused(value: Any) -> None:
    with pytest.raises(EngineError, match="positive width and height"):
        box_size({SIZE: value})
