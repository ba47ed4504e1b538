"""Labels beside a recording, the stated accuracy of the reference, and both in the summary."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from agent.common.errors import ConfigError, DatasetError
from agent.common.schema import validate
from agent.control.summary import RunSummary
from agent.daemon.review import read_labels
from agent.daemon.summary_table import print_summary
from agent.monitoring.estimates import Estimate
from agent.vision.spec import ModelSpec
from calibrate.statistics.evidence import Interval


def spec(**changes: Any) -> ModelSpec:
    return validate(ModelSpec, {"path": "x.onnx", "task": "classify", **changes}, "test")


CLASSES = spec(labels=("cat", "dog"))


def write(folder: Path, *lines: str) -> Path:
    path = folder / "labels.jsonl"
    path.write_text("\n".join(lines))
    return path


def test_classes_are_read_by_id_and_by_name(tmp_path: Path) -> None:
    path = write(tmp_path, '{"frame": 4, "labels": "dog"}', '{"frame": 0, "labels": 0}')
    assert read_labels(path, CLASSES) == {4: 1, 0: 0}
    assert read_labels(write(tmp_path, '{"frame": 1, "labels": 700}'), spec()) == {1: 700}


@pytest.mark.parametrize("label", ['"fox"', "2", "-1", "1.0", "null", "{}"])
def test_a_class_that_is_none_is_refused_with_its_line(tmp_path: Path, label: str) -> None:
    path = write(tmp_path, '{"frame": 0, "labels": 1}', f'{{"frame": 1, "labels": {label}}}')
    with pytest.raises(DatasetError, match=r"labels\.unreadable: .*line 2: ") as caught:
        read_labels(path, CLASSES)
    assert "a class id or name" in caught.value.expected


def test_labels_of_the_other_task_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"labels\.task"):
        read_labels(write(tmp_path, '{"frame": 0, "labels": []}'), CLASSES)
    with pytest.raises(DatasetError, match=r"labels\.task"):
        read_labels(write(tmp_path, '{"frame": 0, "labels": 3}'), spec(task="detect", decoder="yolox"))


# ---- the owner's word


def test_a_classifiers_reference_accuracy_is_the_owners_and_no_part_of_what_engines_are_known_by() -> None:
    assert spec().reference_accuracy is None
    stated = spec(reference_accuracy=0.917)
    assert stated.reference_accuracy == 0.917
    assert stated.model_dump(mode="json") == spec().model_dump(mode="json")


@pytest.mark.parametrize(
    "changes",
    [
        {"reference_accuracy": 91.7},
        {"reference_accuracy": -0.1},
        {"task": "raw", "reference_accuracy": 0.9},
        {"task": "detect", "decoder": "yolox", "reference_accuracy": 0.9},
    ],
)
def test_a_reference_accuracy_that_bounds_nothing_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"reference_accuracy: expected "):
        spec(**changes)


# ---- reports


def test_the_summary_has_live_accuracy_where_it_was_measured() -> None:
    summary = RunSummary("store/artefacts/a")
    assert "live_accuracy" not in summary.as_dict()
    summary.live_accuracy = Estimate(Interval(0.91, 0.85, 0.96, 250), empty=7, since=12.0)
    live = {"estimate": 0.91, "low": 0.85, "high": 0.96, "n": 250, "empty": 7}
    assert summary.as_dict()["live_accuracy"] == live
    assert summary.as_dict()["accuracy"] == {}
    text = io.StringIO()
    print_summary(summary, Console(file=text, width=120))
    assert "accuracy, live" in text.getvalue()
    assert "0.910 since 12 s, 95 % interval [0.850, 0.960] from 250 frames" in text.getvalue()
