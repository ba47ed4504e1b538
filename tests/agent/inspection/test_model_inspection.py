"""`tared inspect MODEL.onnx`: what is guessed of real models and of every family, and the spec that is written."""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench import Bench
from hypothesis import given
from hypothesis import strategies as st
from image_fronts import fronted
from lab import SPECS
from model_families import (
    CLASSES,
    CLASSIFIERS,
    DETECTORS,
    IMAGE,
    KEYPOINTS,
    OF_PROJECTS,
    OTHERS,
    SEGMENTERS,
    ULTRALYTICS,
    Family,
    blazepose,
    classifier,
    deformable_detr,
    depth,
    detr,
    espnet,
    family,
    mediapipe_mask,
    mobile_pose,
    one_mask,
    paddle_text,
    rf_detr,
    rtdetr,
    rtdetr_deployed,
    rtdetr_older_rows,
    rtdetr_rows,
    simple_baseline,
    squeezed_classifier,
    squeezed_softmax,
    ssd,
    ssd_offsets,
    unet,
    yolo26_obb,
    yolo26_pose,
    yolo26_seg,
    yolov5,
    yolov8,
    yolov8_obb,
    yolov8_pose,
    yolov8_seg,
    yolox,
)
from onnx import ModelProto, TensorProto, helper
from places import ROOT
from zoo import Net, run

from agent.common.errors import ConfigError
from agent.common.schema import read_yaml
from agent.inspection.graph_facts import read_facts
from agent.inspection.inspect import inspect_model, write_spec
from agent.inspection.spec_guess import class_names, fitting_heads
from agent.models.model import open_model
from agent.vision.fidelity import fidelity
from agent.vision.preprocess import network_input
from agent.vision.spec import InputSpec, ModelSpec, load_model_spec
from agent.vision.task import VisionTask
from agent.vision.tasks.classify import Classification
from agent.vision.tasks.opening import open_task
from agent.vision.tasks.segment import LabelMap
from engines.graph.load import image_input, load_model
from engines.interface import TensorSpec
from engines.preprocessing import Layout, PixelType
from engines.registry import open_backend


def saved(folder: Path, model: ModelProto) -> Path:
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    return folder / "model.onnx"


def written(model: Path, folder: Path) -> ModelSpec:
    """The spec that is guessed, read again as everybody reads it."""
    write_spec(inspect_model(model), folder / "guessed.yaml", may_overwrite=False)
    return load_model_spec(folder / "guessed.yaml")


def guessed(model: Path) -> dict[str, Any]:
    return {guess.key: guess.value for guess in inspect_model(model).guesses}


@pytest.mark.parametrize("name", SPECS)
def test_real_models_are_guessed_as_they_are(name: str, shared_data: Path, tmp_path: Path) -> None:
    model = shared_data / SPECS[name]["path"]
    spec, truth = written(model, tmp_path), SPECS[name]
    assert (spec.path.resolve(), spec.task, spec.decoder) == (model.resolve(), truth["task"], truth.get("decoder"))
    assert spec.input == InputSpec(**truth["input"])


@pytest.mark.parametrize("make", [*DETECTORS, *CLASSIFIERS])
def test_every_family_is_known_by_its_graph(make: Family, tmp_path: Path) -> None:
    model = family(make)
    inspection = inspect_model(saved(tmp_path, model))
    spec = written(tmp_path / "model.onnx", tmp_path)
    assert (spec.task, spec.decoder) == (("detect", DETECTORS[make]) if make in DETECTORS else ("classify", None))
    assert inspection.guesses[0].sureness in ("sure", "likely")
    assert inspection.classes == {"end2end": 0, "yunet": 1}.get(spec.decoder or "", CLASSES)
    outputs = run(model, np.ones(IMAGE, np.float32))
    tensors = [TensorSpec(name, output.dtype, output.shape) for name, output in outputs.items()]
    open_task(spec).open_decoder(IMAGE[2:], tensors)(outputs)


@pytest.mark.parametrize("make", SEGMENTERS)
def test_a_map_of_classes_is_known_and_decoded(make: Family, tmp_path: Path) -> None:
    model = family(make)
    spec = written(saved(tmp_path, model), tmp_path)
    assert (spec.task, spec.decoder) == ("segment", None)
    assert (spec.score_threshold == 0.5) == (make is one_mask)
    outputs = run(model, np.ones(IMAGE, np.float32))
    tensors = [TensorSpec(name, output.dtype, output.shape) for name, output in outputs.items()]
    answer = open_task(spec).open_decoder(IMAGE[2:], tensors)(outputs)
    assert isinstance(answer, LabelMap)


@pytest.mark.parametrize("make", OF_PROJECTS)
def test_models_of_other_projects_are_known_and_decoded(make: Family, tmp_path: Path) -> None:
    """Their tasks, keys and images; the graph itself is one that is served."""
    shape, keys, image = OF_PROJECTS[make]
    model = family(make, shape)
    spec = written(saved(tmp_path, model), tmp_path)
    assert {key: getattr(spec, key) for key in keys} == keys
    assert spec.input == InputSpec(**image)
    with closing(open_backend("onnxruntime").load(open_model(spec).master.SerializeToString())) as engine:
        answer, _ = VisionTask(spec, engine.inputs, engine.outputs).infer(engine, np.zeros((64, 96, 3), np.uint8))
    assert 0.0 <= fidelity(answer, answer).value <= 1.0


REAL_TASKS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "seg_selfie_mediapipe_256_fp32.onnx": OF_PROJECTS[mediapipe_mask][1:],
    "pose_blazepose_lite_256_fp32.onnx": OF_PROJECTS[blazepose][1:],
    "pose_cpm_192_aic14_fp32.onnx": OF_PROJECTS[mobile_pose][1:],
    "seg_espnet_camvid_360x480_fp32.onnx": OF_PROJECTS[espnet][1:],
    "text_ppocrv3_det_dynamic_fp32.onnx": OF_PROJECTS[paddle_text][1:],
}


@pytest.mark.parametrize("name", REAL_TASKS)
def test_real_models_of_other_tasks_are_guessed_as_their_projects_have_them(
    name: str, shared_data: Path, tmp_path: Path
) -> None:
    keys, image = REAL_TASKS[name]
    spec = written(shared_data / name, tmp_path)
    assert {key: getattr(spec, key) for key in keys} == keys
    assert spec.input == InputSpec(**image)


def test_a_guess_that_may_mean_something_else_says_what(tmp_path: Path) -> None:
    for make, other in ((unet, "a depth"), (one_mask, "text (obb"), (simple_baseline, "segment"), (depth, "scale")):
        guess = inspect_model(saved(tmp_path, family(make))).guesses[0]
        assert guess.sureness in ("likely", "guess")
        assert other in guess.reason


@pytest.mark.parametrize("make", ULTRALYTICS)
def test_exports_of_ultralytics_are_known_by_its_metadata(make: Family, tmp_path: Path) -> None:
    """Its name for instance segmentation is segment; each is fed as its detectors are."""
    theirs, task, decoder = ULTRALYTICS[make]
    model = family(make)
    names, shape = "{0: 'car', 1: 'bus', 2: 'van'}", f"[{KEYPOINTS}, 3]"
    about = {"task": theirs, "author": "Ultralytics", "names": names, "kpt_shape": shape}
    helper.set_model_props(model, about)
    spec = written(saved(tmp_path, model), tmp_path)
    assert (spec.task, spec.decoder, spec.labels) == (task, decoder, ("car", "bus", "van"))
    assert spec.keypoint_count == (KEYPOINTS if task == "pose" else 0)
    assert spec.input == InputSpec(color="rgb", resize="letterbox", anchor="center", scale=1 / 255)
    assert [head.task for head in fitting_heads(read_facts(spec.path))] == [task]
    outputs = run(model, np.ones(IMAGE, np.float32))
    tensors = [TensorSpec(name, output.dtype, output.shape) for name, output in outputs.items()]
    open_task(spec).open_decoder(IMAGE[2:], tensors)(outputs)


@pytest.mark.parametrize("make", [yolov8_seg, yolo26_seg])
def test_prototypes_beside_a_table_are_masks_without_metadata(make: Family, tmp_path: Path) -> None:
    spec = written(saved(tmp_path, family(make)), tmp_path)
    assert (spec.task, spec.decoder) == ("instance", ULTRALYTICS[make][2])


OF_SAMPLE = {
    "pose": ("detect", "guess", "1 class and 6 key points (pose, keypoints: 6)"),
    "obb": ("detect", "guess", "2 classes and an angle (obb)"),
    "depth": ("depth", "guess", "counts"),
    "instance": ("instance", "sure", "factors of masks"),
}


@pytest.mark.parametrize("head", OF_SAMPLE)
def test_a_head_that_fits_several_tasks_is_not_sure_and_names_the_others(head: str) -> None:
    """The sample's heads have no metadata; prototypes alone leave no doubt."""
    task, sureness, others = OF_SAMPLE[head]
    guess = inspect_model(ROOT / f"examples/street/street-{head}.onnx").guesses[0]
    assert (guess.key, guess.value, guess.sureness) == ("task", task, sureness)
    assert others in guess.reason


@pytest.mark.parametrize("make", [yolov5, yolov8, yolov8_pose, yolo26_pose, yolov8_obb, yolo26_obb])
def test_a_number_of_channels_alone_is_never_sure(make: Family, tmp_path: Path) -> None:
    model = family(make)
    guess = inspect_model(saved(tmp_path, model)).guesses[0]
    assert guess.sureness != "sure"
    assert "would look the same" in guess.reason
    about = {"task": "detect", "author": "Ultralytics"}
    if make in (yolov5, yolov8):
        helper.set_model_props(model, about)
        signed = inspect_model(saved(tmp_path, model)).guesses[0]
        assert (signed.value, signed.sureness) == ("detect", "sure")
        assert "the same" not in signed.reason


def test_a_detector_that_chooses_inside_its_graph_keeps_its_table(tmp_path: Path) -> None:
    """A TopK somewhere makes no key points of 126 places, though 126 - 6 is a multiple of three."""
    model = family(yolov8)
    model.graph.initializer.append(helper.make_tensor("five", TensorProto.INT64, (1,), [5]))
    model.graph.node.append(helper.make_node("TopK", ["image", "five"], ["best", "places"], name="topk"))
    guess = inspect_model(saved(tmp_path, model)).guesses[0]
    assert (guess.value, guess.sureness) == ("detect", "likely")


STRETCHED = InputSpec(color="rgb", resize="stretch", scale=1 / 255)
IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
BY_MEAN = STRETCHED.model_copy(update=IMAGENET)
IN_PROPORTION = BY_MEAN.model_copy(update={"resize": "letterbox", "anchor": "top-left", "pad": 114})


@pytest.mark.parametrize(
    ("make", "prepared"),
    [(rtdetr, STRETCHED), (rf_detr, BY_MEAN), (detr, IN_PROPORTION), (deformable_detr, IN_PROPORTION)],
)
def test_each_detr_gets_its_own_preprocessing(make: Family, prepared: InputSpec, tmp_path: Path) -> None:
    path = saved(tmp_path, family(make))
    assert written(path, tmp_path).input == prepared
    heads = fitting_heads(read_facts(path))  # `tared check` tries the other one of sigmoid and softmax
    assert {head.decoder for head in heads} == {"detr", "rtdetr"}


@pytest.mark.parametrize(("make", "classes"), [(rtdetr_rows, 0), (rtdetr_older_rows, CLASSES)])
@pytest.mark.parametrize("head", ["RTDETRDecoder", None])
def test_rows_of_an_rtdetr_are_known_by_the_head_or_its_operators(
    make: Family, classes: int, head: str | None, tmp_path: Path
) -> None:
    net = Net(IMAGE)
    model = make(net)
    about = {"author": "Ultralytics", "task": "detect", "names": "{0: 'car', 1: 'bus', 2: 'van'}"}
    helper.set_model_props(model, about if head is None else {**about, "head": head})
    if head is None:  # no metadata name it, but a detector that samples maps where it looks has this operator
        grid = helper.make_tensor("grid", TensorProto.FLOAT, (1, 1, 1, 2), [0.0, 0.0])
        model.graph.initializer.append(grid)
        model.graph.node.append(helper.make_node("GridSample", ["image", "grid"], ["sampled"], name="sample"))
        model.opset_import[0].version = 16
    inspection = inspect_model(saved(tmp_path, model))
    spec = written(tmp_path / "model.onnx", tmp_path)
    assert (spec.task, spec.decoder, spec.labels) == ("detect", "rtdetr", ("car", "bus", "van"))
    assert (spec.input, spec.suppression, inspection.classes) == (STRETCHED, "none", classes)
    assert inspection.guesses[0].sureness == ("sure" if head else "likely")


@pytest.mark.parametrize("shape", [IMAGE, ("batch", 3, "height", "width")])
def test_a_second_input_gets_the_size_of_the_network(shape: tuple[int | str, ...], tmp_path: Path) -> None:
    """Width before height, as RT-DETR has them; boxes then come in pixels of the network's input."""
    inspection = inspect_model(saved(tmp_path, family(rtdetr_deployed, shape)))
    spec = written(tmp_path / "model.onnx", tmp_path)
    is_open = shape != IMAGE
    assert (inspection.refusal, spec.inputs) == ("", {"orig_target_sizes": [640, 640] if is_open else [96, 64]})
    assert (spec.task, spec.decoder, spec.input) == ("detect", "end2end", STRETCHED)
    assert open_model(spec).master.graph.input[0].name == "image"
    assert [tensor.name for tensor in inspection.facts.inputs] == ["image", "orig_target_sizes"]


def test_a_second_input_of_unknown_meaning_is_listed_and_the_rest_guessed(tmp_path: Path) -> None:
    model = family(rtdetr_deployed)
    model.graph.input[1].name = "mystery"
    for node in model.graph.node:
        node.input[:] = ["mystery" if name == "orig_target_sizes" else name for name in node.input]
    inspection = inspect_model(saved(tmp_path, model))
    assert "'mystery': int64 [1, 2]" in inspection.refusal
    assert "inputs: {mystery: ...}" in inspection.refusal
    keys = guessed(tmp_path / "model.onnx")
    assert (keys["decoder"], "inputs" in keys) == ("end2end", False)


@pytest.mark.parametrize("make", DETECTORS)
def test_open_sizes_are_guessed_with_a_profile(make: Family, tmp_path: Path) -> None:
    path = saved(tmp_path, family(make, ("batch", 3, "height", "width")))
    spec = written(path, tmp_path)
    assert spec.decoder == DETECTORS[make]
    assert network_input(spec, TensorSpec("image", np.dtype(np.float32), (None, 3, None, None))).usual_size == (
        640,
        640,
    )


def unknown_rows() -> ModelProto:
    """YOLOX with a size that shape inference cannot follow."""
    net = Net(IMAGE)
    parts = [net.conv("image", 3, 4, strides=[8, 8]), net.node("Sigmoid", net.conv("image", 3, 4, strides=[8, 8]))]
    sizes = net.node("Abs", net.node("Cast", net.constant(np.array([1, 8, 96])), to=TensorProto.FLOAT))
    cells = net.node("Reshape", net.node("Concat", *parts, axis=1), net.node("Cast", sizes, to=TensorProto.INT64))
    rows = net.node("Transpose", cells, perm=[0, 2, 1])
    model = net.model(rows)
    del model.graph.output[:]
    model.graph.output.append(helper.make_tensor_value_info(rows, TensorProto.FLOAT, ["batch", "rows", "columns"]))
    return model


def test_shapes_that_cannot_be_inferred_are_those_of_a_run(tmp_path: Path) -> None:
    path = saved(tmp_path, unknown_rows())
    assert (read_facts(path).outputs[0].shape, read_facts(path).outputs[0].closed) == ((None, None, None), (1, 96, 8))
    assert guessed(path)["decoder"] == "yolox"


@pytest.mark.parametrize("make", OTHERS)
def test_a_model_of_no_known_decoder_is_raw_and_says_so(make: Family, tmp_path: Path) -> None:
    path = saved(tmp_path, family(make))
    assert written(path, tmp_path).task == "raw"
    assert inspect_model(path).guesses[0].reason == "no decoder fits its outputs"


def test_offsets_are_no_boxes(tmp_path: Path) -> None:
    """They would be served as boxes [0, 0, 0, 480]; their graph has the shapes and the softmax of one that decodes."""
    path = saved(tmp_path, family(ssd_offsets))
    assert written(path, tmp_path).task == "raw"
    assert "offsets from priors outside the graph" in inspect_model(path).guesses[0].reason
    assert fitting_heads(read_facts(path)) == ()


def test_boxes_that_no_run_shows_are_a_guess(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent.inspection.graph_run._MOST_S", 0.0)
    inspection = inspect_model(saved(tmp_path, family(ssd)))
    assert [guess.sureness for guess in inspection.guesses[:2]] == ["guess", "guess"]


@pytest.mark.parametrize("make", [squeezed_classifier, squeezed_softmax])
def test_a_classifier_of_rank_4_is_served_with_labels(make: Family, tmp_path: Path) -> None:
    model = family(make)
    spec = written(saved(tmp_path, model), tmp_path).model_copy(update={"labels": ("a", "b", "c")})
    outputs = run(model, np.ones(IMAGE, np.float32))
    (tensor,) = [TensorSpec(name, output.dtype, output.shape) for name, output in outputs.items()]
    assert tensor.shape == (1, CLASSES, 1, 1)
    answer = open_task(spec).open_decoder(IMAGE[2:], [tensor])(outputs)
    assert isinstance(answer, Classification)
    assert answer.class_id == int(outputs[tensor.name].argmax())
    assert answer.score > 0.001
    with pytest.raises(ConfigError, match="3 labels"):
        open_task(spec).open_decoder(IMAGE[2:], [TensorSpec("map", tensor.dtype, (1, CLASSES, 3, 1))])


def test_a_model_that_its_metadata_say_is_no_detector(tmp_path: Path) -> None:
    model = family(yolov8)
    helper.set_model_props(model, {"task": "pose\n: {", "author": "Ultralytics"})
    spec = written(saved(tmp_path, model), tmp_path)
    assert spec.task == "raw"


def scaled(operators: list[tuple[str, list[float]]]) -> ModelProto:
    net = Net(IMAGE)
    tensor = "image"
    for operator, values in operators:
        tensor = net.node(operator, tensor, net.constant(np.array(values, np.float32).reshape(1, -1, 1, 1)))
    pooled = net.node("Flatten", net.node("GlobalAveragePool", net.conv(tensor, 3, 8)))
    return net.model(net.node("Gemm", pooled, net.weight(CLASSES, 8), transB=1))


MEANS, STDS = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


@pytest.mark.parametrize(
    ("operators", "scale", "color"),
    [
        ([("Div", [255.0])], 1.0, "rgb"),
        ([("Mul", [1 / 255]), ("Sub", MEANS), ("Div", STDS)], 1.0, "rgb"),
        ([("Mul", [1 / 255]), ("Sub", MEANS[::-1]), ("Div", STDS[::-1])], 1.0, "bgr"),
        ([("Sub", MEANS), ("Div", STDS)], 1 / 255, "rgb"),
        ([("Sub", [103.53, 116.28, 123.675]), ("Mul", [0.0174, 0.0175, 0.0171])], 1.0, "bgr"),
        ([("Sub", [127.5]), ("Div", [127.5])], 1.0, "rgb"),
        ([("Mul", [2.0]), ("Add", [-1.0])], 1 / 255, "rgb"),
        ([("Mul", [0.0, 0.0, 0.0])], 1.0, "rgb"),
    ],
)
def test_a_graph_that_scales_its_input_is_not_scaled_twice(
    operators: list[tuple[str, list[float]]], scale: float, color: str, tmp_path: Path
) -> None:
    spec = written(saved(tmp_path, scaled(operators)), tmp_path)
    assert spec.input.scale == pytest.approx(scale)
    assert (spec.input.mean, spec.input.std, spec.input.color) == ((0.0,), (1.0,), color)


FRONTS: list[tuple[Layout, PixelType]] = [("NHWC", "float32"), ("NCHW", "uint8"), ("NHWC", "uint8")]


@pytest.mark.parametrize(
    ("make", "layout", "dtype"),
    [(make, *FRONTS[number % 3]) for number, make in enumerate([*DETECTORS, *CLASSIFIERS])],
)
def test_channels_last_and_bytes_are_seen(make: Family, layout: Layout, dtype: PixelType, tmp_path: Path) -> None:
    path = saved(tmp_path, fronted(family(make), layout, dtype))
    inspection = inspect_model(path)
    assert (inspection.facts.layout, inspection.facts.inputs[0].dtype, inspection.refusal) == (layout, dtype, "")
    spec = written(path, tmp_path)
    assert (spec.task, spec.decoder) == (("detect", DETECTORS[make]) if make in DETECTORS else ("classify", None))
    taken = network_input(spec, image_input(load_model(path)))
    assert (taken.layout, taken.dtype, taken.usual_size) == (layout, dtype, IMAGE[2:])


@pytest.mark.parametrize(("gain", "bias"), [((), ()), ((1 / 255,), ()), ((2.0,), (-1.0,))])
def test_bytes_are_never_scaled_before_the_graph(
    gain: tuple[float, ...], bias: tuple[float, ...], tmp_path: Path
) -> None:
    path = saved(tmp_path, fronted(family(classifier), "NHWC", "uint8", gain, bias))
    spec = written(path, tmp_path)
    assert (spec.input.scale, spec.input.mean, spec.input.std) == (1.0, (0.0,), (1.0,))
    assert network_input(spec, image_input(load_model(path))).dtype == "uint8"


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_open_sizes_are_guessed_in_the_model_s_layout(layout: Layout, tmp_path: Path) -> None:
    path = saved(tmp_path, fronted(family(yolox, ("batch", 3, "height", "width")), layout, "uint8"))
    spec = written(path, tmp_path)
    assert network_input(spec, image_input(load_model(path))).usual_size == (640, 640)
    assert inspect_model(path).facts.outputs[0].closed == (1, 8400, 5 + CLASSES)


def test_a_model_that_tared_cannot_take_is_guessed_and_reported(tmp_path: Path) -> None:
    model = fronted(family(yolox), "NHWC", "uint8")
    model.graph.input[0].type.tensor_type.elem_type = TensorProto.INT32
    path = saved(tmp_path, model)
    inspection = inspect_model(path)
    assert inspection.refusal.startswith("model.input: ")
    assert guessed(path)["decoder"] == "yolox"
    write_spec(inspection, tmp_path / "model.yaml", may_overwrite=False)
    assert "# Not usable as it is: model.input" in (tmp_path / "model.yaml").read_text()


def test_a_grey_image_has_one_mean(tmp_path: Path) -> None:
    net = Net((1, 1, 64, 96))
    pooled = net.node("Flatten", net.node("GlobalAveragePool", net.conv("image", 1, 8)))
    path = saved(tmp_path, net.model(net.node("Gemm", pooled, net.weight(CLASSES, 8), transB=1)))
    assert written(path, tmp_path).input.color == "gray"


LABELS = st.lists(st.text(min_size=1) | st.sampled_from(["no", "null", "a: b", "# c"]), min_size=1, max_size=CLASSES)


@given(LABELS)
def test_names_in_the_metadata_become_labels(tmp_path_factory: pytest.TempPathFactory, names: list[str]) -> None:
    folder = tmp_path_factory.mktemp("named")
    model = family(classifier)
    helper.set_model_props(model, {"names": str(dict(enumerate(names)))})
    path = saved(folder, model)
    assert class_names(read_facts(path)) == tuple(names)
    assert written(path, folder).labels == tuple(names)


@pytest.mark.parametrize(
    "names", ["{1: 'a'}", "{'a': 1, 2: 3}", "[", "3", "{0: 'a'", "__import__('os')", "{}", "{[]: 1}", "(" * 5000]
)
def test_metadata_that_name_nothing(names: str, tmp_path: Path) -> None:
    model = family(classifier)
    helper.set_model_props(model, {"names": names})
    assert written(saved(tmp_path, model), tmp_path).labels == ()


def test_the_command_prints_writes_and_overwrites_only_on_request(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    (bench / "yolox.onnx").write_bytes(family(yolox).SerializeToString())
    (bench / "here").mkdir()
    monkeypatch.chdir(bench / "here")
    result = bench.json("inspect", bench / "yolox.onnx")
    assert result.keys() == {"model", "seen", "guesses", "refusal", "output"}
    assert (result["output"], result["refusal"], result["seen"]["layout"]) == (None, "", "NCHW")
    assert {"key": "decoder", "value": "yolox"}.items() <= result["guesses"][1].items()
    printed = bench.text("inspect", bench / "yolox.onnx")
    keys = [line for line in printed.splitlines() if re.match(r" *\w+: .", line) and not line.startswith("path:")]
    assert len(keys) == len(result["guesses"])
    for line, guess in zip(keys, result["guesses"], strict=True):
        assert line.endswith(f"  # {guess['certainty']}: {guess['reason']}")
        assert guess["certainty"] in ("sure", "likely", "guess")
        assert guess["reason"]
    assert not any(Path().iterdir()), "a file that nobody asked for"

    assert bench.json("inspect", bench / "yolox.onnx", "-o", "yolox.yaml")["output"] == "yolox.yaml"
    assert Path("yolox.yaml").read_text() == printed
    spec = load_model_spec(Path("yolox.yaml"))
    assert spec.path == Path("../yolox.onnx")
    load_model(spec.path)

    Path("yolox.yaml").write_text("mine\n")
    assert bench.refuses("inspect", bench / "yolox.onnx", "-o", "yolox.yaml").startswith("inspect.exists: ")
    assert Path("yolox.yaml").read_text() == "mine\n"
    assert bench.text("inspect", bench / "yolox.onnx", "-o", "yolox.yaml", "--overwrite") == printed
    assert read_yaml(Path("yolox.yaml"))["decoder"] == "yolox"


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["absent.onnx"], "model.missing"),
        (["clip.avi"], "model.unreadable"),
        (["model.onnx", "--layers"], "cli.arguments"),
        (["artefact", "-o", "new.yaml"], "cli.arguments"),
        (["model.onnx", "--overwrite"], "cli.arguments"),
        (["model.onnx", "-o", "absent/new.yaml"], "inspect.output"),
        (["absent"], "artefact."),
    ],
)
def test_refusals(arguments: list[str], code: str, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(bench.folder)
    assert bench.refuses("inspect", *arguments).startswith(code)
