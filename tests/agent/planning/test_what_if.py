"""How far a plan's answers are from the reference's, and the frames they are asked on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from candidate_bench import observed
from numpy.typing import NDArray
from plan_world import LOUD, QUIET, RAW, two_branches
from zoo import Net

from agent.models.model import Model, calibrate, open_model
from agent.planning.what_if import WhatIf, outputs_divergence
from agent.vision.detections import Detections
from agent.vision.spec import ModelSpec
from agent.vision.tasks.opening import open_task
from calibrate.plan import PrecisionPlan
from engines.calibration import Calibration
from engines.registry import open_backend

ALL_FLOAT = PrecisionPlan({LOUD: "", QUIET: ""})


def detections(*rows: tuple[float, float, float, float, int, float]) -> Detections:
    """x0, y0, x1, y1, class, score."""
    table = np.array(rows, np.float64).reshape(-1, 6)
    boxes, classes, scores = table[:, :4], table[:, 4], table[:, 5]
    return Detections(
        boxes=boxes.astype(np.float32), classes=classes.astype(np.int64), scores=scores.astype(np.float32)
    )


NOTHING = detections()
DETECTOR = ModelSpec.model_validate({"path": "m.onnx", "task": "detect", "decoder": "yolox"})
BOX = (0.0, 0.0, 10.0, 10.0, 1, 0.8)


Sighting = tuple[Detections, Detections]  # what is seen, and the candidates that it was chosen from


def sighting(*rows: tuple[float, float, float, float, int, float]) -> Sighting:
    return detections(*rows), detections(*rows)


def sightings_divergence(served: Sighting, reference: Sighting) -> float | None:
    return open_task(DETECTOR).divergence(served, reference)


@pytest.mark.parametrize(
    ("served", "reference", "divergence"),
    [
        (sighting(BOX), sighting(BOX), 0.0),
        (sighting(), sighting(BOX), 1.0),
        (sighting(BOX), sighting(), 1.0),
        (sighting((*BOX[:4], 2, BOX[5])), sighting(BOX), 1.0),
        # Below the threshold it is a candidate still: small noise moves the divergence a little.
        ((NOTHING, detections((*BOX[:5], 0.29))), sighting((*BOX[:5], 0.31)), 0.02**2),
        (sighting((5.0, 0.0, 15.0, *BOX[3:])), sighting(BOX), (1 - 50 / 150) ** 2),
    ],
    ids=["equal", "missed", "invented", "misclassified", "faded", "moved"],
)
def test_sightings_diverge_by_what_differs(served: Sighting, reference: Sighting, divergence: float) -> None:
    assert sightings_divergence(served, reference) == pytest.approx(divergence, rel=1e-4, abs=1e-12)


def test_two_empty_answers_give_nothing_to_compare() -> None:
    assert sightings_divergence(sighting(), sighting()) is None


def test_noise_is_relative_to_what_varies_in_the_output() -> None:
    reference = {"a": np.array([100.0, 102.0], np.float32)}
    assert outputs_divergence({"a": reference["a"] + np.float32(0.1)}, reference) == pytest.approx(0.01, rel=1e-3)
    assert outputs_divergence({"a": reference["a"] + 50}, reference) == 1.0
    assert outputs_divergence({"a": np.full(2, np.nan)}, reference) == 1.0


def test_noise_of_a_single_number_is_relative_to_itself() -> None:
    assert outputs_divergence({"a": np.array([9.0])}, {"a": np.array([10.0])}) == pytest.approx(0.01)


def test_outputs_may_hold_as_many_rows_as_were_found() -> None:
    assert outputs_divergence({"a": np.zeros((3, 6))}, {"a": np.zeros((2, 6))}) == 1.0
    assert outputs_divergence({"a": np.zeros((0, 6))}, {"a": np.zeros((0, 6))}) == 0.0


def test_the_divergence_of_outputs_is_their_mean() -> None:
    reference = {"a": np.array([0.0, 2.0]), "b": np.array([0.0, 2.0])}
    served = {"a": np.array([0.0, 2.0]), "b": np.array([0.2, 2.2])}
    assert outputs_divergence(served, reference) == pytest.approx(0.02)


def seen(model: Model, frames: Sequence[NDArray[np.float32]]) -> Calibration:
    histograms = observed(model, open_backend("onnxruntime"), list(frames))
    return calibrate(model, histograms, "entropy", len(frames), "test")


def opened(folder: Path, graph: onnx.ModelProto, **spec: object) -> Model:
    onnx.save(graph, folder / "model.onnx")
    return open_model(ModelSpec.model_validate({**RAW, "path": folder / "model.onnx", **spec}))


def images(count: int) -> list[NDArray[np.float32]]:
    rng = np.random.default_rng(0)
    return [rng.random((1, 3, 8, 8), np.float32) for _ in range(count)]


def test_a_float_plan_answers_as_the_reference(tmp_path: Path) -> None:
    model, frames = opened(tmp_path, two_branches()), images(4)
    what_if = WhatIf(model, seen(model, frames), [frames], open_backend("onnxruntime"))
    answer = what_if.evaluate(ALL_FLOAT)
    assert (answer.divergence, answer.loss, answer.telling) == (0.0, 0.0, 4)
    loud, quiet = (what_if.evaluate(PrecisionPlan({name: ""})) for name in (QUIET, LOUD))
    assert loud.divergence > 100.0 * quiet.divergence > 0.0
    assert (loud.loss, quiet.loss) == (1.0, 0.0)
    assert what_if.evaluate(PrecisionPlan({LOUD: ""}), 2).telling == 2


def detector() -> onnx.ModelProto:
    """Finds what is bright: one score per place, of boxes that stand still."""
    net = Net((1, 3, 8, 8))
    kernel = np.zeros((6, 3, 1, 1), np.float32)
    kernel[4] = 1.0 / 3.0
    corner = np.array([4.0, 4.0, 4.0, 4.0, 0.0, 0.0], np.float32)
    convolved = net.node("Conv", "image", net.constant(kernel), net.constant(corner))
    return net.model(net.node("Reshape", convolved, net.constant(np.array([1, 6, 64], np.int64))))


def test_frames_that_show_something_are_asked_first(tmp_path: Path) -> None:
    changes = {"task": "detect", "decoder": "yolov8", "labels": ["a", "b"], "score_threshold": 0.9}
    model = opened(tmp_path, detector(), **changes)
    dark, bright = np.full((1, 3, 8, 8), 0.05, np.float32), np.full((1, 3, 8, 8), 0.95, np.float32)
    what_if = WhatIf(model, seen(model, [dark, bright]), [[dark] * 6 + [bright] * 2], open_backend("onnxruntime"))
    assert what_if.evaluate(PrecisionPlan(), 2).telling == 2
    assert what_if.evaluate(PrecisionPlan()).telling == 2  # the others are empty


def test_where_no_frame_shows_anything_the_outputs_are_compared(tmp_path: Path) -> None:
    changes = {"task": "detect", "decoder": "yolov8", "labels": ["a", "b"], "score_threshold": 0.99}
    model, frames = opened(tmp_path, detector(), **changes), [0.3 * frame for frame in images(4)]
    answer = WhatIf(model, seen(model, frames), [frames], open_backend("onnxruntime")).evaluate(PrecisionPlan())
    assert answer.divergence > 0.0
    assert (answer.loss, answer.telling) == (0.0, 0)


def test_answers_that_are_no_numbers_lose_everything(tmp_path: Path) -> None:
    """A logarithm of what INT8 rounds to zero."""
    net = Net((1, 3, 8, 8))
    kernel = np.zeros((1, 3, 1, 1), np.float32)
    kernel[0, 0] = 1.0
    faint = net.node("Conv", "image", net.constant(kernel))
    model, frames = opened(tmp_path, net.model(net.node("Log", faint))), images(4)
    for frame in frames:
        frame[:, 0] = np.maximum(frame[:, 0], 1e-3)
        frame[0, 0, 0, 0] = 1e-3
    answer = WhatIf(model, seen(model, frames), [frames], open_backend("onnxruntime")).evaluate(PrecisionPlan())
    assert (answer.divergence, answer.loss) == (1.0, 1.0)
