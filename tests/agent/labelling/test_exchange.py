"""Frames leave for labelling tools as those read them; what they write comes back, all of it or none."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from label_bench import CLASSES, LabelBench, coco, tared
from pycocotools.coco import COCO

from agent.vision.boxes import NO_BOXES

HASHED = "upload\\4\\cb0618f6-00000002.jpg"  # as Label Studio names an uploaded file


def test_boxes_go_out_to_coco_and_come_back(tmp_path: Path) -> None:
    bench = LabelBench(tmp_path, "detect", 4)
    given = coco(tmp_path / "tool.json", {"data/00000001.jpg": [(2, [10, 20, 30, 40])], HASHED: [], "holiday.jpg": []})
    assert tared(bench, "--import", given) == {
        "labelled": 2, "replaced": 0, "unchanged": 0, "nothing": 1, "unknown": 1,
    }  # fmt: skip
    assert bench.labels() == [[[2, 10, 20, 40, 60]], [], None, None]
    assert tared(bench, "--export", tmp_path / "waiting")["images"] == 2
    shutil.copy(bench.store.folder / "00000001.jpg", tmp_path / "kept.jpg")
    assert tared(bench, "--export", tmp_path / "all", "--all")["images"] == 4
    read = COCO(tmp_path / "all" / "instances.json")
    assert [image["file_name"] for image in read.loadImgs(read.getImgIds())] == [
        f"0000000{n}.jpg" for n in (1, 2, 3, 4)
    ]
    (annotation,) = read.loadAnns(read.getAnnIds())
    assert (annotation["bbox"], annotation["image_id"]) == ([10, 20, 30, 40], 1)
    assert read.loadCats(annotation["category_id"])[0]["name"] == "traffic light"
    assert (tmp_path / "all" / "00000001.jpg").read_bytes() == (tmp_path / "kept.jpg").read_bytes()
    assert (tmp_path / "all").stat().st_mode & 0o777 == 0o700
    bench.store.label(1, NO_BOXES)
    back = tared(bench, "--import", tmp_path / "all" / "instances.json")
    assert (back["labelled"], back["replaced"], back["unchanged"]) == (2, 1, 1)
    assert bench.labels() == [[[2, 10, 20, 40, 60]], [], [], []]


def test_classes_go_out_as_folders_and_come_back(tmp_path: Path) -> None:
    bench = LabelBench(tmp_path, "classify", 3)
    folder = tmp_path / "out"
    tared(bench, "--export", folder)
    assert sorted(path.name for path in folder.iterdir()) == sorted([*CLASSES, "unlabelled"])
    (folder / "unlabelled" / "00000002.jpg").rename(folder / "traffic light" / "traffic light_00000002.jpg")
    counts = {"labelled": 1, "replaced": 0, "unchanged": 0, "nothing": 0, "unknown": 0}
    assert tared(bench, "--import", folder) == counts
    assert bench.labels() == [None, 2, None]
    tared(bench, "--export", tmp_path / "all", "--all")
    assert (tmp_path / "all" / "traffic light" / "00000002.jpg").is_file()


GOOD: dict[str, list[tuple[int, list[float]]]] = {"00000002.jpg": [(0, [1, 1, 8, 8])]}
BAD: dict[str, tuple[dict[str, list[tuple[int, list[float]]]], dict[str, Any], str]] = {
    "an untouched export": ({"00000001.jpg": []}, {}, "no box in any of 1 images"),
    "of another board": ({"holiday.jpg": [(0, [1, 2, 3, 4])]}, {}, "none of them drawn here"),
    "an unknown class": (
        GOOD | {"00000001.jpg": [(7, [1, 2, 3, 4])]},
        {"categories": [{"id": 0, "name": "cat"}, {"id": 7, "name": "bos"}]},
        "did you mean bus",
    ),
    "twice": (GOOD | {"a/00000001.jpg": [(0, [1, 2, 3, 4])], "b/00000001.jpg": []}, {}, "twice in"),
    "a box without area": (GOOD | {"00000001.jpg": [(0, [1, 2, 0, 4])]}, {}, "box 1 2 1 6"),
    "resized": (
        {},
        {
            "images": [{"id": 0, "file_name": "00000001.jpg", "width": 80, "height": 60}],
            "annotations": [{"image_id": 0, "category_id": 0, "bbox": [1, 2, 3, 4]}],
        },
        "80 x 60 pixels",
    ),
    "a crowd": (
        {"00000001.jpg": []},
        {"annotations": [{"image_id": 0, "category_id": 0, "bbox": [1, 2, 3, 4], "iscrowd": 1}]},
        "crowd",
    ),
    "no COCO": ({}, {"images": "none"}, "images"),
}


@pytest.mark.parametrize("fault", BAD)
def test_bad_labels_are_refused_and_nothing_is_stored(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], fault: str
) -> None:
    images, changes, found = BAD[fault]
    bench = LabelBench(tmp_path, "detect", 2)
    error = tared(bench, "--import", coco(tmp_path / "bad.json", images, **changes), code=2)["error"]
    assert found in str(error)
    assert "error: " in capfd.readouterr().err
    assert bench.labels() == [None, None]


def test_nothing_is_overwritten_and_nothing_is_invented(tmp_path: Path) -> None:
    bench = LabelBench(tmp_path, "classify", 1, ("cat", "a/b"))
    assert tared(bench, "--export", tmp_path, code=2)["error"]["code"] == "labelling.exists"
    assert tared(bench, "--export", tmp_path / "new", code=2)["error"]["code"] == "labelling.name"
    assert tared(bench, "--import", tmp_path / "labels.json", code=2)["error"]["code"] == "labelling.import"
    assert not (tmp_path / "new").exists()
    shutil.rmtree(tmp_path / "state")
    assert tared(bench, "--list", code=2)["error"]["code"] == "labelling.none"
    assert not (tmp_path / "state").exists()
