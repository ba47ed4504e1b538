"""Answers are remembered, found again, and compared with labels that come later."""

from __future__ import annotations

import tracemalloc
import weakref
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from agent.camera.capture import Frame
from agent.monitoring.accuracy import LabelsError, LiveAccuracy, RecentAnswer, RecentAnswers, accuracy_bound
from agent.monitoring.evidence_file import EvidenceFile
from agent.vision.answer import Answer
from agent.vision.boxes import LabelledBoxes
from agent.vision.detections import Detections
from agent.vision.preprocess import Geometry
from agent.vision.task import ServedFrame
from agent.vision.tasks.classify import Classification, Classify
from agent.vision.tasks.detect import Detect
from agent.vision.tasks.raw import Raw, RawOutputs
from calibrate.statistics.evidence import Interval

IMAGE = np.zeros((8, 8, 3), np.uint8)
FPS = 10
Row = tuple[float, float, float, float]
BOX: Row = (10.0, 10.0, 30.0, 30.0)


def served(frame: int, result: Answer, engine: str = "int8", ts: float | None = None) -> ServedFrame:
    return ServedFrame(Frame(frame, frame / FPS if ts is None else ts, 0, IMAGE), engine, result, 0, 0.0)


def found(*boxes: Row, classes: Sequence[int] = ()) -> Detections:
    return Detections(
        boxes=np.array(boxes, np.float32).reshape(-1, 4),
        classes=np.array(classes or [0] * len(boxes), np.int64),
        scores=np.linspace(0.9, 0.5, len(boxes), dtype=np.float32),
    )


def truth(*boxes: Row, classes: Sequence[int] = ()) -> LabelledBoxes:
    labelled = found(*boxes, classes=classes)
    return LabelledBoxes(boxes=labelled.boxes, classes=labelled.classes)


def classifier(*class_ids: int, engine: str = "int8") -> LiveAccuracy:
    accuracy = LiveAccuracy(Classify.labels)
    for frame, class_id in enumerate(class_ids):
        accuracy.add_answer(served(frame, Classification(class_id, 1.0), engine))
    return accuracy


def counted(accuracy: LiveAccuracy) -> tuple[float, int]:
    interval = accuracy.estimate.interval
    return round(interval.estimate, 6), interval.n


# ---- scoring


def test_boxes_are_scored_by_f1_in_frame_pixels() -> None:
    """Detections come in network pixels, half of the frame's and 5 below its top; labels in the frame's own."""
    accuracy = LiveAccuracy(Detect.labels)
    geometry = Geometry(200, 100, scale_x=0.5, scale_y=0.5, left_px=0, top_px=5)
    in_network = found((5.0, 10.0, 15.0, 20.0), (40.0, 20.0, 60.0, 30.0), classes=(1, 0))
    accuracy.add_answer(ServedFrame(Frame(0, 0.0, 0, IMAGE), "int8", in_network, 0, 0.0, geometry))
    accuracy.label_frame(0, truth((10.0, 10.0, 30.0, 30.0), classes=(1,)))  # one of two found, the other false: 2 / 3
    assert counted(accuracy) == (round(2 / 3, 6), 1)


def test_frames_without_an_object_on_which_nothing_was_found_are_counted_apart() -> None:
    accuracy = LiveAccuracy(Detect.labels)
    for frame, answer in enumerate([found(), found(BOX), found()]):
        accuracy.add_answer(served(frame, answer))
        accuracy.label_frame(frame, truth())
    assert counted(accuracy) == (0.0, 1)
    assert accuracy.estimate.empty == 2


def test_a_frame_counts_once_however_often_it_is_labelled() -> None:
    accuracy = classifier(3, 3)
    for label in (3, 3, 1):  # a broker delivers at least once
        accuracy.label_frame(0, label)
    assert counted(accuracy) == (1.0, 1)


def test_accuracy_starts_anew_with_the_engine_and_late_labels_of_the_old_one_count_for_nothing() -> None:
    accuracy = classifier(1, 1, 1)
    accuracy.label_frame(0, 3)
    assert counted(accuracy) == (0.0, 1)
    for frame in (3, 4):
        accuracy.add_answer(served(frame, Classification(3, 1.0), "better"))
    accuracy.label_frame(1, 3)
    assert accuracy.estimate.interval.n == 0
    accuracy.label_frame(4, 3)
    assert counted(accuracy) == (1.0, 1)
    assert accuracy.estimate.since == 3 / FPS


def test_the_labels_of_a_recording_score_every_frame_once_and_those_not_named_show_nothing() -> None:
    accuracy = LiveAccuracy(Detect.labels)
    labels = {0: truth(BOX), 2: truth(BOX), 9: truth(BOX)}
    for frame in range(4):
        accuracy.add_answer(served(frame, found(BOX)))
        accuracy.label_recorded(labels)
    accuracy.label_recorded(labels)
    assert counted(accuracy) == (0.5, 4)


def test_a_classifiers_recording_may_be_labelled_in_part() -> None:
    accuracy = classifier(3, 1, 3, 3)
    accuracy.label_recorded({1: 3, 3: 3})
    assert counted(accuracy) == (0.5, 2)


def test_raw_outputs_are_not_kept() -> None:
    accuracy = LiveAccuracy(Raw.labels)
    accuracy.add_answer(served(0, RawOutputs({"y": np.zeros((1, 1000), np.float32)})))
    with pytest.raises(LabelsError, match="no frame was answered yet"):
        accuracy.label_frame(0, 1)


def test_a_supervisor_that_hangs_loses_the_oldest_answers_and_no_image_waits_for_it() -> None:
    accuracy = classifier(*[3] * 1000)
    image = IMAGE.copy()
    waiting = weakref.ref(image)
    accuracy.add_answer(ServedFrame(Frame(1000, 100.0, 0, image), "int8", Classification(3, 1.0), 0, 0.0))
    del image
    assert waiting() is None
    accuracy.label_frame(1000, 3)
    with pytest.raises(LabelsError, match=r"labels\.late"):
        accuracy.label_frame(0, 3)


# ---- over a restart


def remembering(path: Path, engine: str, frames: int, first_ts: float) -> LiveAccuracy:
    """A new process on the same camera, which has answered so many frames, all with class 3."""
    accuracy = LiveAccuracy(Classify.labels)
    accuracy.remember(EvidenceFile(path, "rtsp://camera", lambda error: pytest.fail(str(error))))
    for frame in range(frames):
        accuracy.add_answer(served(frame, Classification(3, 1.0), engine, first_ts + frame / FPS))
    return accuracy


def test_accuracy_goes_on_after_a_restart_and_anew_with_another_engine(tmp_path: Path) -> None:
    path = tmp_path / "accuracy.jsonl"
    first = remembering(path, "int8", 25, 1000.0)
    for frame in range(25):
        first.label_frame(frame, 3 if frame % 5 else 1)
    second = remembering(path, "int8", 1, 2000.0)
    assert second.estimate == first.estimate
    assert (second.estimate.since, counted(second)) == (1000.0, (0.8, 25))
    second.label_frame(0, 3)
    assert counted(second)[1] == 26
    third = remembering(path, "better", 1, 3000.0)
    assert (third.estimate.since, third.estimate.interval.n) == (3000.0, 0)
    assert remembering(path, "int8", 1, 4000.0).estimate.interval.n == 0


def test_an_engine_that_returns_within_a_process_starts_anew_and_so_it_is_remembered(tmp_path: Path) -> None:
    path = tmp_path / "accuracy.jsonl"
    accuracy = remembering(path, "a", 5, 1000.0)
    accuracy.label_frame(0, 3)
    for frame, engine in ((5, "b"), (6, "a")):
        accuracy.add_answer(served(frame, Classification(3, 1.0), engine, 1000.0 + frame))
    accuracy.label_frame(6, 1)
    accuracy.label_frame(1, 3)  # late, for an answer from its time before
    again = remembering(path, "a", 1, 2000.0)
    assert again.estimate == accuracy.estimate
    assert (again.estimate.since, counted(again)) == (1006.0, (0.0, 1))


# ---- the bound


def test_the_lower_bound_is_the_references_accuracy_less_the_largest_loss() -> None:
    assert accuracy_bound(0.917, Interval(0.98, 0.95, 1.0, 100)) == pytest.approx(0.867)
    assert accuracy_bound(0.3, Interval(0.5, 0.2, 0.7, 10)) == 0.0


# ---- remembering


def answers(*ts: float, first: int = 0) -> RecentAnswers:
    kept = RecentAnswers()
    for frame, captured in enumerate(ts, first):
        kept.add(RecentAnswer.from_served(served(frame, Classification(frame, 1.0), ts=captured)))
    return kept


def test_memory_is_bounded_by_bytes_and_the_oldest_go_first() -> None:
    kept = RecentAnswers(max_bytes=100_000)
    tracemalloc.start()
    try:
        for frame in range(2000):
            boxes = np.full((frame % 50, 4), frame, np.float32)
            detections = Detections(boxes=boxes, classes=np.zeros(len(boxes), np.int64), scores=boxes[:, 0])
            image = np.zeros((100, 100, 3), np.uint8)  # which is not kept
            kept.add(
                RecentAnswer.from_served(ServedFrame(Frame(frame, frame / FPS, 0, image), "a", detections, 0, 0.0))
            )
            del image
            assert kept.nbytes <= 100_000
        assert tracemalloc.get_traced_memory()[0] < 130_000
    finally:
        tracemalloc.stop()
    assert 50 < len(kept) < 150
    assert kept.at_frame(1999).frame == 1999
    assert kept.at_frame(2000 - len(kept)).frame == 2000 - len(kept)
    with pytest.raises(LabelsError, match=rf"labels\.late: labels of frame {1999 - len(kept)}; "):
        kept.at_frame(1999 - len(kept))
    with pytest.raises(LabelsError, match=r"labels\.late"):
        kept.at_ts(1.0)


def test_the_newest_answer_is_kept_even_if_it_is_too_large() -> None:
    kept = RecentAnswers(max_bytes=1)
    for frame in range(3):
        kept.add(RecentAnswer.from_served(served(frame, Classification(1, 1.0))))
    assert (len(kept), kept.at_frame(2).frame) == (1, 2)


def test_a_capture_time_finds_the_nearest_frame_within_half_an_interval() -> None:
    kept = answers(*(1000.0 + frame / FPS for frame in range(20)))
    for ts in (1000.5, 1000.46, 1000.549):
        assert kept.at_ts(ts).frame == 5
    assert kept.at_ts(999.96).frame == 0
    assert kept.at_ts(1001.94).frame == 19
    for ts, code in ((999.94, "late"), (1001.96, "unknown")):
        with pytest.raises(LabelsError, match=rf"labels\.{code}: labels of capture time"):
            kept.at_ts(ts)


def test_the_place_of_a_dropped_frame_is_nobodys() -> None:
    """Frames 0.1 s apart, of which every other was dropped: none within 0.05 s of the others."""
    kept = RecentAnswers()
    for frame in range(0, 40, 2):
        kept.add(RecentAnswer.from_served(served(frame, Classification(0, 1.0))))
    assert kept.at_ts(1.04).frame == 10
    with pytest.raises(LabelsError, match=r"labels\.unknown"):
        kept.at_ts(1.1)
    with pytest.raises(LabelsError, match=r"labels\.unknown"):
        kept.at_frame(11)


def test_a_single_frame_is_found_by_its_own_time_only() -> None:
    kept = answers(5.0)
    assert kept.at_ts(5.0).frame == 0
    with pytest.raises(LabelsError, match=r"labels\.unknown"):
        kept.at_ts(5.01)
    with pytest.raises(LabelsError, match=r"no frame was answered yet"):
        RecentAnswers().at_frame(0)


def test_a_clock_that_jumps_leaves_frames_to_be_found() -> None:
    times = [*(100.0 + frame / FPS for frame in range(10)), *(3.0 + frame / FPS for frame in range(10)), 1e9, 1e9 + 0.1]
    kept = answers(*times, first=50)
    for frame, ts in enumerate(times, 50):
        assert kept.at_ts(ts + 0.01).frame == frame


def test_a_clock_that_jumps_does_not_hinder_forgetting() -> None:
    kept = RecentAnswers(max_bytes=10_000)
    for frame in range(500):
        ts = float(-frame if frame % 7 else frame)
        kept.add(RecentAnswer.from_served(served(frame, Classification(0, 1.0), ts=ts)))
    assert [answer.frame for answer in kept.after(495)] == [496, 497, 498, 499]
    assert kept.nbytes <= 10_000
    assert kept.at_ts(-499.0).frame == 499
