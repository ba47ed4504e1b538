"""calibration.json and its .npz: read back exactly as written, or refused."""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from calibrate.errors import CalibrationError
from calibrate.histogram import AbsHistogram, abs_histogram, empty_histogram
from engines.calibration import (
    Calibration,
    calibrate_histograms,
    load_calibration,
    load_histograms,
    save_calibration,
    save_histograms,
)

METHODS = ("entropy", "mse", "max", "percentile:99.9", "global:6.0")


def equal(a: Calibration, b: Calibration) -> bool:
    heads = [(c.model_sha256, c.method, c.frames, c.source, dict(c.amax), c.scales, c.id) for c in (a, b)]
    return heads[0] == heads[1] and list(a.histograms) == list(b.histograms) and a.histograms == b.histograms


def calibration(method: str = "entropy", tensors: int = 3, seed: int = 0) -> Calibration:
    rng = np.random.default_rng(seed)
    histograms = {
        f"layer{i}.out": abs_histogram(rng.normal(0.0, 10.0**-i, 5000).astype(np.float32)) for i in range(tensors)
    }
    return calibrate_histograms(histograms, (), model_sha256="ab" * 32, method=method, frames=5, source="night.mp4")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A calibration that is there already."""
    save_calibration(calibration(), tmp_path / "calibration.json")
    return tmp_path / "calibration.json"


def refused(path: Path) -> str:
    with pytest.raises(CalibrationError) as caught:
        load_calibration(path)
    assert caught.value.code == "calibration.unreadable"
    return caught.value.found


# ---- round trips

names = st.text(min_size=1, max_size=12).filter(lambda name: not name.endswith("\0") and name.isprintable())
values = hnp.arrays(np.float32, st.integers(0, 60), elements=st.floats(width=32, allow_nan=False, allow_infinity=False))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20)
@given(st.dictionaries(names, values, min_size=1, max_size=4), st.sampled_from(METHODS), st.integers(1, 2**40), names)
def test_a_saved_calibration_is_loaded_bit_by_bit(
    tmp_path: Path, tensors: dict[str, np.ndarray], method: str, frames: int, source: str
) -> None:
    histograms = {name: abs_histogram(np.clip(x, -1e6, 1e6)) for name, x in tensors.items()}
    written = calibrate_histograms(histograms, (), model_sha256="f" * 64, method=method, frames=frames, source=source)
    save_calibration(written, tmp_path / "c.json")
    assert equal(load_calibration(tmp_path / "c.json"), written)


def test_extreme_counts_and_ranges_come_back(tmp_path: Path) -> None:
    counts, first = np.zeros(1 << 12, np.int64), np.zeros(1 << 12, np.int64)
    counts[[0, -1]] = 2**62, 1
    first[0] = 2
    histograms = {
        "huge": AbsHistogram(counts, 128, float(np.finfo(np.float32).max), 2**62, 2**40),
        "tiny": AbsHistogram(first, -100, float(np.finfo(np.float32).smallest_subnormal), 1, 0),
        "nothing": empty_histogram(),
    }
    save_histograms(histograms, tmp_path / "h.npz", {})
    assert load_histograms(tmp_path / "h.npz") == (histograms, {})


EXTREMES = {
    "conv": np.array([[-1.0, 0.0, 2.5], [1.0, 1e-30, 3.0]], np.float32),
    "gemm": np.array([[-np.inf], [7.0]], np.float32),
}


def test_extremes_are_kept_beside_the_histograms(path: Path) -> None:
    written = replace(calibration(), extremes=EXTREMES)
    save_calibration(written, path)
    read = load_calibration(path)
    assert list(read.extremes) == list(EXTREMES)
    for layer, seen in EXTREMES.items():
        np.testing.assert_array_equal(read.extremes[layer], seen)
    moved = {**EXTREMES, "gemm": np.array([[-8.0], [7.0]], np.float32)}
    assert read.id == written.id
    assert len({calibration().id, read.id, replace(written, extremes=moved).id}) == 3, "scales follow from them"


def test_ids_and_seals_are_those_of_0_2_0(path: Path) -> None:
    """Ids as its commit 2fc6093f gives them: on another one a board would build its engine anew."""
    seen = {"conv.out": abs_histogram(np.array([0.5, -12.7, 3.0], np.float32))}
    fixed: dict[str, Any] = {"model_sha256": "ab" * 32, "method": "max", "frames": 5, "source": "night.mp4"}
    written = calibrate_histograms(seen, (), preprocessing={"size": [3, 2]}, **fixed)
    assert written.id == "7176a7acc00424b4"
    assert replace(written, extremes={"conv": EXTREMES["conv"]}).id == "a302f36359421636"
    save_calibration(written, path)
    document = json.loads(path.read_text())
    recorded = document.pop("seal")
    sealed = json.dumps(document, sort_keys=True).encode() + path.with_suffix(".npz").read_bytes()
    assert recorded == hashlib.sha256(sealed).hexdigest()


@pytest.mark.parametrize(
    "changes",
    [
        {"channels": np.array([3, 2])},
        {"channels": np.array([4, 0])},
        {"layers": np.array(["conv"])},
        {"extremes": np.zeros((2, 4))},
        {"extremes": np.array([[1.0] * 4, [0.0] * 4], np.float32)},
    ],
)
def test_extremes_that_do_not_fit_are_refused(tmp_path: Path, changes: dict[str, np.ndarray]) -> None:
    path = tmp_path / "h.npz"
    save_histograms(calibration().histograms, path, EXTREMES)
    assert list(load_histograms(path)[1]) == list(EXTREMES)
    with np.load(path) as content:
        arrays = {name: content[name] for name in content.files}
    np.savez(path, **{**arrays, **changes})
    with pytest.raises(CalibrationError, match=r"histogram\.damaged"):
        load_histograms(path)


def test_damaged_histogram_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "h.npz"
    save_histograms({"x": abs_histogram(np.linspace(0, 3, 999, dtype=np.float32))}, path, {})
    whole = path.read_bytes()
    for content in (b"", b"PK", bytes(1000), whole[:10], whole[: len(whole) // 2], whole[:-1]):
        path.write_bytes(content)
        with pytest.raises(CalibrationError, match=r"histogram\.damaged"):
            load_histograms(path)
    with np.load(io.BytesIO(whole)) as file:
        arrays = dict(file)
    arrays["counts"] = arrays["counts"] - 1
    np.savez(path, **arrays)
    with pytest.raises(CalibrationError, match=r"histogram\.damaged"):
        load_histograms(path)


def test_a_person_can_read_what_was_chosen_and_from_what(path: Path) -> None:
    text = path.read_text()
    document = json.loads(text)
    assert (document["method"], document["frames"], document["source"]) == ("entropy", 5, "night.mp4")
    assert document["model_sha256"] == "ab" * 32
    for entry in document["tensors"].values():
        assert entry["scale"] == pytest.approx(entry["amax"] / 127, rel=1e-6)
    assert text.count("\n") > 15


def test_a_file_laid_out_anew_is_still_whole(path: Path) -> None:
    path.write_text(json.dumps(json.loads(path.read_text())))
    assert equal(load_calibration(path), calibration())


def test_tensors_that_share_a_scale_get_one_amax_from_all_their_values() -> None:
    x = np.random.default_rng(0).normal(size=4000).astype(np.float32)
    parts = {"a": abs_histogram(x[:1000]), "b": abs_histogram(x[1000:] * np.float32(3))}
    joined = calibrate_histograms(parts, (("a", "b"),), model_sha256="", method="max", frames=1, source="")
    assert joined.amax["a"] == joined.amax["b"] == max(h.amax for h in parts.values())


# ---- refusals


@pytest.mark.parametrize("suffix", [".json", ".npz"])
def test_any_changed_byte_is_refused_or_changes_nothing(path: Path, suffix: str) -> None:
    x = np.arange(-3, 4, dtype=np.float32) / 3
    written = calibrate_histograms({"x": abs_histogram(x)}, (), model_sha256="ab", method="max", frames=1, source="s")
    save_calibration(written, path)
    file = path.with_suffix(suffix)
    whole = file.read_bytes()
    unchanged = 0
    for position in range(len(whole)):
        file.write_bytes(whole[:position] + bytes([whole[position] ^ 0x01]) + whole[position + 1 :])
        try:
            loaded = load_calibration(path)
        except CalibrationError:
            continue
        assert equal(loaded, written)
        unchanged += 1
    assert unchanged <= (6 if suffix == ".json" else 0)  # the 17th digit of a float may mean the same float


def test_a_missing_file_is_named(path: Path) -> None:
    path.with_suffix(".npz").unlink()
    assert refused(path) == f"{path.with_suffix('.npz')}: No such file or directory"
    path.unlink()
    assert refused(path) == f"{path}: No such file or directory"


def test_two_files_of_different_calibrations_are_refused(path: Path, tmp_path: Path) -> None:
    save_calibration(calibration(seed=1), tmp_path / "other.json")
    os.replace(tmp_path / "other.npz", path.with_suffix(".npz"))
    assert "not of one calibration" in refused(path)


@pytest.mark.parametrize(
    "text", ["[]", "7", '"text"', "null", "{}", '{"schema": 1}', '{"schema": "1"}', "[" * 500, "\xff", "NaN"]
)
def test_json_that_is_no_calibration_is_refused(path: Path, text: str) -> None:
    path.write_text(text, encoding="latin-1")
    refused(path)


def test_a_newer_schema_is_not_guessed_at(path: Path) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema": 2}))
    assert "schema 2, this tared reads 1" in refused(path)


def test_a_calibration_is_not_made_of_nothing() -> None:
    for frames, histograms, code in (
        (0, {"a": empty_histogram()}, "calibration.empty"),
        (3, {}, "calibration.nothing"),
    ):
        with pytest.raises(CalibrationError) as caught:
            calibrate_histograms(histograms, (), model_sha256="", method="max", frames=frames, source="")
        assert caught.value.code == code


# ---- writing


def test_folders_are_made_and_no_other_file_is(tmp_path: Path) -> None:
    save_calibration(calibration(), tmp_path / "a" / "b" / "night.json")
    assert sorted(path.name for path in (tmp_path / "a" / "b").iterdir()) == ["night.json", "night.npz"]


@pytest.mark.parametrize("name", ["night", "night.npz", "night.v2"])
def test_a_name_that_would_collide_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(CalibrationError, match=r"calibration\.write: .*does not end in \.json"):
        save_calibration(calibration(), tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def refuse_after(count: int) -> Callable[[int], None]:
    left = iter(range(count))

    def fsync(_descriptor: int) -> None:
        if next(left, None) is None:
            raise OSError(28, os.strerror(28))

    return fsync


@pytest.mark.parametrize("files_on_disk", [0, 1])
def test_a_disk_that_fills_up_leaves_both_old_files(
    path: Path, files_on_disk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", refuse_after(files_on_disk))
    with pytest.raises(CalibrationError, match=r"calibration\.write: .*No space left"):
        save_calibration(calibration(seed=1), path)
    monkeypatch.undo()
    assert equal(load_calibration(path), calibration())
    assert len(list(path.parent.iterdir())) == 2
