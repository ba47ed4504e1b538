"""The benchmark of harm: what it plants, and what it reads off the losses."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import numpy_helper
from zoo import residual_net

from benchmarks.harm import Harm, Harmed, with_noise
from benchmarks.task_models import _crop


def harmed(*states: tuple[float, float]) -> Harmed:
    """A model in these states: loss, and points that are lost."""
    return Harmed("model", "segment", [Harm("weights", 0.1, drop, loss) for loss, drop in states])


def test_the_loss_of_a_point_is_between_the_states_around_it() -> None:
    assert harmed((0.1, 0.0), (0.2, 0.5), (0.4, 1.5), (0.9, 30.0)).loss_of_a_point == pytest.approx(0.3)
    assert harmed((0.1, 0.0), (0.3, 0.0), (0.2, 2.0), (0.5, 3.0)).loss_of_a_point == pytest.approx(0.2), (
        "chance is evened out"
    )
    assert harmed((0.1, -0.3), (0.2, 0.4)).loss_of_a_point is None


def test_a_fall_of_five_points_at_a_high_fidelity_is_found() -> None:
    found = harmed((0.01, 6.0), (0.3, 9.0), (0.001, 4.9))
    assert found.highest_fidelity == pytest.approx(0.99)
    assert found.correlation == pytest.approx(1.0)
    assert harmed((0.3, 4.0)).highest_fidelity is None


@pytest.mark.parametrize("share", [0.01, 0.3])
def test_noise_is_the_share_of_each_layers_weights(share: float) -> None:
    graph = residual_net()
    noisy = {each.name: numpy_helper.to_array(each) for each in with_noise(graph, share).graph.initializer}
    for each in graph.graph.initializer:
        clean, found = numpy_helper.to_array(each), noisy[each.name]
        if clean.ndim < 2:
            np.testing.assert_array_equal(found, clean)
        else:
            noise = np.sqrt(np.square(found - clean).mean() / np.square(clean).mean())
            assert noise == pytest.approx(share, rel=0.5)


def test_a_crop_is_square_and_its_places_are_those_of_the_photo() -> None:
    photo = np.zeros((40, 100, 3), np.uint8)
    photo[30, 90] = 255
    square, moved = _crop(photo, np.array([0.9, 0.75, 0.1, 0.4]))
    assert square.shape == (20, 20, 3)
    (row, column) = np.argwhere(square[..., 0])[0]
    assert (moved(np.array([90.5 / 100, 30.5 / 40])) * 20).tolist() == [column + 0.5, row + 0.5]
