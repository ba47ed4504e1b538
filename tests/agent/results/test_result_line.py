"""One line for each frame, the same in `tared infer -o` and in what the daemon gives away."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from bench import strict
from results_bench import HALVED, SPEC, detections, line, served

from agent.results.writer import ResultLine
from agent.vision.tasks.raw import RawOutputs

WHO = {"frame": 7, "ts": 0.7, "camera": "street", "engine": "f00d", "latency_ms": 2.5}


def test_boxes_are_in_the_frames_own_pixels() -> None:
    found = {"class": 1, "label": "b", "score": 0.5, "box": [20.0, 10.0, 40.0, 40.0]}
    assert strict(ResultLine(served(7, detections(0.5), HALVED), SPEC).encoded.decode()) == {
        **WHO,
        "detections": [found],
    }


def test_boxes_without_a_geometry_are_in_frame_pixels_already() -> None:
    (found,) = line(7, detections(0.5)).document["detections"]
    assert found["box"] == [10.0, 30.0, 20.0, 45.0]


def test_a_class_with_its_label() -> None:
    assert strict(line(7).encoded.decode()) == {**WHO, "class": 1, "label": "b", "score": 0.75}


def test_nan_and_infinity_are_null() -> None:
    outputs = RawOutputs({"y": np.array([[1.0, np.nan, -np.inf]], np.float32)})
    assert strict(line(7, outputs).encoded.decode())["outputs"] == {"y": [[1.0, None, None]]}


def test_whole_numbers_stay_whole() -> None:
    assert RawOutputs({"y": np.array([1, 2])}).as_dict(SPEC) == {"outputs": {"y": [1, 2]}}


def test_an_answer_that_waits_keeps_all_but_its_image() -> None:
    answer = replace(served(7, detections(0.5), HALVED), batch_size=3)
    waiting = answer.without_image
    assert not waiting.frame.image.size
    assert replace(waiting, frame=answer.frame) == answer
    assert replace(waiting.frame, image=answer.frame.image) == answer.frame
