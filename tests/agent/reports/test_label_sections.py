"""The report on a state directory shows what labels of drawn frames come to, or why nothing is known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from agent.labelling.store import Counted, Draw, LabelStore
from agent.reports.labels import label_sections
from agent.vision.tasks.classify import Classification
from calibrate.statistics.sampling import STRATA

CUTS = [0.1, 0.2, 0.3, 0.4, 0.5]


@pytest.fixture(name="store")
def store_fixture(tmp_path: Path) -> LabelStore:
    """Forty frames are drawn, none of which has a label."""
    store = LabelStore(tmp_path, "model", "classify")
    store.fix_strata(CUTS, ["cat", "dog"])
    for number in range(1, 41):
        seen = 10.0 * number * np.eye(STRATA)[0]
        draw = Draw(
            camera="gate",
            regime="a1b2",
            frame=number,
            ts=10.0 * number,
            stratum=0,
            weight=1.0,
            probability=0.1,
            seen=seen.tolist(),
            served=Classification(0, 0.9),
            reference=Classification(0, 0.9),
        )
        store.add(draw, b"JPEG", (24, 32), Counted(seen, 0.1 * seen))
    return store


@pytest.mark.usefixtures("store")
def test_a_model_without_drawn_frames_has_no_section(tmp_path: Path) -> None:
    assert list(label_sections(tmp_path, "another", "classify")) == []
    assert list(label_sections(tmp_path, "model", "detect")) == []
    assert list(label_sections(tmp_path / "elsewhere", "model", "classify")) == []


@pytest.mark.usefixtures("store")
def test_frames_that_wait_are_counted(tmp_path: Path) -> None:
    (section,) = label_sections(tmp_path, "model", "classify")
    assert section.text == ["40 drawn frames wait for their labels: run 'tared label'."]


def test_the_accuracy_stands_with_its_interval_by_camera_engine_and_class(store: LabelStore, tmp_path: Path) -> None:
    for number in range(1, 41):
        store.label(number, number % 10 == 0)  # a dog in one frame of ten, which both engines take for a cat
    (section,) = label_sections(tmp_path, "model", "classify")
    scores, classes = section.tables
    assert [row[0] for row in scores.rows] == ["all", "camera gate", "engine a1b2"]
    shown, estimate = scores.rows[0][2]
    assert estimate == pytest.approx(0.9, abs=0.02)
    assert shown.startswith(f"{estimate:.3f} (")
    assert [row[0] for row in classes.rows] == ["cat", "dog"]
    assert "40 labelled frames count, 0 wait" in section.text[0]


def test_damage_is_shown_in_place_of_figures(store: LabelStore, tmp_path: Path) -> None:
    for path in store.folder.glob("labels.sqlite*"):
        path.write_bytes(b"no database" * 500)
    (section,) = label_sections(tmp_path, "model", "classify")
    assert "state.damaged" in section.text[0]
