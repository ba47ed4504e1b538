"""Classes that INT8 loses while it serves are named, and no others."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest

from agent.monitoring.class_losses import ClassLosses, LossExample
from agent.vision.detections import Detections
from agent.vision.tasks.classify import Classification
from agent.vision.tasks.raw import RawOutputs
from calibrate.errors import CalibrationError

Serve = Callable[[int, int], int | None]  # from the frame and the reference's class


def seen(class_id: int | None) -> Classification:
    return Classification(-1 if class_id is None else class_id, 1.0)


def watch(losses: ClassLosses, answer: Serve, first: int, frames: int, classes: int = 10) -> ClassLosses:
    """Classes in a random order, each as often."""
    order = np.random.default_rng(first).integers(0, classes, frames).tolist()
    for frame, class_id in enumerate(order, first):
        losses.add(frame, float(frame), seen(class_id).pairs(seen(answer(frame, class_id))))
    return losses


def flicker(frame: int, class_id: int) -> int:
    """One answer in thirty is wrong, whatever the class."""
    return class_id if frame % 30 else (class_id + 1) % 10


def eights_for_sixes(frame: int, class_id: int) -> int:
    return 8 if class_id == 6 and frame % 5 == 0 else flicker(frame, class_id)


def test_a_class_that_is_lost_while_serving_is_named_with_what_stands_in_its_place() -> None:
    losses = watch(ClassLosses(1.0, 1.0), flicker, 0, 40_000)
    assert not losses.lost
    watch(losses, eights_for_sixes, 40_000, 2000)
    (lost,) = losses.lost
    assert (lost.class_id, lost.instead) == (6, 8)
    assert 0.05 < lost.tolerance < lost.loss < 0.4
    assert len(lost.examples) == 3
    assert {example.served for example in lost.examples} == {8}
    assert all(isinstance(example, LossExample) and example.frame >= 40_000 for example in lost.examples)


def test_a_class_that_is_far_worse_than_the_others_from_the_start_is_named_too() -> None:
    losses = watch(
        ClassLosses(1.0, 1.0), lambda frame, class_id: None if class_id == 0 and frame % 2 else class_id, 0, 4000
    )
    (lost,) = losses.lost
    assert (lost.class_id, lost.instead, lost.examples[0].served) == (0, -1, -1)


def test_a_loss_that_was_there_is_no_news() -> None:
    losses = watch(ClassLosses(1.0, 1.0), lambda frame, class_id: class_id if frame % 8 else None, 0, 20_000)
    assert losses.lost == ()


def test_the_objects_of_a_frame_count_together_and_missed_ones_have_nothing_in_their_place() -> None:
    boxes = np.array([[0, 0, 10, 10], [20, 0, 30, 10], [40, 0, 50, 10], [60, 0, 70, 10]], np.float32)
    reference = Detections(boxes=boxes, classes=np.array([1, 1, 1, 2]), scores=np.full(4, 0.9, np.float32))
    losses = ClassLosses(1.0, 1.0)
    half = Detections(boxes=boxes[[0, 1, 3]], classes=np.array([1, 1, 2]), scores=np.full(3, 0.9, np.float32))
    for frame in range(800):
        losses.add(frame, float(frame), reference.pairs(reference))
    for frame in range(400):
        losses.add(frame, float(frame), reference.pairs(half))
    (lost,) = losses.lost
    assert (lost.class_id, lost.instead) == (1, None)
    assert lost.loss == pytest.approx(1.0 / 3.0, abs=0.01)


def test_evidence_goes_on_in_another_process() -> None:
    losses, kept = ClassLosses(1.0, 1.0), ClassLosses(1.0, 1.0)
    watch(losses, flicker, 0, 40_000)
    kept.restore(json.loads(json.dumps(losses.state())))
    for each in (losses, kept):
        watch(each, eights_for_sixes, 40_000, 2000)
    assert [lost.class_id for lost in kept.lost] == [6]
    assert kept.state() == losses.state()
    again = ClassLosses(1.0, 1.0)
    again.restore(json.loads(json.dumps(losses.state())))
    assert again.lost == losses.lost, "the next process reports the same answer and the same examples"


@pytest.mark.parametrize("state", [{}, {"seen": 1, "values": 1, "total": 0.0, "classes": {"a": {}}}, {"classes": []}])
def test_a_state_that_no_process_has_left_is_refused(state: dict[str, object]) -> None:
    losses = watch(ClassLosses(1.0, 1.0), flicker, 0, 500)
    with pytest.raises((CalibrationError, AttributeError, KeyError, TypeError, ValueError)):
        losses.restore(state)
    assert losses.values == 0


def test_raw_outputs_are_ignored() -> None:
    losses = ClassLosses(1.0, 1.0)
    outputs = RawOutputs({"out": np.zeros(3)})
    losses.add(0, 0.0, outputs.pairs(outputs))
    assert (losses.values, losses.lost) == (0, ())
