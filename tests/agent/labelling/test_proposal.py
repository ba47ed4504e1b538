"""Proposals from labels: a score threshold that is better, classes that are never right; nothing on noise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from agent.labelling.proposal import PolicyProposal, propose
from agent.labelling.store import DrawnFrame
from agent.vision.answer import Answer
from agent.vision.boxes import LabelledBoxes
from agent.vision.detections import Detections
from agent.vision.labels import Truth
from agent.vision.policy import Policy
from agent.vision.spec import ModelSpec
from agent.vision.tasks.classify import Classification

LABELS = ["person", "car", "owl"]
DETECTOR = ModelSpec.model_validate({"path": "m.onnx", "task": "detect", "decoder": "yolox", "labels": LABELS})
CLASSIFIER = ModelSpec.model_validate({"path": "m.onnx", "task": "classify", "labels": LABELS})
_P = 0.05


def drawn(answers: Iterator[tuple[Answer, Truth | None]], regime: str = "night") -> list[DrawnFrame]:
    """A frame of each, one second in twenty."""
    return [
        DrawnFrame(
            camera="gate", regime=regime, frame=number, ts=float(number), stratum=number % 6, weight=1.0,
            probability=_P, seen=[(number + 1) / _P / 6.0] * 6, served=served, reference=served, id=number,
            drawn_s=0.0, width=100, height=100, label=label, labelled_s=None, suggested=False, skipped=False,
        )
        for number, (served, label) in enumerate(answers)
    ]  # fmt: skip


def boxes(rows: Sequence[tuple[float, int]]) -> Detections:
    """A box for each score and class, apart from each other."""
    corners = np.array([[20.0 * at, 0.0, 20.0 * at + 10.0, 10.0] for at in range(len(rows))], np.float32).reshape(-1, 4)
    scores, classes = np.array([row[0] for row in rows], np.float32), np.array([row[1] for row in rows], np.int64)
    return Detections(boxes=corners, classes=classes, scores=scores)


def objects(found: Detections, right: Sequence[bool]) -> LabelledBoxes:
    at = np.array(right, np.bool_)
    return LabelledBoxes(boxes=found.boxes[at], classes=found.classes[at])


def street(
    seed: int, count: int, misled_below: float, right: float = 0.9, wrong_class: int | None = None
) -> Iterator[tuple[Answer, Truth | None]]:
    """Three boxes a frame, of scores in [0.3, 0.9]; those below `misled_below` are right one time in ten."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        found = boxes([(float(score), int(rng.integers(2))) for score in rng.uniform(0.3, 0.9, 3)])
        is_right = [bool(rng.random() < (0.1 if score < misled_below else right)) for score in found.scores]
        if wrong_class is not None:
            is_right = [each and number != wrong_class for each, number in zip(is_right, found.classes, strict=True)]
        yield found, objects(found, is_right)


def of(frames: list[DrawnFrame], spec: ModelSpec = DETECTOR, policy: Policy | None = None) -> PolicyProposal | None:
    return propose(frames, "night", spec, policy)


def test_a_better_threshold_is_found_and_its_gain_is_known() -> None:
    proposal = of(drawn(street(0, 200, 0.6)))
    assert proposal is not None
    assert proposal.score_threshold == pytest.approx(0.6, abs=0.03)
    assert (proposal.present, proposal.labels, proposal.classes) == (0.3, 200, ())
    assert proposal.gain is not None
    assert proposal.f1 is not None
    assert proposal.f1_present is not None
    assert 0.05 < proposal.gain.low < proposal.f1.estimate - proposal.f1_present.estimate < proposal.gain.high


def test_noise_speaks_for_nothing() -> None:
    """Whether an answer is right does not depend on its score."""
    proposals = [of(drawn(street(seed, 60 + seed % 30, 0.0, right=0.5))) for seed in range(40)]
    assert sum(each is not None for each in proposals) <= 2


def test_fewer_than_sixty_labels_speak_for_nothing_and_neither_do_those_behind_one_that_waits() -> None:
    answers = list(street(0, 200, 0.6))
    assert of(drawn(iter(answers[:59]))) is None
    answers[40] = answers[40][0], None
    assert of(drawn(iter(answers))) is None
    assert of(drawn(street(0, 200, 0.6), regime="day")) is None


def test_a_class_that_is_never_right_is_left_out() -> None:
    proposal = of(drawn(street(0, 300, 0.0, wrong_class=1)))
    assert proposal is not None
    assert (proposal.classes, [*proposal.never_right]) == ((0, 2), [1])
    assert proposal.never_right[1].high < 0.2
    assert of(drawn(street(0, 300, 0.0, wrong_class=1)), policy=Policy(classes=frozenset({0}))) is None


def test_objects_in_a_mask_do_not_count() -> None:
    """The first box of three, which is always wrong, lies in the mask."""
    found = boxes([(0.35, 0), (0.8, 0), (0.9, 1)])
    frames = drawn((found, objects(found, [False, True, True])) for _ in range(200))
    assert of(frames) is not None
    mask = [(0.0, 0.0), (0.1, 0.0), (0.1, 0.1), (0.0, 0.1)]
    assert of(frames, policy=Policy(masks={"gate": [mask]})) is None


def test_a_classifier_that_guesses_when_unsure() -> None:
    rng = np.random.default_rng(1)
    answers = list[tuple[Answer, Truth | None]]()
    for score in rng.uniform(0.2, 1.0, 400):
        class_id = int(rng.integers(2))
        answers.append((Classification(class_id, float(score)), class_id if score > 0.6 else 2))
    proposal = of(drawn(iter(answers)), CLASSIFIER)
    assert proposal is not None
    assert proposal.score_threshold == pytest.approx(0.6, abs=0.03)
