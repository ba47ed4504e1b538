"""The sample street: reproducible, truthful about what is in it, dark at night and bright in the morning."""

from __future__ import annotations

import json
from pathlib import Path

import cv2
import numpy as np
import onnx
import pytest

from agent.vision.spec import load_model_spec
from examples.street import view
from examples.street.light import decode, light_at
from examples.street.render import VIDEO_NAME, hour_at, render_video, truth_path
from examples.street.scene import CLASSES, MIN_HEIGHT_PX, MIN_VISIBLE, MIN_WIDTH_PX, Frame, Street

NIGHT, MORNING = 4.0, 8.3
MODEL_SPEC = Path(view.__file__).with_name("model.yaml")
SEED, DURATION_S = 11, 120.0


@pytest.fixture(scope="module")
def street() -> Street:
    return Street(SEED, DURATION_S)


@pytest.fixture(scope="module")
def mornings(street: Street) -> list[Frame]:
    """Forty frames two and a half seconds apart: their median shows the street without its traffic."""
    return [street.frame(2.5 * step, MORNING) for step in range(40)]


def test_a_frame_depends_on_nothing_but_seed_time_and_hour(street: Street) -> None:
    first = street.frame(7.3, 6.2)
    street.frame(8.0, NIGHT)
    again, elsewhere = street.frame(7.3, 6.2), Street(SEED, DURATION_S).frame(7.3, 6.2)
    other = Street(SEED + 1, DURATION_S).frame(7.3, 6.2)
    assert first.labels == again.labels == elsewhere.labels != other.labels
    np.testing.assert_array_equal(first.image, again.image)
    np.testing.assert_array_equal(first.image, elsewhere.image)


def test_labels_do_not_depend_on_the_light(street: Street) -> None:
    assert street.frame(31.0, NIGHT).labels == street.frame(31.0, MORNING).labels


@pytest.mark.trial
def test_every_label_keeps_the_stated_rule(mornings: list[Frame]) -> None:
    labels = [label for frame in mornings for label in frame.labels]
    assert {label.class_id for label in labels} == set(range(len(CLASSES)))
    for label in labels:
        x1, y1, x2, y2 = label.box
        assert 0 <= x1 <= x2 - MIN_WIDTH_PX <= view.WIDTH_PX - MIN_WIDTH_PX
        assert 0 <= y1 <= y2 - MIN_HEIGHT_PX <= view.HEIGHT_PX - MIN_HEIGHT_PX
        assert MIN_VISIBLE <= label.visible <= 1.0


@pytest.mark.trial
def test_boxes_lie_on_what_moves(mornings: list[Frame]) -> None:
    empty = np.median([frame.image for frame in mornings], axis=0)
    inside, outside = [], []
    for frame in mornings:
        moved = np.abs(frame.image - empty).max(axis=2) > 25
        boxed = np.zeros_like(moved)
        for label in frame.labels:
            x1, y1, x2, y2 = map(int, label.box)
            boxed[y1:y2, x1:x2] = True
            if label.visible > 0.6:
                inside.append(moved[y1:y2, x1:x2].mean())
        outside.append(moved[~boxed].mean())
    assert np.median(inside) > 0.5
    assert np.quantile(inside, 0.05) > 0.15
    assert np.mean(outside) < 0.05  # shadows, and what is too hidden or too small for a label


@pytest.mark.trial
def test_a_box_is_as_tight_as_the_silhouette(street: Street) -> None:
    """The change that a lone pedestrian makes in the picture reaches every side of the box."""
    empty = Street(SEED, 0.0)
    frame = next(f for f in (street.frame(t / 4, MORNING) for t in range(400)) if _one_whole_pedestrian(f))
    (label,) = [label for label in frame.labels if label.class_id == CLASSES.index("pedestrian")]
    x1, y1, x2, y2 = map(int, label.box)
    empty_picture = empty.frame(1e4, MORNING).image.astype(int)
    changed = np.abs(frame.image.astype(int) - empty_picture).max(axis=2)[y1:y2, x1:x2] > 25
    rows, columns = np.flatnonzero(changed.any(axis=1)), np.flatnonzero(changed.any(axis=0))
    assert max(rows[0], y2 - y1 - 1 - rows[-1]) <= 2
    assert max(columns[0], x2 - x1 - 1 - columns[-1]) <= 2


def _one_whole_pedestrian(frame: Frame) -> bool:
    pedestrians = [label for label in frame.labels if label.class_id == CLASSES.index("pedestrian")]
    return len(pedestrians) == 1 and pedestrians[0].visible == 1.0


def test_night_is_dark_and_morning_is_bright(street: Street) -> None:
    night = np.stack([street.frame(10.0 * step, NIGHT).image for step in range(8)])
    morning = np.stack([street.frame(10.0 * step, MORNING).image for step in range(8)])
    assert decode(morning).mean() > 25 * decode(night).mean()
    assert morning.mean() > 5 * night.mean()
    assert np.mean(night > 128) < 0.005
    assert np.mean(morning > 128) > 0.5


def test_the_light_changes_only_at_dawn() -> None:
    early, late = light_at(hour_at(0.0)), light_at(hour_at(99.0))
    assert (early.sky, early.sun, early.lamps) == (late.sky, late.sun, late.lamps)
    noon, morning, dawn = light_at(12.0), light_at(hour_at(150.0)), light_at(hour_at(118.0))
    assert not any(light_at(NIGHT).sun)
    assert noon.sun[1] >= morning.sun[1] > dawn.sun[1] >= 0.0
    assert (light_at(NIGHT).lamps, morning.lamps) == (1.0, 0.0)
    hours = [hour_at(float(ts)) for ts in range(400)]
    assert hours == sorted(hours)


@pytest.mark.parametrize("suffix", [".mp4", ".avi"])
def test_every_video_frame_has_its_line_of_truth(tmp_path: Path, suffix: str) -> None:
    done: list[tuple[int, int]] = []
    video = render_video(tmp_path / f"s{suffix}", 12, seed=5, progress=lambda *step: done.append(step))
    assert done == [(number + 1, 12) for number in range(12)]
    assert {path.name for path in tmp_path.iterdir()} == {"s.jsonl", f"s{suffix}"}
    lines = [json.loads(line) for line in truth_path(video).read_text().splitlines()]
    expected = Street(5, 12 / view.FPS)
    capture = cv2.VideoCapture(str(video))
    for number, line in enumerate(lines):
        read, image = capture.read()
        frame = expected.frame(number / view.FPS, hour_at(number / view.FPS))
        assert read
        assert (line["frame"], line["ts"]) == (number, number / view.FPS)
        assert line["labels"] == [{"class": label.class_id, "box": list(label.box)} for label in frame.labels]
        assert np.abs(image.astype(int) - frame.image).mean() < 4  # what the codec costs
    assert len(lines) == 12
    assert not capture.read()[0]
    capture.release()


def test_an_interrupted_rendering_keeps_the_older_video(tmp_path: Path) -> None:
    video = render_video(tmp_path / VIDEO_NAME, 3)
    before = video.read_bytes(), truth_path(video).read_bytes()

    def interrupt(done: int, _frames: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        render_video(video, 5, progress=interrupt)
    assert (video.read_bytes(), truth_path(video).read_bytes()) == before
    assert len(list(tmp_path.iterdir())) == 2


def test_the_model_is_small_and_has_what_a_real_one_has() -> None:
    path = load_model_spec(MODEL_SPEC).path
    model = onnx.load(path)
    convolutions = [node for node in model.graph.node if node.op_type == "Conv"]
    groups = [a.i for node in convolutions for a in node.attribute if a.name == "group"]
    assert path.stat().st_size < 1_000_000
    assert len(convolutions) >= 12
    assert max(groups) > 1
    assert {"Add", "Relu", "Resize", "Sigmoid"} <= {node.op_type for node in model.graph.node}
