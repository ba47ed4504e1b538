"""Drawn frames are kept whole, in their order, through changes of the label, damage and other models."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import numpy as np
import pytest
from label_bench import CLASSES, LabelBench, tared

from agent.camera.capture import Frame
from agent.common.errors import AgentError
from agent.config import LabellingConfig
from agent.labelling.sampling import FrameSampler
from agent.labelling.store import LabelStore
from agent.vision.boxes import NO_BOXES, LabelledBoxes
from agent.vision.detections import Detections
from agent.vision.task import ServedFrame
from agent.vision.tasks.classify import Classification

CUTS = [0.1, 0.2, 0.3, 0.4, 0.5]


def test_a_frame_comes_back_as_it_was_drawn_and_a_label_as_it_was_given(tmp_path: Path) -> None:
    bench = LabelBench(tmp_path, "detect", 3)
    boxes = LabelledBoxes(boxes=np.array([[1.25, 2, 30, 40]], np.float32), classes=np.array([4]))
    bench.store.label(1, boxes, suggested=True)
    bench.store.label(2, NO_BOXES)
    bench.store.skip(3)
    first, second, third = bench.store.frames()
    assert isinstance(first.reference, Detections)
    assert first.reference.boxes.tolist() == [[40, 30, 100, 90], [2, 2, 20, 20]]
    assert (first.seen, first.probability, first.width, first.height) == ([10.0, 0, 0, 0, 0, 0], 0.1, 160, 120)
    assert bench.labels() == [[[4, 1.25, 2, 30, 40]], [], "skipped"]
    assert [first.suggested, second.suggested, third.is_waiting] == [True, False, False]
    with pytest.raises(AgentError, match="no frame 9") as refused:
        bench.store.label_all({3: NO_BOXES, 9: NO_BOXES})
    assert refused.value.code == "labelling.unknown"
    assert bench.labels()[2] == "skipped"  # all or none


def test_another_model_has_frames_of_its_own(tmp_path: Path) -> None:
    bench = LabelBench(tmp_path, "classify", 1)
    other = LabelStore(tmp_path / "state", "another", "classify")
    assert (other.frames(), len(bench.store.frames())) == ([], 1)
    with pytest.raises(AgentError, match=r"labelling\.unknown"):
        other.label(1, 0)


def test_labels_of_another_task_are_kept_aside_and_count_again_with_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model's file stays, and the spec calls it a detector first, then a classifier, then a detector again."""
    bench = LabelBench(tmp_path, "detect", 3)
    detector = bench.store
    detector.fix_strata(CUTS, CLASSES)
    detector.label_all({1: NO_BOXES, 2: NO_BOXES})
    before = detector.revision()
    classifier = LabelBench(tmp_path, "classify", 0)
    assert (classifier.store.frames(), classifier.store.counted(), classifier.store.strata()) == ([], {}, None)
    assert classifier.store.labels_of_other_tasks() == {"detect": 2}
    tared(classifier, "--list", code=2)
    said = " ".join(capsys.readouterr().err.split())
    assert "2 labels of task detect: these labels are of another task" in said
    assert "labelling.none: no drawn frame of model.onnx for task classify" in said
    sampler = FrameSampler(classifier.store, LabellingConfig(), CLASSES, 1, lambda _: None)
    served = ServedFrame(Frame(1, 1.0, 0, np.zeros((2, 2, 3), np.uint8), "gate"), "a1b2", Classification(0, 0.9), 0, 0)
    for _ in range(3):
        sampler._read_at = 0.0
        sampler.add(served, Classification(0, 0.9), None)
    assert caplog.text.count("labels=2 task=detect") == 1
    with pytest.raises(AgentError, match="no frame 1 of this model and task"):
        classifier.store.label(1, 0)
    classifier.store.fix_strata(CUTS, CLASSES)
    classifier.draw(0)
    classifier.store.label(4, 2)
    assert classifier.labels() == [2]
    assert (bench.labels(), detector.revision()) == ([[], [], None], before)
    assert detector.labels_of_other_tasks() == {"classify": 1}


def test_damage_costs_a_row_or_a_picture_and_a_damaged_file_is_set_aside(tmp_path: Path) -> None:
    bench = LabelBench(tmp_path, "classify", 3)
    with sqlite3.connect(bench.store.folder / "labels.sqlite") as db:
        db.execute("UPDATE frames SET served = 'no JSON' WHERE id = 2")
    db.close()
    assert [each.id for each in bench.store.frames()] == [1, 3]
    (bench.store.folder / "00000003.jpg").unlink()
    with pytest.raises(AgentError, match=r"labelling\.picture"):
        bench.store.picture(3)
    for ending in ("-wal", "-shm"):
        (bench.store.folder / f"labels.sqlite{ending}").unlink(missing_ok=True)
    (bench.store.folder / "labels.sqlite").write_bytes(b"no database" * 1000)
    with pytest.raises(AgentError, match=r"state\.damaged"):
        bench.store.frames()
    assert bench.store.frames() == []
    assert [each.name for each in bench.store.folder.glob("*.damaged.*")] == ["labels.sqlite.damaged.1"]


def test_pictures_are_private_and_old_ones_are_removed(tmp_path: Path) -> None:
    bench = LabelBench(tmp_path, "classify", 4)
    assert bench.store.folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in bench.store.folder.glob("*.jpg")} == {0o600}
    bench.store.label_all({1: 0, 2: 1, 3: 2})
    bench.store.prune(1)
    assert sorted(path.name for path in bench.store.folder.glob("*.jpg")) == ["00000003.jpg", "00000004.jpg"]
    assert bench.labels() == [0, 1, 2, None]
