"""Open the task of a model spec."""

from __future__ import annotations

from typing import Any

from agent.vision.labels import LabelKind
from agent.vision.registry import task_class
from agent.vision.spec import ModelSpec
from agent.vision.tasks.task import ModelTask


def open_task(spec: ModelSpec) -> ModelTask:
    """Return the task of a model.

    >>> from agent.vision.spec import ModelSpec
    >>> sorted(open_task(ModelSpec.model_validate({"path": "m.onnx", "task": "classify"})).policy_keys)
    ['classes', 'score_threshold']
    """
    found: type[ModelTask] = task_class(spec.task)
    return found(spec)


def label_kind(task: str) -> LabelKind[Any, Any]:
    """Return what a label is in a task that has labels."""
    found: LabelKind[Any, Any] | None = task_class(task).labels
    if found is None:
        raise ValueError(f"labels of task {task}, which has none")
    return found
