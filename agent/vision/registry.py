"""Find the class of a task by its name, when a model spec names it.

The task NAME of tared's own is the class Name in `agent/vision/tasks/NAME.py`. Installed packages name theirs in the
entry point group `tared.tasks` (PyPA, entry points specification). A module is imported when its task is asked for, so
that this one imports none: a task imports OpenCV, and model specs.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

TASK_GROUP = "tared.tasks"
TASKS = ("classify", "detect", "instance", "pose", "obb", "segment", "depth", "raw")


def task_names() -> list[str]:
    """Return the names of all tasks, those of installed packages last."""
    return [*TASKS, *sorted(entry_points(group=TASK_GROUP).names - set(TASKS))]


@cache
def task_class(name: str) -> type[Any]:
    """Return the class of a task, a subclass of `agent.vision.tasks.task.ModelTask`.

    Raises ValueError for a name that no task has, or several have, and for a task that cannot be imported.
    """
    if name in TASKS:
        own: type[Any] = getattr(import_module(f"agent.vision.tasks.{name}"), name.capitalize())
        return own
    entries = {entry.value: entry for entry in entry_points(group=TASK_GROUP, name=name)}
    if len(entries) != 1:
        known = ", ".join(task_names())
        raise ValueError(f"one of {known}" if not entries else f"one package for it; {', '.join(entries)} have it")
    (entry,) = entries.values()
    try:
        found: type[Any] = entry.load()
        _ = found.decoders, found.keys  # as every subclass of ModelTask has them
    except Exception as error:  # the package's module may raise anything while it is imported
        raise ValueError(f"a task that can be imported; {entry.value}: {type(error).__name__}: {error}") from error
    return found


def accepted_loss(task: str, configured: float | None) -> float:
    """Return the loss that is accepted of an engine: as configured, else the task's own. Raises as `task_class`."""
    return float(task_class(task).max_loss) if configured is None else configured
