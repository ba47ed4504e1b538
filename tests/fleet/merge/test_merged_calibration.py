"""One calibration for a group: bit-equal to one machine's, with provenance, and a reason for each who is left out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from merge_bench import FACTS, FRAMES, OBSERVED, TENSORS, counted, frames_of, upload

from agent.common.errors import AgentError
from agent.contract.histograms import read_facts, read_upload
from calibrate.histogram import AbsHistogram
from fleet.merge.calibration import bundle, merge_calibration


@pytest.fixture
def uploads(tmp_path: Path) -> dict[str, Path]:
    return {f"b{seed}": upload(tmp_path, f"b{seed}", counted(frames_of(seed))) for seed in range(5)}


def test_outliers_strangers_and_the_broken_are_left_out_with_a_reason(uploads: dict[str, Path], tmp_path: Path) -> None:
    only = merge_calibration(dict(uploads), "entropy")
    uploads["glare"] = upload(tmp_path, "glare", counted(frames_of(9, 30.0)))
    uploads["other"] = upload(tmp_path, "other", counted(frames_of(9)), model="cd" * 32)
    uploads["plan"] = upload(tmp_path, "plan", counted(frames_of(9)), observed="1" * 16)
    uploads["input"] = upload(tmp_path, "input", counted(frames_of(9)), preprocessing={"color": "rgb"})
    heavy = {name: AbsHistogram(h.counts << 20, h.range_exp, h.amax, 0, 0) for name, h in counted(frames_of(9)).items()}
    uploads["heavy"] = upload(tmp_path, "heavy", heavy)
    broken = frames_of(9)
    broken["head"][3] = np.nan
    uploads["broken"] = upload(tmp_path, "broken", counted(broken))
    (tmp_path / "garbage.upload").write_bytes(b"garbage")
    uploads["garbage"] = tmp_path / "garbage.upload"
    uploads["gone"] = tmp_path / "gone.upload"
    merged = merge_calibration(uploads, "entropy")
    expected = {
        "glare": "would cost",
        "other": "another model",
        "plan": "another model",
        "input": "another model",
        "heavy": "no other board would count",
        "broken": "'head' with 1",
        "garbage": "histograms.unreadable",
        "gone": "No such file",
    }
    assert merged.excluded.keys() == expected.keys()
    for device, words in expected.items():
        assert words in merged.excluded[device]
    assert merged.calibration.id == only.calibration.id, "as if they had not been there"
    assert dict(merged.calibration.histograms) == dict(only.calibration.histograms)
    assert merged.calibration.merged["excluded"] == merged.excluded


def test_a_merge_of_no_board_is_an_error(tmp_path: Path) -> None:
    for uploads in ({}, {"gone": tmp_path / "gone"}):
        with pytest.raises(AgentError, match=r"merge\.empty"):
            merge_calibration(uploads, "max")


def test_a_merge_of_boards_that_each_count_too_much_is_an_error(tmp_path: Path) -> None:
    uploads = {}
    for seed, tensor in enumerate(TENSORS):
        seen = counted(frames_of(seed))
        much = AbsHistogram(seen[tensor].counts << 10, seen[tensor].range_exp, seen[tensor].amax, 0, 0)
        uploads[tensor] = upload(tmp_path, f"b{seed}", {**seen, tensor: much})
    with pytest.raises(AgentError, match="no other board would count"):
        merge_calibration(uploads, "max")


def test_boards_get_the_histograms_and_not_the_names_of_each_other(uploads: dict[str, Path]) -> None:
    calibration = merge_calibration(uploads, "max", "fleet").calibration
    content = bundle(calibration)
    facts = read_facts(content)
    assert dict(read_upload(content)) == dict(calibration.histograms)
    assert facts.merged == {"boards": 5, "excluded": 0, "calibration": calibration.id}
    assert (facts.model, facts.observed, facts.frames) == (FACTS.model, OBSERVED, 5 * FRAMES)
    assert b"b3" not in facts.to_json()
