"""Name the tasks: which there are, in which module each lives, and which keys of a model spec are for it alone.

A model spec is validated with this, so that it imports no task of tared's own: that would load OpenCV. Installed
packages name theirs in the entry point group `tared.tasks` (PyPA, entry points specification).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any


@dataclass(frozen=True)
class TaskEntry:
    """What a model spec needs to know of a task.

    Args:
        home: Where its class is, as 'module:class'.
        decoders: Names of its decoders; empty: it takes none.
        keys: Keys of a spec that no other task has; none of a package's.
    """

    home: str
    decoders: tuple[str, ...] = ()
    keys: frozenset[str] = frozenset()


TASK_GROUP = "tared.tasks"

TASKS: Mapping[str, TaskEntry] = {
    "classify": TaskEntry("agent.vision.tasks.classify:Classify", keys=frozenset(("reference_accuracy",))),
    "detect": TaskEntry(
        "agent.vision.tasks.detect:Detect",
        # The names of `agent.vision.decoders.BUILTIN_DECODERS`.
        (
            "yolox",
            "yolov5",
            "yolov8",
            "end2end",
            "detr",
            "rtdetr",
            "ssd",
            "fastestdet",
            "nanodet",
            "nanodet-plus",
            "yunet",
            "torchvision",
        ),
        frozenset(("nms",)),
    ),
    "instance": TaskEntry("agent.vision.tasks.instance:Instance", ("yolov5", "yolov8", "end2end"), frozenset(("nms",))),
    "pose": TaskEntry(
        "agent.vision.tasks.pose:Pose",
        ("yolov8", "end2end", "heatmaps", "landmarks"),
        frozenset(("nms", "keypoints", "sigmas")),
    ),
    "obb": TaskEntry("agent.vision.tasks.obb:Obb", ("yolov8", "end2end", "dbnet"), frozenset(("nms",))),
    "segment": TaskEntry("agent.vision.tasks.segment:Segment"),
    "depth": TaskEntry("agent.vision.tasks.depth:Depth", keys=frozenset(("depth", "max_ratio"))),
    "raw": TaskEntry("agent.vision.tasks.raw:Raw"),
}


def task_names() -> list[str]:
    """Return the names of all tasks, those of installed packages last."""
    return [*TASKS, *sorted(entry_points(group=TASK_GROUP).names - TASKS.keys())]


@cache
def find_task(name: str) -> TaskEntry:
    """Return a task by its name.

    One of an installed package says by the attribute `decoders` of its class which ones the spec may name.

    Raises ValueError for a name that no task has, or several have, and for a task that cannot be imported.
    """
    if name in TASKS:
        return TASKS[name]
    entries = {entry.value: entry for entry in entry_points(group=TASK_GROUP, name=name)}
    if len(entries) != 1:
        known = ", ".join(task_names())
        raise ValueError(f"one of {known}" if not entries else f"one package for it; {', '.join(entries)} have it")
    (entry,) = entries.values()
    try:
        found = entry.load()
        return TaskEntry(entry.value, tuple(found.decoders))
    except Exception as error:  # the package's module may raise anything while it is imported
        raise ValueError(f"a task that can be imported; {entry.value}: {type(error).__name__}: {error}") from error


@cache
def task_class(name: str) -> Any:
    """Return the class of a task by its name. Raises as `find_task`."""
    return EntryPoint(name, find_task(name).home, TASK_GROUP).load()


def accepted_loss(task: str, configured: float | None) -> float:
    """Return the loss that is accepted of an engine: as configured, else the task's own. Raises as `find_task`."""
    return float(task_class(task).max_loss) if configured is None else configured
