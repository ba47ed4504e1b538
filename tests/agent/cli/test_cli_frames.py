"""Sources of --frames: a video, a folder, a zip, all of it or fewer, at the size of the model's profile."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from bench import CLIP_FRAMES, Bench, picture
from zoo import Net

from engines.calibration import load_calibration


@pytest.fixture
def pictures(bench: Bench) -> Path:
    return bench.images("pictures", *(picture(value) for value in range(10, 110, 10)))


@pytest.mark.parametrize(("count", "taken"), [(3, (10, 50, 80)), (99, range(10, 110, 10))])
def test_fewer_frames_than_there_are_come_from_all_of_the_source(
    bench: Bench, pictures: Path, count: int, taken: range
) -> None:
    output = bench / "of.json"
    printed = bench.json("calibrate", bench / "model.yaml", "--frames", pictures, "--count", count, "-o", output)
    assert printed["frames"] == len(taken)
    histogram = load_calibration(output).histograms["image"]
    seen = {round((bin_ + 0.5) * histogram.bin_width * 255) for bin_ in np.flatnonzero(histogram.counts)}
    assert seen == set(taken)


def test_an_open_sized_model_takes_its_size_from_the_profile(bench: Bench) -> None:
    net = Net(("batch", 3, "height", "width"))
    pooled = net.node("GlobalAveragePool", net.conv("image", 3, 5))
    shapes = {"min": [1, 3, 8, 8], "opt": [1, 3, 24, 16], "max": [4, 3, 32, 32]}
    spec = bench.spec("open", net.model(net.node("Flatten", pooled)), profiles=[{"image": shapes}])
    output = bench / "of.json"
    bench.json("calibrate", spec, "--frames", bench / "clip.avi", "-o", output)
    assert load_calibration(output).histograms["image"].total == CLIP_FRAMES * 3 * 24 * 16
