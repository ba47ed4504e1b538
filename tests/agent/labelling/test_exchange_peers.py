"""Exports of frames go through the reader and the writer of a labelling tool, and come back as labels."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from label_bench import LabelBench, tared
from peer_environment import run_in

pytestmark = [pytest.mark.trial, pytest.mark.timeout(3600)]

_DATUMARO = """
import json, shutil, sys
from pathlib import Path
import datumaro
export, folder, form, name = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4]
for place in ("annotations", "images/default"):
    (folder / "read" / place).mkdir(parents=True)
shutil.copy(export / "instances.json", folder / "read/annotations" / name)
for picture in export.glob("*.jpg"):
    shutil.copy(picture, folder / "read/images/default")
dataset = datumaro.Dataset.import_from(str(folder / "read"), form)
dataset.export(str(folder / "written"), form, save_media=False)
print(json.dumps(sorted({type(each).__name__ for item in dataset for each in item.annotations} - {"Bbox"})))
"""
INSTANCES = ("coco_instances", "instances_default.json")


@pytest.mark.parametrize(
    ("task", "form", "shapes", "least"),
    [
        ("instance", INSTANCES, ["RleMask"], 0.8),  # the tool's polygons lose a pixel around a mask of 18 x 18
        ("segment", INSTANCES, ["RleMask"], 0.8),
        ("obb", INSTANCES, ["Polygon"], 0.999),
        ("pose", ("coco_person_keypoints", "person_keypoints_default.json"), ["Points"], 0.999),
    ],
)
def test_datumaro_reads_the_models_answers_and_writes_labels(
    tmp_path: Path, task: str, form: tuple[str, str], shapes: list[str], least: float
) -> None:
    bench = LabelBench(tmp_path, task, 2)
    tared(bench, "--export", tmp_path / "out")
    assert run_in("datumaro", _DATUMARO, tmp_path / "out", tmp_path, *form) == shapes
    written = tmp_path / "written" / "annotations" / form[1]
    assert len(json.loads(written.read_text())["annotations"]) == 4
    assert tared(bench, "--import", written)["labelled"] == 2
    for frame in bench.store.frames():
        accuracy = frame.reference.accuracy(frame.label)
        assert accuracy is not None
        assert accuracy > least
