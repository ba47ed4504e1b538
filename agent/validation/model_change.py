"""Compare a new model with the engine that serves, on the same held-out frames: does it answer, and how differently?

A new model may answer otherwise, since that may be why it was made. But a model that answers nothing, or no numbers, is
mostly an accident of its export. So its outputs have to be finite, and a large change takes the owner's consent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from agent.common.errors import AgentError
from agent.validation.verdict import MIN_INFORMATIVE
from agent.vision.answer import Answer
from agent.vision.drawing import input_picture
from agent.vision.fidelity import fidelity
from agent.vision.spec import ModelSpec
from agent.vision.task import VisionTask
from engines.interface import Array, Engine

ANSWERS = "model.answers"  # error of a new model whose answers differ by more than is accepted


@dataclass(frozen=True)
class ModelChange:
    """Changes of the answers by a new model, on the frames that were held out.

    Args:
        frames: On which the new model or the engine in service sees something.
        agreement: Mean fidelity of the new model's answers to the answers of the engine in service, on those frames.
        answered: Frames on which the engine in service sees something.
        unanswered: Of `answered`, those on which the new model sees nothing.
    """

    frames: int
    agreement: float
    answered: int
    unanswered: int

    @property
    def text(self) -> str:
        """The change in words."""
        if not self.frames:
            return "nothing is seen on the held-out frames: the new model's answers were not compared"
        change = f"the new model's answers differ by {1.0 - self.agreement:.3f} on {self.frames} frames"
        if not self.unanswered:
            return change
        return f"{change}; it sees nothing on {self.unanswered} of {self.answered} on which the engine in service does"

    def check(self, max_loss: float) -> None:
        """Raise AgentError (`model.answers`) for a change above `max_loss`, if the frames suffice to say so."""
        if self.frames >= MIN_INFORMATIVE and 1.0 - self.agreement > max_loss:
            raise AgentError(
                ANSWERS,
                self.text,
                f"a change of at most recalibration.max_loss ({max_loss:g}), or the owner's consent",
                "if the change is intended: 'tared send DEVICE model file=MODEL.onnx accept=true'; a restart of the "
                "daemon serves the model's file as it is",
            )


def model_change(spec: ModelSpec, new: Engine, serving: Engine, held_out: Sequence[Array]) -> ModelChange:
    """Infer every held-out frame with both engines, and compare their answers.

    Args:
        spec: Of both models, which differ in their files alone.
        held_out: Network inputs (1, C, H, W) or (1, H, W, C) of the engine in service. A new model of another input
            size gets the pictures in them.

    Raises AgentError (`model.outputs`) for an output of the new model that is not finite, where one of that name is in
    the engine in service; ConfigError where the spec does not fit an engine.
    """
    ours, theirs = (VisionTask(spec, engine.inputs, engine.outputs) for engine in (serving, new))
    values, answered, unanswered = [], 0, 0
    for frame in held_out:
        before, usual = _answer(serving, ours, frame, spec)
        after, outputs = _answer(new, theirs, frame, spec)
        _check_finite(outputs, usual)
        compared = fidelity(after, before)
        if not compared.is_empty:
            values.append(compared.value)
        answered += not before.is_empty
        unanswered += after.is_empty and not before.is_empty
    return ModelChange(len(values), float(np.mean(values)) if values else 1.0, answered, unanswered)


def _answer(engine: Engine, task: VisionTask, held_out: Array, spec: ModelSpec) -> tuple[Answer, Mapping[str, Array]]:
    """Return an engine's prediction, in the pixels of the held-out input, and its outputs."""
    image = engine.inputs[0]
    if held_out.dtype == image.dtype and image.accepts(held_out.shape):
        outputs = engine.infer(held_out)
        return task.answer(outputs, held_out), outputs
    tensor, geometry = task.preprocess(input_picture(held_out, spec.input))
    outputs = engine.infer(tensor)
    return task.answer(outputs, tensor).in_frame(geometry), outputs


def _check_finite(outputs: Mapping[str, Array], usual: Mapping[str, Array]) -> None:
    """Raise AgentError (`model.outputs`) for outputs with NaN or infinity. usual: outputs that may have them have them.

    A mask of minus infinity, say, belongs to some models.
    """
    broken = [name for name, values in outputs.items() if not np.isfinite(values).all()]
    wrong = [name for name in broken if name not in usual or np.isfinite(usual[name]).all()]
    if wrong:
        found = f"NaN or infinite values in {', '.join(sorted(wrong))}"
        remedy = "export the model again; its weights, or its export, are damaged"
        raise AgentError("model.outputs", found, "finite outputs", remedy)
