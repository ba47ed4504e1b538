from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from agent.common.errors import DatasetError
from agent.vision.datasets.coco import _MOST_BYTES
from agent.vision.datasets.labelled_images import object_images

Document = dict[str, Any]


def document() -> Document:
    """Two of three categories have objects; b.png shows none."""
    return {
        "info": {"year": 2017},
        "images": [
            {"id": 7, "file_name": "a.png", "width": 20, "height": 10},
            {"id": 2, "file_name": "b.png", "width": 20, "height": 10},
        ],
        "annotations": [
            {"id": 1, "image_id": 7, "category_id": 44, "bbox": [1, 2, 3.5, 4], "area": 9.25, "segmentation": [[1]]},
            {"id": 2, "image_id": 7, "category_id": 1, "bbox": [0, 0, 20.4, 10], "iscrowd": 1},
        ],
        "categories": [{"id": 44, "name": "dog"}, {"id": 1, "name": "person"}, {"id": 3, "name": "animal"}],
    }


@pytest.fixture
def store(tmp_path: Path) -> Callable[..., Path]:
    """Write images and the JSON; return their folder."""

    def write(content: Document | str, name: str = "instances_val.json", images: tuple[str, ...] = ("",)) -> Path:
        for folder in images:
            for image in ("a.png", "b.png"):
                (tmp_path / folder).mkdir(parents=True, exist_ok=True)
                cv2.imwrite(str(tmp_path / folder / image), np.zeros((10, 20, 3), np.uint8))
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
        return tmp_path

    return write


def test_instances_are_read_with_crowds_areas_and_empty_images(store: Callable[..., Path]) -> None:
    (_, first), (_, second) = object_images(store(document()), ("person", "cat", "dog"))
    np.testing.assert_allclose(first.boxes, [[1, 2, 4.5, 6], [0, 0, 20.4, 10]], rtol=1e-6)
    assert first.classes.tolist() == [2, 0]
    assert (first.areas.tolist(), first.crowds.tolist()) == ([9.25, pytest.approx(204.0)], [False, True])
    assert len(second) == 0
    (_, unnamed), _ = object_images(store(document()))
    assert unnamed.classes.tolist() == [2, 0]  # person 1, animal 3, dog 44


def test_a_box_that_cvat_has_turned_has_corners_and_may_begin_beyond_the_picture(store: Callable[..., Path]) -> None:
    content = document()
    content["annotations"][0] = {
        "id": 1, "image_id": 7, "category_id": 44, "bbox": [1, -4, 4, 16], "segmentation": [],
        "attributes": {"occluded": False, "rotation": 90.0},
    }  # fmt: skip
    (_, turned), _ = object_images(store(content), ("person", "cat", "dog"))
    np.testing.assert_allclose(turned.boxes[0], [-5, 2, 11, 6], atol=1e-3)
    assert turned.outlines[0] == [pytest.approx([11, 2, 11, 6, -5, 6, -5, 2], abs=1e-3)]
    assert turned.outlines[1] is None
    content["annotations"][0]["attributes"] = {"rotation": "ninety"}
    with pytest.raises(DatasetError, match="box"):
        object_images(store(content), ("person", "cat", "dog"))


@pytest.mark.parametrize(
    ("name", "images", "given"),
    [
        ("annotations/instances_val2017.json", ("val2017",), ""),
        ("annotations/instances_val2017.json", ("val2017",), "annotations/instances_val2017.json"),
        ("valid/_annotations.coco.json", ("valid",), ""),
        ("result.json", ("images",), ""),
        ("labels/mine.json", ("labels", "more"), "labels/mine.json"),
    ],
)
def test_layouts(store: Callable[..., Path], name: str, images: tuple[str, ...], given: str) -> None:
    folder = store(document(), name, images)
    (folder / "package.json").write_text('{"images": "none"}')
    assert len(object_images(folder / given)) == 2


def test_classes_restrict_to_what_the_model_knows(store: Callable[..., Path]) -> None:
    folder = store(document())
    with pytest.raises(DatasetError, match=r"class 'dog' in instances_val\.json .*labels .*\(person\).* --classes"):
        object_images(folder, ("person",))
    (_, first), (_, second) = object_images(folder, ("person",), ("person",))
    assert (first.classes.tolist(), len(second)) == ([0], 0)
    with pytest.raises(DatasetError, match=r"class 'zebra' in --classes, which the data set lacks.*person"):
        object_images(folder, ("person", "zebra"), ("zebra",))
    with pytest.raises(DatasetError, match="class 'dog' in --classes, which the model spec lacks"):
        object_images(folder, ("person",), ("dog",))
    (folder / "instances_val.json").unlink()
    (folder / "a.txt").write_text("1 .5 .5 .5 .5\n0 .5 .5 .5 .5\n")
    (folder / "classes.txt").write_text("dog\nperson\n")
    (_, first), _ = object_images(folder, ("person",), ("person",))
    assert first.classes.tolist() == [0]


def changed(**parts: Any) -> Document:
    """The document in which the first image, annotation or category has other values."""
    found = document()
    for part, values in parts.items():
        found[part][0].update(values)
    return found


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (changed(images={"file_name": "gone.png"}), r"no image files for gone\.png"),
        (changed(images={"file_name": "../a.png"}), "no image files"),
        (changed(images={"id": 2}), "image id 2 2 times"),
        (changed(images={"width": 1 << 40}), r"images\.0\.width"),
        (changed(annotations={"image_id": 99}), "annotation 1 of image 99"),
        (changed(annotations={"category_id": 99}), "annotation 1 of category 99"),
        (
            changed(annotations={"bbox": [15, 2, 10, 4]}),
            r"box \[15, 2, 10, 4\] of annotation 1 in instances_val.*inside a\.png, 20 x 10",
        ),
        (changed(annotations={"bbox": [1, 2, -3, 4]}), r"box \[1, 2, -3, 4\]"),
        (changed(annotations={"bbox": [1, 2, float("nan"), 4]}), r"annotations\.0\.bbox\.2"),
        (changed(annotations={"iscrowd": 2}), r"annotations\.0\.iscrowd"),
        (changed(categories={"name": "person"}), "category name person 2 times"),
        ({**document(), "images": []}, "no image in instances_val"),
        ('{"images": [' + "[" * 100_000, "the JSON in instances_val"),
        ('{"images": [1' + "0" * 10_000 + "]}", "in instances_val"),
        ("{", "the JSON in instances_val"),
    ],
)
def test_a_malformed_file_is_refused(store: Callable[..., Path], content: Document | str, message: str) -> None:
    with pytest.raises(DatasetError, match=message) as caught:
        object_images(store(content))
    assert caught.value.code == "dataset.coco"


def test_a_file_beyond_the_bound_is_not_read(store: Callable[..., Path]) -> None:
    folder = store(document())
    with (folder / "instances_val.json").open("ab") as file:
        file.truncate(_MOST_BYTES + 1)
    with pytest.raises(DatasetError, match=rf"at most {_MOST_BYTES} bytes"):
        object_images(folder)


def test_two_files_and_another_size_are_refused(store: Callable[..., Path]) -> None:
    folder = store(changed(images={"width": 30}))
    with pytest.raises(DatasetError, match=r"a\.png .*20 x 10 pixels upright.*30 x 10"):
        list(object_images(folder))
    store(document(), "instances_train.json")
    with pytest.raises(DatasetError, match=r"2 files of COCO instances: instances_train\.json .*instances_val\.json"):
        object_images(folder)
