"""A candidate's outputs are checked before anything is predicted from them."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from agent.common.errors import AgentError
from agent.common.schema import validate
from agent.serving.trial import CheckedVisionTask, NonFiniteRecorder, as_failure, check_outputs
from agent.vision.spec import ModelSpec
from agent.vision.tasks.classify import Classification
from engines.errors import EngineError
from engines.interface import TensorSpec

FLOAT = np.dtype(np.float32)
EXPECTED = {"boxes": (1, None, 4), "scores": (1, None)}


def outputs(**changes: Any) -> dict[str, Any]:
    """Return outputs as expected, but for these changes; None: without that output."""
    whole = {"boxes": np.zeros((1, 7, 4), np.float32), "scores": np.zeros((1, 7), np.int64), **changes}
    return {name: output for name, output in whole.items() if output is not None}


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"boxes": np.zeros((1, 7, 5), np.float32)}, "boxes of shape"),
        ({"boxes": np.zeros((7, 4), np.float32)}, "boxes of shape"),
        ({"more": np.zeros(1, np.float32)}, "the outputs"),
        ({"scores": None}, "'boxes'"),
    ],
)
def test_outputs_of_another_shape_or_number_are_named(changes: dict[str, Any], found: str) -> None:
    with pytest.raises(AgentError, match=found) as raised:
        check_outputs(outputs(**changes), EXPECTED)
    assert raised.value.code == "probation.output"


class Engine:
    """A classifier of two classes with these scores."""

    def __init__(self, *scores: float) -> None:
        self.inputs = [TensorSpec("images", FLOAT, (1, 3, 8, 8))]
        self.outputs = [TensorSpec("classes", FLOAT, (1, 2))]
        self._scores = np.array([scores], np.float32)

    def infer(self, _batch: Any) -> dict[str, Any]:
        return {"classes": self._scores}

    def close(self) -> None:
        """Nothing to free."""


def test_a_prediction_is_made_of_sound_outputs_only() -> None:
    spec = validate(ModelSpec, {"path": "m.onnx", "task": "classify"}, "test")
    sound = Engine(0.0, 5.0)
    task = CheckedVisionTask(spec, sound.inputs, sound.outputs, frozenset)
    image = np.zeros((8, 8, 3), np.uint8)
    prediction, _ = task.infer(sound, image)
    assert isinstance(prediction, Classification)
    assert prediction.class_id == 1
    for wrong in (Engine(0.0, float("nan")), Engine(float("-inf"), 5.0), Engine(0.0, 5.0, 1.0)):
        with pytest.raises(AgentError, match=r"probation\.output"):
            task.infer(wrong, image)


@pytest.mark.parametrize(("before", "accepted"), [(float("-inf"), True), (0.0, False)])
def test_an_output_that_the_previous_engine_does_not_answer_finitely_is_accepted(before: float, accepted: bool) -> None:
    """Its answer may come after the candidate's."""
    spec = validate(ModelSpec, {"path": "m.onnx", "task": "classify"}, "test")
    serving, candidate, image = Engine(before, 5.0), Engine(float("-inf"), 4.0), np.zeros((8, 8, 3), np.uint8)
    witness = NonFiniteRecorder(spec, serving.inputs, serving.outputs)
    witness.infer(Engine(0.0, 1.0), image)
    witness.watch()
    asked, results = threading.Event(), list[object]()

    def not_finite() -> frozenset[str]:
        asked.set()
        return witness.not_finite()

    def try_out() -> None:
        try:
            task = CheckedVisionTask(spec, serving.inputs, serving.outputs, not_finite)
            results.append(task.infer(candidate, image)[0])
        except AgentError as error:
            results.append(error.code)

    thread = threading.Thread(target=try_out, daemon=True)
    thread.start()
    assert asked.wait(20.0)
    witness.infer(serving, image)
    thread.join(20.0)
    (found,) = results
    assert isinstance(found, Classification) if accepted else found == "probation.output"


def test_every_error_has_a_code_of_probation_and_others_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    hang = AgentError("probation.hang", "a", "b", "c")
    assert as_failure(hang) is hang
    assert not caplog.records
    failed = EngineError("engine.failed", "no memory", "some", "more")
    other = as_failure(failed)
    assert [record.exc_info and record.exc_info[1] for record in caplog.records] == [failed]
    assert other.code == "probation.error"
    assert "no memory" in str(other)
