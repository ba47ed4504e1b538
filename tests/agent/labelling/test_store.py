"""Drawn frames are kept whole, in their order, through changes of the label, damage and other models."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import numpy as np
import pytest
from label_bench import LabelBench

from agent.common.errors import AgentError
from agent.labelling.store import LabelStore
from agent.vision.boxes import NO_BOXES, LabelledBoxes
from agent.vision.detections import Detections


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
