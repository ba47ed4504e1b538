"""Observed frames are drawn at the rate that was asked for, and counted through restarts, pauses and full disks."""

from __future__ import annotations

import errno
import random
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from turned_clock import TurnedClock

from agent.camera.capture import Frame
from agent.config import LabellingConfig
from agent.labelling import sampling, store
from agent.labelling.sampling import FrameSampler
from agent.labelling.store import Counted, LabelStore
from agent.vision.answer import Answer
from agent.vision.detections import Detections
from agent.vision.task import ServedFrame
from agent.vision.tasks.classify import Classification
from calibrate.errors import TaredError

WEEK_S = 7 * 86_400
IMAGE = np.full((24, 32, 3), 128, np.uint8)


class Bench:
    """A sampler over a store on the disk, which sees one frame a second; `reported`: its reports."""

    def __init__(self, folder: Path, per_s: float, most_waiting: int = 100_000) -> None:
        self.reported: list[str] = []
        self.store = LabelStore(folder, "model", "classify")
        self.config = LabellingConfig(per_week=per_s * WEEK_S, most_waiting=most_waiting)
        self.seconds = 0
        self.clock = TurnedClock()
        self._random = random.Random(7)
        self.start()

    def start(self) -> None:
        """A new process."""
        self.sampler = FrameSampler(self.store, self.config, ["a", "b"], 1, self._report, self.clock)

    def end(self) -> Counted:
        """End the process; return the seconds that it has counted."""
        self.sampler.close()
        (counted,) = self.store.counted().values()
        return counted

    def _report(self, error: TaredError | None) -> None:
        self.reported.append(error.code if error is not None else "back")

    def watch(self, frames: int, engine: str = "int8") -> None:
        for _ in range(frames):
            self.seconds += 1
            score = self._random.random()
            frame = Frame(self.seconds, float(self.seconds), 0, IMAGE, "gate")
            served = ServedFrame(frame, engine, Classification(0, score), 0, 0.0)
            self.sampler.add(served, Classification(0, score), None)


@pytest.fixture
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Labels are read, and the disk is tried again, at every frame."""
    monkeypatch.setattr(sampling, "_READ_EVERY_S", 0.0)


def test_as_many_are_drawn_as_asked_for_and_unsure_ones_more_often(tmp_path: Path) -> None:
    bench = Bench(tmp_path, per_s=0.1)
    bench.watch(sampling._WARM_UP + 600)
    frames = bench.store.frames()
    assert 30 <= len(frames) <= 95  # of 60, with a standard deviation of 7
    unsure, sure = ({frame.probability for frame in frames if frame.stratum == each} for each in (0, 5))
    assert min(unsure) > 2.0 * max(sure)
    assert [sum(each.seen) for each in frames] == sorted(sum(each.seen) for each in frames)
    assert len(list(bench.store.folder.glob("*.jpg"))) == len(frames)
    counted = bench.end()
    assert counted.seconds.sum() == 600
    assert counted.expected.sum() == pytest.approx(60, rel=0.3)


def test_labels_are_measured_and_learnt_from(tmp_path: Path) -> None:
    bench = Bench(tmp_path, per_s=0.5)
    bench.watch(sampling._WARM_UP + 200)
    assert bench.sampler.measured is None
    for frame in bench.store.frames():
        bench.store.label(frame.id, 0 if frame.stratum or frame.id % 2 else 1)
    bench.clock.turn(sampling._READ_EVERY_S)
    bench.watch(1)
    measured = bench.sampler.measured
    assert measured is not None
    counted = bench.end()
    right = 1.0 - 0.5 * counted.seconds[0] / counted.seconds.sum()
    assert measured.overall.accuracy.low < right < measured.overall.accuracy.high
    assert measured.doubt == ""
    before = {frame.id for frame in bench.store.frames()}
    bench.watch(200)
    fresh = [frame for frame in bench.store.frames() if frame.id not in before]
    unsure, sure = ({each.probability for each in fresh if bool(each.stratum) is kind} for kind in (False, True))
    assert min(unsure) > 1.5 * max(sure)  # where no label differs from the others, few are needed


@pytest.mark.usefixtures("without_pauses")
def test_a_changed_label_costs_the_scores_of_its_own_frame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scored: list[object] = []

    def counted(answer: Classification, truth: int) -> float | None:
        scored.append(truth)
        return accuracy(answer, truth)

    accuracy = Classification.accuracy
    monkeypatch.setattr(Classification, "accuracy", counted)
    bench = Bench(tmp_path, per_s=0.5)
    bench.watch(sampling._WARM_UP + 100)
    frames = bench.store.frames()
    changes: list[dict[int, int]] = [dict.fromkeys((each.id for each in frames), 0), {frames[3].id: 1}, {}]
    counts, means = [], []
    for truths in changes:
        bench.store.label_all(truths)
        scored.clear()
        bench.watch(1)
        assert bench.sampler.measured is not None
        counts.append(len(scored))
        means.append(bench.sampler.measured.overall.accuracy.estimate)
    assert counts == [2 * len(frames), 2, 0], "of the served answer and of the reference's"
    assert means[0] == 1.0 > means[1] == means[2]


def test_counting_goes_on_after_a_restart_and_strata_stay(tmp_path: Path) -> None:
    bench = Bench(tmp_path, per_s=0.2)
    bench.watch(sampling._WARM_UP + 100)
    cuts = bench.store.strata()
    bench.sampler.close()
    bench.start()
    bench.watch(101, engine="int8")
    counted = bench.end()
    assert counted.seconds.sum() == 200  # the first frame of a process stands for no known time
    assert bench.store.strata() == cuts


@pytest.mark.usefixtures("without_pauses")
def test_nothing_is_drawn_or_counted_while_too_many_wait(tmp_path: Path) -> None:
    bench = Bench(tmp_path, per_s=1.0, most_waiting=3)
    bench.watch(sampling._WARM_UP + 50)
    frames = bench.store.frames()
    assert len(frames) == 3
    bench.store.label(frames[0].id, 0)
    bench.watch(50)
    assert len(bench.store.frames()) == 4
    counted = bench.end()
    assert counted.seconds.sum() == sum(bench.store.frames()[-1].seen)


@pytest.mark.usefixtures("without_pauses")
def test_a_disk_that_refuses_costs_frames_and_is_reported_once(tmp_path: Path) -> None:
    bench = Bench(tmp_path, per_s=1.0)
    bench.watch(sampling._WARM_UP + 20)
    drawn = len(bench.store.frames())
    kept = tmp_path / "kept"
    shutil.move(bench.store.folder, kept)
    bench.store.folder.write_text("in the way")
    bench.watch(sampling._WARM_UP + 10)
    bench.store.folder.unlink()
    shutil.move(kept, bench.store.folder)
    bench.watch(20)
    assert bench.reported == ["state.write", "back"]
    assert drawn < len(bench.store.frames())
    counted = bench.end()
    assert counted.seconds.sum() == sum(bench.store.frames()[-1].seen)


@pytest.mark.usefixtures("without_pauses")
@pytest.mark.parametrize("is_damaged", [True, False], ids=["damaged", "removed"])
def test_where_the_file_is_lost_counting_begins_anew_with_the_draws(tmp_path: Path, is_damaged: bool) -> None:
    bench = Bench(tmp_path, per_s=1.0)
    bench.watch(sampling._WARM_UP + 60)
    for path in bench.store.folder.glob("labels.sqlite*"):
        path.unlink()
    if is_damaged:
        (bench.store.folder / "labels.sqlite").write_bytes(b"no database" * 1000)
    bench.watch(sampling._WARM_UP + 40)
    assert bench.reported == (["state.damaged", "back"] if is_damaged else [])
    assert bench.store.strata() is not None
    assert sum(bench.store.frames()[0].seen) < 40  # seconds, all of them since
    for frame in bench.store.frames():
        bench.store.label(frame.id, 0)
    bench.watch(2)
    assert bench.sampler.measured is not None
    assert bench.sampler.measured.doubt == ""


@pytest.mark.usefixtures("without_pauses")
@pytest.mark.parametrize("damage", ["models SET cuts = '[1, 2'", "seen SET seconds = '[1]'"])
def test_a_damaged_row_is_an_error_of_the_store_alone(tmp_path: Path, damage: str) -> None:
    bench = Bench(tmp_path, per_s=1.0)
    bench.watch(sampling._WARM_UP + 20)
    bench.sampler.close()
    with closing(sqlite3.connect(bench.store.folder / "labels.sqlite")) as db, db:
        db.execute(f"UPDATE {damage}")
    bench.start()
    bench.watch(2 * sampling._WARM_UP)
    assert bench.reported == ["state.damaged", "back"]


@pytest.mark.usefixtures("without_pauses")
def test_a_picture_that_cannot_be_removed_is_an_error_of_the_store_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    bench = Bench(tmp_path, per_s=1.0)
    bench.config = bench.config.model_copy(update={"keep": 0})
    bench.start()
    bench.watch(sampling._WARM_UP + 20)
    bench.store.label(bench.store.frames()[0].id, 0)
    monkeypatch.setattr(store, "remove", refuse)
    bench.watch(5)
    assert bench.reported == ["state.write"]
    assert bench.sampler.measured is not None


def test_none_a_week_draws_none_and_writes_nothing(tmp_path: Path) -> None:
    bench = Bench(tmp_path, per_s=0.0)
    bench.watch(200)
    bench.sampler.close()
    assert list(tmp_path.iterdir()) == []


def detections(*scores: float) -> Detections:
    corners = np.array([[40.0 * n, 0, 40.0 * n + 20, 20] for n in range(len(scores))], np.float32).reshape(-1, 4)
    return Detections(boxes=corners, classes=np.zeros(len(scores), np.int64), scores=np.array(scores, np.float32))


def test_the_surer_both_are_and_the_more_they_agree_the_surer_a_frame_is() -> None:
    one, other = Classification(1, 0.9), Classification(2, 0.9)
    ladders: list[list[tuple[Answer, Answer]]] = [
        [(one, Classification(1, 0.95)), (one, Classification(1, 0.6)), (Classification(2, 0.3), one), (other, one)],
        [
            (detections(0.9, 0.9), detections(0.9, 0.9)),
            (detections(0.9, 0.6), detections(0.9, 0.6)),
            (detections(0.9), detections(0.9, 0.6)),
        ],
    ]
    for ladder in ladders:
        sure = [served.sureness(reference) for served, reference in ladder]
        assert sure == sorted(sure, reverse=True)
    assert detections().sureness(detections()) == 0.0
