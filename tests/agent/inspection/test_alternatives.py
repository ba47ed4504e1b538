"""The likeliest mistakes of a spec: which are tried, which are no change, and what corrects them."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from places import ROOT

from agent.inspection.alternatives import Alternative, alternatives, unchanged
from agent.inspection.graph_facts import read_facts
from agent.inspection.spec_guess import fitting_heads
from agent.vision.spec import ModelSpec

STREET = ROOT / "examples/street/street.onnx"


def base(task: str = "detect", **image: Any) -> Alternative:
    decoder = {"decoder": "yolox"} if task == "detect" else {}
    spec = {"path": "model.onnx", "task": task, "input": image, **decoder}
    return unchanged(ModelSpec.model_validate(spec), is_guessed=False)


def names(of: Alternative, is_bytes: bool = False) -> list[str]:
    return [other.name for other in alternatives(of, (), is_bytes)]


def test_each_kind_is_tried_once_and_never_what_is_there_already() -> None:
    assert names(base()) == [
        "color: rgb",
        "resize: stretch",
        "resize: letterbox, center",
        "values 0 to 1",
        "values -1 to 1",
        "values as for ImageNet",
        "values as for ImageNet's RGB",
    ]
    assert "values as for ImageNet's RGB" not in names(base(color="rgb"))
    assert "values -1 to 1" not in names(base(mean=(127.0,), std=(128.0,))), "nearly the same"
    assert not any(name.startswith("color") for name in names(base(color="gray")))
    assert not any(name.startswith("values") for name in names(base(), is_bytes=True))
    assert not any(name.startswith("resize") for name in names(base(resize="pad")))


@pytest.mark.parametrize(("decoder", "is_tried"), [("heatmaps", False), ("landmarks", False), ("yolov8", True)])
def test_where_the_one_object_of_a_crop_lies_is_no_mistake(decoder: str, is_tried: bool) -> None:
    keys = {"path": "m.onnx", "task": "pose", "decoder": decoder, "keypoints": 17}
    of_pose = unchanged(ModelSpec.model_validate(keys), is_guessed=False)
    assert any(name.startswith("resize") for name in names(of_pose)) == is_tried


@pytest.mark.parametrize(("color", "means"), [("rgb", (0.485, 0.456, 0.406)), ("bgr", (0.406, 0.456, 0.485))])
def test_imagenets_means_are_in_the_order_of_the_colours(color: str, means: tuple[float, ...]) -> None:
    for other in alternatives(base(color=color), (), False):
        if other.name == "values as for ImageNet":
            assert other.spec.input.mean == means
            (swapped,) = (again for again in alternatives(other, (), False) if again.kinds == ("values", "color"))
            assert swapped.spec.input.mean == means[::-1]
            assert swapped.name.startswith("values as for ImageNet, color: ")


def test_means_of_the_users_own_stay_when_only_the_colours_are_swapped() -> None:
    written = base(color="bgr", mean=(123.0, 117.0, 104.0), std=(58.0, 57.0, 57.0))
    first = next(alternatives(written, (), False))
    assert (first.spec.input.color, first.spec.input.mean) == ("rgb", (123.0, 117.0, 104.0))


def test_the_lines_take_the_place_of_those_in_the_spec() -> None:
    written = base(resize="stretch", scale=1 / 255)
    for other in alternatives(written, (), False):
        (line,) = other.lines(written.spec)
        image = yaml.safe_load(line)["input"]
        assert ModelSpec.model_validate({**written.spec.model_dump(), "input": image}).input == other.spec.input
    assert written.lines(written.spec) == []


def test_decoders_are_those_that_the_outputs_may_be() -> None:
    heads = fitting_heads(read_facts(STREET))
    wrong = unchanged(base().spec.model_copy(update={"decoder": "yolov5"}), is_guessed=False)
    (other,) = (each for each in alternatives(wrong, heads, False) if each.kinds == ("decoder",))
    assert other.lines(wrong.spec) == ["decoder: yolox"]
    assert not any(each.kinds == ("decoder",) for each in alternatives(base("classify"), heads, False))
