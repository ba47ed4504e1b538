from __future__ import annotations

from pathlib import Path

import pytest

from agent.common.errors import ConfigError
from agent.common.schema import validate
from agent.vision.registry import task_class
from agent.vision.spec import ModelSpec, load_model_spec

PROFILE = "profiles:\n  - {x: {min: [1,3,320,320], opt: [1,3,416,416], max: [4,3,640,640]}}\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "MODEL.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_reads_the_documented_spec_relative_to_its_file(tmp_path: Path) -> None:
    (tmp_path / "coco.txt").write_text("person\nbicycle \n\n", encoding="utf-8")
    text = (
        "path: models/yolox_nano.onnx\ntask: detect\ndecoder: yolox\n"
        "input: {color: bgr, resize: letterbox, anchor: top-left, pad: 114, mean: [0,0,0], std: [1,1,1], "
        f"scale: 1.0}}\n{PROFILE}labels: coco.txt\nscore_threshold: 0.3\niou_threshold: 0.5\n"
    )
    spec = load_model_spec(write(tmp_path, text))
    assert spec.path == tmp_path / "models/yolox_nano.onnx"
    assert spec.labels == ("person", "bicycle")
    assert spec.input.std == (1.0, 1.0, 1.0)
    assert [spec.label(0), spec.label(2), spec.label(-1)] == ["person", "2", "-1"]
    assert ModelSpec.model_validate(spec.model_dump(mode="json")) == spec


def test_reports_every_error_at_once(tmp_path: Path) -> None:
    text = (
        "path: a.onnx\ntask: detect\nlabels: absent.txt\nscore_threshold: 1.5\niou_treshold: 0.5\n"
        "input: {color: gray, std: [0], mean: [1, 2, 3], pad: 300, multiple: 32, scale: .inf}\n"
        "profiles: [{x: {min: [1,3,32,32], opt: [1,3,16,32], max: [1,3,32]}}]\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_model_spec(write(tmp_path, text))
    lines = [line.strip() for line in caught.value.found.splitlines()[1:]]
    wrong = {line.split(":")[0] for line in lines}
    assert wrong == {
        "decoder",
        "labels",
        "score_threshold",
        "iou_treshold",
        "input.std",
        "input.mean",
        "input.pad",
        "input.multiple",
        "input.scale",
        "profiles.0.x.opt",
        "profiles.0.x.max",
    }
    assert "iou_treshold: unknown key" in lines


@pytest.mark.parametrize(
    ("task", "decoder", "accepted"),
    [
        *[("detect", name, True) for name in task_class("detect").decoders],
        ("detect", "package.module:function", True),
        ("detect", "yolov6", False),
        ("detect", "a:b:c", False),
        ("detect", None, False),
        ("classify", "yolox", False),
        ("raw", None, True),
    ],
)
def test_decoder_must_fit_the_task(task: str, decoder: str | None, accepted: bool) -> None:
    content = {"path": "a.onnx", "task": task, "decoder": decoder}
    if accepted:
        assert validate(ModelSpec, content, "test").decoder == decoder
    else:
        with pytest.raises(ConfigError, match="decoder: expected"):
            validate(ModelSpec, content, "test")


@pytest.mark.parametrize(
    "shapes", ["min: [1,3,8,8], opt: [1,3,9,9], max: [1,3,8,9]", "min: [1,3,8,8], opt: [1,3,7,8], max: [1,3,8,8]"]
)
def test_profiles_are_ordered(tmp_path: Path, shapes: str) -> None:
    with pytest.raises(ConfigError, match="no dimension below"):
        load_model_spec(write(tmp_path, f"{{path: a.onnx, task: classify, profiles: [{{x: {{{shapes}}}}}]}}"))


def test_overlaps_are_the_affair_of_detectors(tmp_path: Path) -> None:
    spec = load_model_spec(write(tmp_path, "{path: a.onnx, task: detect, decoder: end2end, nms: agnostic}"))
    assert spec.suppression == "agnostic"
    assert ModelSpec.model_validate(spec.model_dump(mode="json")) == spec
    with pytest.raises(ConfigError, match="nms: expected null unless task is 'detect'"):
        load_model_spec(write(tmp_path, "{path: a.onnx, task: classify, nms: none}"))


@pytest.mark.parametrize(("decoder", "suppression"), [("yolox", "per-class"), ("end2end", "none")])
def test_overlaps_of_which_nothing_is_said(tmp_path: Path, decoder: str, suppression: str) -> None:
    spec = load_model_spec(write(tmp_path, f"{{path: a.onnx, task: detect, decoder: {decoder}}}"))
    assert spec.suppression == suppression
    assert "nms" not in spec.model_dump(mode="json")  # what was built before the key came keeps its id


@pytest.mark.parametrize("content", [b"", b"\n \n", b"\xff\xfe\x00"])
def test_labels_file_must_hold_labels(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "labels.txt").write_bytes(content)
    with pytest.raises(ConfigError, match="labels: expected"):
        load_model_spec(write(tmp_path, "{path: a.onnx, task: classify, labels: labels.txt}"))


def test_a_model_in_the_place_of_its_spec_is_named(tmp_path: Path) -> None:
    (tmp_path / "yolo.onnx").write_bytes(bytes(range(256)))
    with pytest.raises(
        ConfigError, match=r"the model .*yolo\.onnx itself; .*'tared inspect .*yolo\.onnx -o MODEL\.yaml' writes one"
    ):
        load_model_spec(tmp_path / "yolo.onnx")


def test_a_decoder_is_not_blamed_for_a_task_that_is_wrong() -> None:
    with pytest.raises(ConfigError) as caught:
        validate(ModelSpec, {"path": "a.onnx", "task": "foo", "decoder": "yolox"}, "model.yaml")
    assert caught.value.found.startswith("1 error ")
