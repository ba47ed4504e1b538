"""Labels of drawn frames come to bounds of accuracy, by class, camera and regime; a choice among them is noticed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from agent.labelling.accuracy import count_frame, measured_accuracy
from agent.labelling.store import Counted, DrawnFrame
from agent.vision.answer import Answer
from agent.vision.boxes import LabelledBoxes
from agent.vision.detections import Detections
from agent.vision.labels import Truth
from agent.vision.tasks.classify import Classification
from calibrate.statistics.sampling import STRATA

BOX = (10.0, 10.0, 30.0, 30.0)
OTHER = (50.0, 50.0, 90.0, 90.0)
RATE = 0.02


def drawn(
    number: int,
    served: Answer,
    reference: Answer,
    label: Truth | None,
    *,
    camera: str = "gate",
    regime: str = "day",
    stratum: int = 0,
    skipped: bool = False,
) -> DrawnFrame:
    """The frame of a stream in which one second in fifty is drawn, all of one stratum."""
    seen = [0.0] * STRATA
    seen[stratum] = number / RATE
    return DrawnFrame(
        id=number,
        camera=camera,
        regime=regime,
        frame=50 * number,
        ts=number / RATE,
        stratum=stratum,
        weight=1.0,
        probability=RATE,
        seen=seen,
        served=served,
        reference=reference,
        drawn_s=0.0,
        width=100,
        height=100,
        label=label,
        labelled_s=None,
        suggested=False,
        skipped=skipped,
    )


def classified(number: int, served: int, reference: int, label: int | None, **more: object) -> DrawnFrame:
    answers = Classification(served, 0.9), Classification(reference, 0.9)
    return drawn(number, *answers, label, **more)  # type: ignore[arg-type]  # of any keyword


def boxes(*corners: tuple[float, ...], classes: tuple[int, ...] = ()) -> Detections:
    return Detections(
        boxes=np.array(corners, np.float32).reshape(-1, 4),
        classes=np.array(classes or [0] * len(corners), np.int64),
        scores=np.full(len(corners), 0.8, np.float32),
    )


def counted(answer: Answer, truth: Truth, classes: Sequence[int]) -> np.ndarray:
    return count_frame(answer.accuracy(truth), answer.hits(truth), classes)


def test_a_frame_counts_for_each_class_that_is_shown_or_found() -> None:
    truth = LabelledBoxes(boxes=np.array([BOX, OTHER], np.float32), classes=np.array([0, 1]))
    counts = counted(boxes(BOX, OTHER, classes=(0, 2)), truth, [0, 1, 2])
    assert counts.tolist() == [[0.5, 1, 1, 1, 1], [0, 0, 1, 0, 0], [0, 0, 0, 0, 1], [0, 0, 0, 1, 0]]
    assert counted(Classification(3, 0.9), 4, [3, 4])[:, 2:].tolist() == [[0, 1, 1], [0, 1, 0], [0, 0, 1]]


@pytest.mark.parametrize(
    ("answer", "truth", "expected"),
    [(Classification(3, 0.9), 3, 1.0), (Classification(3, 0.9), 2, 0.0), (boxes(BOX), boxes(BOX, OTHER), 2 / 3)],
)
def test_a_score(answer: Answer, truth: Truth, expected: float) -> None:
    assert answer.accuracy(truth) == pytest.approx(expected)


def test_nothing_found_where_nothing_is_has_no_score() -> None:
    assert boxes().accuracy(boxes()) is None


def test_int8_is_bounded_beside_float_in_all_and_by_class_camera_and_regime() -> None:
    """One frame in ten is wrong by the model, one in ten by INT8 alone, which takes a 6 for an 8."""
    frames = [
        classified(n, *((1, 1, 2) if n % 10 == 0 else (8, 6, 6) if n % 10 == 5 else (6, 6, 6)), regime="night")
        for n in range(1, 301)
    ]
    labels = [str(each) for each in range(10)]
    measured = measured_accuracy(frames, labels)
    assert measured is not None
    overall = measured.overall
    assert (overall.accuracy.estimate, overall.reference.estimate) == pytest.approx((0.8, 0.9), abs=0.01)
    assert overall.accuracy.low < 0.8 < overall.accuracy.high
    assert overall.int8_loss.low < 0.1 < overall.int8_loss.high
    assert overall.int8_loss.low > 0.0
    assert measured.regimes["night"] == measured.cameras["gate"] == overall
    six = measured.classes["6"]
    assert (six.recall.estimate, six.reference_recall.estimate) == pytest.approx((8 / 9, 1.0), abs=0.01)
    assert six.precision.estimate == pytest.approx(1.0)
    assert measured.classes["8"].recall.n == 0
    assert measured.doubt == ""
    document = measured.document(most=1)
    assert list(document["classes"]) == ["6"]
    assert document["overall"]["accuracy"]["n"] == 300


def test_frames_count_up_to_the_first_that_waits_in_each_cell() -> None:
    """Labelling the easy frames first gains nothing."""
    frames = [classified(n, 1, 1, None if n == 41 else 1) for n in range(1, 101)]
    frames += [classified(n, 1, 1, 1, camera="yard") for n in range(1, 51)]
    measured = measured_accuracy(frames)
    assert measured is not None
    assert (measured.labels, measured.waiting) == (90, 1)
    assert (measured.cameras["gate"].accuracy.n, measured.cameras["yard"].accuracy.n) == (40, 50)


def sound(number: int) -> DrawnFrame:
    """Frames of all strata in turn; one in five of them is wrong."""
    return classified(number, 1, 1, 2 if number % 5 == 0 else 1, stratum=number % STRATA)


COUNTED = {("gate", "day"): Counted(np.full(STRATA, 100.0 / RATE), np.full(STRATA, 100.0))}


@pytest.mark.parametrize(
    ("choose", "words"),
    [
        (lambda frame: frame, ""),
        (lambda frame: frame if frame.stratum or frame.id % 4 == 0 else None, "frames were removed or added"),
        (
            lambda frame: (
                classified(frame.id, 1, 1, None, stratum=0, skipped=True)
                if not frame.stratum and frame.id % 4
                else frame
            ),
            "what they show counts for nothing",
        ),
    ],
    ids=["sound", "unsure frames removed", "unsure frames skipped"],
)
def test_a_choice_among_drawn_frames_is_noticed(choose: Callable[[DrawnFrame], DrawnFrame | None], words: str) -> None:
    chosen = [choose(sound(number)) for number in range(1, 601)]
    measured = measured_accuracy([each for each in chosen if each is not None], counted=COUNTED)
    assert measured is not None
    assert measured.doubt.endswith(words)
    assert bool(measured.doubt) == bool(words)


def test_sound_draws_are_hardly_ever_doubted() -> None:
    chance, doubted = np.random.default_rng(4), 0
    for _ in range(12):
        numbers = [number for number in range(1, 1201) if chance.random() < 0.5]
        skipped = {number for number in numbers if chance.random() < 0.03}
        frames = [
            classified(n, 1, 1, None if n in skipped else 1, stratum=n % STRATA, skipped=n in skipped) for n in numbers
        ]
        measured = measured_accuracy(frames, counted=COUNTED)
        assert measured is not None
        doubted += bool(measured.doubt)
    assert doubted == 0
