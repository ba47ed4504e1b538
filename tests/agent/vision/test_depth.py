"""Maps of depth: compared by ratios, relative ones but for a scale and a shift, and scored on 16-bit PNGs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from agent.common.errors import ConfigError, DatasetError
from agent.vision.preprocess import Geometry
from agent.vision.spec import ModelSpec
from agent.vision.tasks.depth import DepthMap
from agent.vision.tasks.opening import open_task
from engines.interface import TensorSpec

SIZE = (24, 32)
STREET = np.repeat(np.linspace(2.0, 50.0, 24, dtype=np.float32)[:, np.newaxis], 32, axis=1)


def spec(**changes: Any) -> ModelSpec:
    return ModelSpec.model_validate({"path": "m.onnx", "task": "depth", **changes})


def decoded(output: np.ndarray, **changes: Any) -> DepthMap:
    tensor = TensorSpec("depth", output.dtype, (1, *output.shape))
    answer = open_task(spec(**changes)).open_decoder(SIZE, [tensor])({"depth": output[np.newaxis]})
    assert isinstance(answer, DepthMap)
    assert not np.shares_memory(answer.values, output)
    return answer


def agreement(output: np.ndarray, reference: np.ndarray, **changes: Any) -> float:
    value = decoded(output, **changes).fidelity(decoded(reference, **changes))
    assert value is not None
    return value


def test_each_form_of_output_gives_the_same_map() -> None:
    for output in (STREET, STREET[np.newaxis], STREET[..., np.newaxis]):
        np.testing.assert_array_equal(decoded(output).values, STREET)
    with pytest.raises(ConfigError, match=r"decoder\.shape"):
        decoded(np.zeros((3, *SIZE), np.float32))


def test_damage_costs_the_share_of_pixels_that_it_is_of() -> None:
    for rows in (0, 1, 6, 24):
        damaged = STREET.copy()
        damaged[:rows] *= 1.06
        assert decoded(damaged).fidelity(decoded(STREET)) == pytest.approx(1.0 - rows / 24)
        assert decoded(damaged, max_ratio=1.1).fidelity(decoded(STREET)) == 1.0


def test_no_number_and_no_distance_agree_with_nothing() -> None:
    damaged = STREET.copy()
    damaged[0], damaged[1], damaged[2] = np.nan, np.inf, -1.0
    assert decoded(damaged).fidelity(decoded(STREET)) == pytest.approx(21 / 24)
    assert decoded(STREET).fidelity(decoded(damaged)) == pytest.approx(21 / 24)
    assert decoded(damaged).fidelity(decoded(damaged)) == 1.0
    nowhere = decoded(np.full_like(STREET, np.nan))
    assert nowhere.fidelity(nowhere) is None, "it proves nothing"


def test_a_relative_map_may_have_another_scale_and_shift() -> None:
    moved = 0.25 * STREET + 3.0
    assert agreement(moved, STREET) < 0.2
    assert decoded(moved, depth="relative").fidelity(decoded(STREET, depth="relative")) == 1.0
    flat = decoded(np.full_like(STREET, 7.0), depth="relative")
    assert flat.fidelity(decoded(STREET, depth="relative")) == 0.0
    assert decoded(STREET, depth="relative").fidelity(flat) is None, "any map is a flat one by some scale"


def test_a_relative_map_is_not_right_upside_down_and_its_shift_changes_nothing() -> None:
    noise = np.random.default_rng(0).normal(size=STREET.shape).astype(np.float32)
    turned, damaged, chance = -STREET, STREET + noise, noise
    for shift in (0.0, 10.0, 1000.0):
        reference = STREET + np.float32(shift)
        assert agreement(turned, reference, depth="relative") < 0.1
        assert agreement(chance, reference, depth="relative") < 0.1
        assert agreement(damaged, reference, depth="relative") == pytest.approx(0.98, abs=0.01)


def test_a_disparity_is_scored_in_its_own_scale_and_an_inverted_map_is_wrong() -> None:
    def delta1(output: np.ndarray, kind: str) -> float:
        return open_task(spec(depth=kind)).evaluation([(decoded(output, depth=kind), STREET)]).scores["delta1"]

    assert delta1(3.0 / STREET + 7.0, "disparity") == 1.0
    assert delta1(STREET, "disparity") < 0.5
    assert delta1(2.0 * STREET + 5.0, "relative") == 1.0
    assert delta1(-STREET, "relative") < 0.5


def test_in_the_frame_the_padding_is_left_out_and_the_grid_has_medians() -> None:
    padded = np.full(SIZE, 99.0, np.float32)
    padded[4:20] = STREET[:16]
    found = decoded(padded).in_frame(Geometry(64, 32, 0.5, 0.5, 0, 4))
    np.testing.assert_array_equal(found.values, STREET[:16])
    rows = found.as_dict(spec())["depth"]
    assert (len(rows), len(rows[0])) == (12, 16)
    assert rows[0][0] == pytest.approx(np.median(STREET[:2]), abs=1e-3)
    image = np.full((48, 64, 3), 128, np.uint8)
    assert (found.drawn_into(image, None, spec()) != 128).any()


def write(folder: Path, name: str, picture: np.ndarray) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    cv2.imwrite(str(folder / name), picture)


@pytest.mark.parametrize("names", [("images/a.png", "depth/a.png"), ("a.png", "depth/a.png")])
def test_labels_are_millimetres_and_scores_those_of_the_field(names: tuple[str, str], tmp_path: Path) -> None:
    write(tmp_path, names[0], np.zeros((*SIZE, 3), np.uint8))
    levels = np.rint(STREET * 1000).astype(np.uint16)
    levels[:2] = 0
    write(tmp_path, names[1], levels)
    task = open_task(spec())
    ((_, truth),) = task.labelled_images(tmp_path)
    assert np.isnan(truth[:2]).all()
    wrong = STREET.copy()
    wrong[2:13] *= 1.3
    scores = task.evaluation([(decoded(wrong), truth)]).scores
    assert scores["delta1"] == pytest.approx(0.5)
    assert scores["abs_rel"] == pytest.approx(0.15, abs=1e-3)


def test_labels_of_another_kind_are_refused(tmp_path: Path) -> None:
    task = open_task(spec())
    write(tmp_path, "a.png", np.zeros((*SIZE, 3), np.uint8))
    with pytest.raises(DatasetError, match=r"dataset\.label: no distances"):
        task.labelled_images(tmp_path)
    write(tmp_path, "depth/a.png", np.zeros(SIZE, np.uint8))
    with pytest.raises(DatasetError, match="one channel of 16 bits, 32 x 24"):
        list(task.labelled_images(tmp_path))
    with pytest.raises(DatasetError, match=r"dataset\.classes"):
        task.labelled_images(tmp_path, ("car",))


def test_its_keys_are_for_no_other_task_and_do_not_change_what_others_are_known_by() -> None:
    with pytest.raises(ValueError, match="null unless task is 'depth'"):
        ModelSpec.model_validate({"path": "m.onnx", "task": "raw", "max_ratio": 1.2})
    assert {"depth", "max_ratio"}.isdisjoint(spec(task="raw").model_dump())
    assert spec(depth="relative").model_dump()["depth"] == "relative"
