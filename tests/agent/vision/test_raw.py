from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest
from numpy.typing import NDArray

from agent.common.errors import ConfigError
from agent.vision.fidelity import Fidelity, fidelity
from agent.vision.spec import ModelSpec
from agent.vision.tasks.opening import open_task
from agent.vision.tasks.raw import RawOutputs, channel_axis, channel_noise
from engines.interface import TensorSpec

UNKNOWN = Fidelity(1.0, is_empty=True)  # as a frame that shows nothing: means leave it out
COORDINATES, CLASSES = 4, 80


def table() -> NDArray[np.float32]:
    """Like an output of YOLOv8: coordinates in pixels beside scores below one, whose last classes are hardly there."""
    rng = np.random.default_rng(7)
    shares = np.logspace(0, -3, CLASSES)[:, None]
    scores = rng.random((CLASSES, 1000)) ** 8 * shares
    return np.concatenate([rng.random((COORDINATES, 1000)) * 640.0, scores])[None].astype(np.float32)


def agreement(
    served: NDArray[np.generic], reference: NDArray[np.generic], least_db: float | Mapping[str, float] = 20.0
) -> Fidelity:
    return fidelity(RawOutputs({"y": served}, least_db), RawOutputs({"y": reference}))


def test_a_vector_is_judged_by_its_power() -> None:
    reference, close, far = np.array([3.0, 4.0]), np.array([3.0, 4.5]), np.array([3.0, 4.6])
    assert channel_noise(close, reference).sqnr_db == pytest.approx([20.0])  # 25 against 0.25
    assert agreement(close, reference, 19.99) == Fidelity(1.0)
    assert agreement(far, reference) == Fidelity(0.0)


def test_small_scores_count_beside_large_coordinates() -> None:
    reference, served = table(), table()
    served[:, COORDINATES:] *= 0.5
    noise_db = 10 * np.log10(np.square(reference).sum() / np.square(served - reference).sum())
    assert noise_db > 60.0  # so the output as a whole is clean
    assert agreement(served, reference).value < 0.6


def test_harm_to_one_channel_counts_as_one_channel() -> None:
    served = table()
    served[:, COORDINATES] = 0.0
    assert agreement(served, table()).value == pytest.approx(1 - 1 / CLASSES)


def landmarks() -> NDArray[np.float32]:
    """Like an output of BlazePose: x, y, z in pixels, and the logits of visibility and presence, in one vector."""
    rng = np.random.default_rng(5)
    return np.hstack((rng.random((39, 3)) * 256.0, rng.normal(0.0, 3.0, (39, 2)))).reshape(1, 195).astype(np.float32)


def rows_of(columns: int, *scores: int) -> NDArray[np.float32]:
    """Return a table (rows, columns) of signed coordinates, with scores below one in some columns."""
    values = np.random.default_rng(6).random((400, columns)).astype(np.float32)
    others = [column for column in range(columns) if column not in scores]
    values[:, others] = (values[:, others] - 0.5) * 8.0
    return values


@pytest.mark.parametrize(
    ("reference", "part"),
    [
        (landmarks(), np.s_[:, 3::5]),
        (rows_of(6, 4), np.s_[:, 4]),
        (rows_of(37, 4).T[np.newaxis], np.s_[:, 4]),
        (rows_of(5, 4).T.reshape(1, 5, 1, 400), np.s_[:, 4]),
    ],
    ids=["vector", "without_a_batch", "one_class_among_mask_coefficients", "four_axes"],
)
def test_a_channel_of_its_own_kind_is_not_drowned_by_the_others(
    reference: NDArray[np.float32], part: tuple[slice, ...]
) -> None:
    served = reference.copy()
    served[part] *= -1.0
    assert agreement(reference, reference) == Fidelity(1.0)
    assert agreement(served, reference).value <= 0.5


def test_a_box_and_its_score_in_one_vector_are_unknown() -> None:
    reference = np.array([[300.0, 200.0, 400.0, 500.0, 0.9]])
    served = reference * [1.0, 1.0, 1.0, 1.0, 0.0]
    assert agreement(served, reference) == UNKNOWN


def test_probabilities_in_one_vector_are_judged_however_small_some_are() -> None:
    reference = np.array([[0.98, 0.0199, 1e-4]])
    assert agreement(np.array([[0.97, 0.0298, 2e-4]]), reference) == Fidelity(1.0)
    assert agreement(reference[:, ::-1], reference) == Fidelity(0.0)


def test_a_class_that_is_not_there_is_judged_by_those_that_are() -> None:
    served = table()
    served[:, -1] *= 2.0  # as much noise as signal, and a thousandth of the first class
    assert agreement(served, table()) == Fidelity(1.0)


def test_a_channel_that_wakes_up_is_noise() -> None:
    reference, served = table(), table()
    reference[:, -1] = 0.0
    served[:, -1] = 1.0
    assert agreement(served, reference).value == pytest.approx(1 - 1 / CLASSES)


def test_the_worst_output_decides_unless_others_are_named() -> None:
    reference = {"boxes": np.full((1, 9), 1000.0), "scores": np.full((1, 9), 0.01)}
    served = {"boxes": np.full((1, 9), 1000.0), "scores": np.full((1, 9), 0.02)}

    def judged(least_db: float | dict[str, float]) -> float:
        return fidelity(RawOutputs(served, least_db), RawOutputs(reference)).value

    assert judged(20.0) == 0.0
    assert judged({"boxes": 20.0}) == 1.0
    assert judged({"boxes": 20.0, "scores": -1.0}) == 1.0
    assert judged({"scores": 1.0}) == 0.0


@pytest.mark.parametrize(
    ("served", "reference", "expected"),
    [
        ([0.0, 1.0], [0.0, 0.0], -math.inf),
        ([math.nan, 1.0], [1.0, 1.0], -math.inf),
        ([math.inf, 1.0], [1.0, 1.0], -math.inf),
        ([1.0, 1.0], [math.inf, 1.0], -math.inf),
        ([math.inf, 1.0], [math.inf, 1.0], math.inf),
        ([math.nan, 1.0], [math.nan, 1.0], math.inf),
    ],
)
def test_values_without_a_level(served: list[float], reference: list[float], expected: float) -> None:
    assert channel_noise(np.array(served), np.array(reference)).sqnr_db == pytest.approx([expected])


def test_the_worst_channel_has_a_name() -> None:
    served = table()
    served[:, COORDINATES + 2] *= 0.5
    parts = RawOutputs({"y": served, "z": np.ones((1, 9))}).sqnr_by_part(
        RawOutputs({"y": table(), "z": np.ones((1, 9))})
    )
    assert min(parts, key=lambda name: parts[name]) == f"y[{COORDINATES + 2}]"
    assert parts["z"] == math.inf


def test_classes_are_judged_by_the_share_that_differs() -> None:
    reference, served = np.zeros((1, 20, 20), np.int64), np.zeros((1, 20, 20), np.int64)
    served[0, 0, :4] = 7  # 1 %, 20 dB
    assert agreement(served, reference) == Fidelity(1.0)
    served[0, 0, 4] = 7
    assert agreement(served, reference) == Fidelity(0.0)


@pytest.mark.parametrize(
    ("served", "reference"),
    [
        (np.ones((1, 3, 6)), np.ones((1, 4, 6))),  # one object less
        (np.empty((1, 0, 6)), np.empty((1, 0, 6))),
        (np.zeros((1, 4, 6)), np.zeros((1, 4, 6))),
    ],
    ids=["rows", "empty", "zeros"],
)
def test_outputs_that_cannot_be_judged_are_unknown(served: NDArray[np.float64], reference: NDArray[np.float64]) -> None:
    assert agreement(served, reference) == UNKNOWN
    assert agreement(np.ones((1, 5)), np.ones((1, 5)), {}) == UNKNOWN


@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((1, 1000), None),
        ((1, 84, 8400), 1),
        ((1, 300, 6), 2),
        ((1, 12, 360, 480), 1),
        ((1, 512, 7, 7), 1),
        ((1, 64, 64, 39), 3),
        ((1, 1, 48, 64), 1),
        ((1, 1, 195), None),
        ((1, 5, 1, 8400), 1),
        ((300, 6), 1),
        ((1, 3, 80, 80, 85), 4),
    ],
)
def test_channels_are_found_by_shape(shape: tuple[int, ...], axis: int | None) -> None:
    assert channel_axis(shape) == axis


def test_a_bound_for_an_output_that_the_model_lacks_is_refused() -> None:
    spec = ModelSpec.model_validate({"path": "m.onnx", "task": "raw", "min_sqnr_db": {"scores": 10, "boxs": 30}})
    outputs = [TensorSpec(name, np.dtype(np.float32), (1, 4)) for name in ("boxes", "scores")]
    with pytest.raises(ConfigError, match=r"min_sqnr_db of boxs.*boxes, scores") as refused:
        open_task(spec).open_decoder((8, 8), outputs)
    assert refused.value.code == "decoder.shape"
