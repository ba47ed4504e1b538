"""Sources of --frames: a video, a folder, a zip, all of it or fewer, at the size of the model's profile."""

from __future__ import annotations

import numpy as np
import pytest
from bench import Bench, picture

from engines.calibration import load_calibration


@pytest.mark.parametrize(("count", "taken"), [(3, (10, 50, 80)), (99, range(10, 110, 10))])
def test_fewer_frames_than_there_are_come_from_all_of_the_source(bench: Bench, count: int, taken: range) -> None:
    output = bench / "of.json"
    pictures = bench.images("pictures", *(picture(value) for value in range(10, 110, 10)))
    printed = bench.json("calibrate", bench / "model.yaml", "--frames", pictures, "--count", count, "-o", output)
    assert printed["frames"] == len(taken)
    histogram = load_calibration(output).histograms["image"]
    seen = {round((bin_ + 0.5) * histogram.bin_width * 255) for bin_ in np.flatnonzero(histogram.counts)}
    assert seen == set(taken)
