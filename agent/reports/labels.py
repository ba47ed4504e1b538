"""Show what labels of drawn frames come to: accuracy by camera, regime and class, with its intervals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from agent.common.errors import AgentError
from agent.common.html.pages import Section, Table
from agent.labelling.accuracy import MeasuredAccuracy, Scores, measured_accuracy
from agent.labelling.store import LabelStore
from calibrate.statistics.evidence import Interval

_SCORES = (("frames", False), ("labels", True), ("served", True), ("float", True), ("what INT8 loses", True))
_CLASSES = (
    ("class", False), ("precision", True), ("recall", True), ("precision of float", True), ("recall of float", True),
)  # fmt: skip


def label_sections(state_dir: Path, model: str, task: str) -> Iterator[Section]:
    """Yield what is known of this model by labels; nothing without any. model, task: as LabelStore has them."""
    store = LabelStore(state_dir, model, task)
    if not store.exists:
        return
    try:
        names = store.class_names()
        if names is None:
            return
        frames = store.frames()
        measured = measured_accuracy(frames, names, store.counted())
    except AgentError as error:
        yield Section("Accuracy by labels", [f"It is not known: {error}"])
        return
    if measured is None:
        waiting = sum(frame.is_waiting for frame in frames)
        yield Section("Accuracy by labels", [f"{waiting} drawn frames wait for their labels: run 'tared label'."])
        return
    tables = list(_tables(measured, store.kind.accuracy))
    yield Section("Accuracy by labels", list(_words(measured)), tables=tables)


def _words(measured: MeasuredAccuracy) -> Iterator[str]:
    yield (
        f"{measured.labels} labelled frames count, {measured.waiting} wait, {measured.skipped} were skipped. "
        "Each interval holds with 95 % confidence at all times at once."
    )
    if measured.suggested:
        yield f"{measured.suggested} labels began as the float model's answer, and follow it."
    if measured.doubt:
        yield f"These labels are in doubt: {measured.doubt}."


def _tables(measured: MeasuredAccuracy, accuracy: str) -> Iterator[Table]:
    """Yield the scores, by what the accuracy of this task is in words, and those of its classes."""
    groups: Sequence[tuple[str, Scores]] = [
        ("all", measured.overall),
        *((f"camera {name}", each) for name, each in measured.cameras.items()),
        *((f"engine {name}", each) for name, each in measured.regimes.items()),
    ]
    rows = [
        (name, (str(each.accuracy.n), each.accuracy.n), *map(_cell, (each.accuracy, each.reference, each.int8_loss)))
        for name, each in groups
    ]
    yield Table(_SCORES, rows, f"Accuracy: {accuracy}")
    by_class = [
        (name, *map(_cell, (each.precision, each.recall, each.reference_precision, each.reference_recall)))
        for name, each in measured.classes.items()
    ]
    yield Table(_CLASSES, by_class, "By class", filters=len(by_class) > 10)


def _cell(interval: Interval) -> tuple[str, float]:
    return f"{interval.estimate:.3f} ({interval.low:.3f} to {interval.high:.3f})", interval.estimate
