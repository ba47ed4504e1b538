"""A real model calibrated in constant memory."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from lab import PERSON, Lab


@pytest.mark.trial
def test_memory_does_not_grow_with_the_number_of_frames(lab: Lab) -> None:
    peaks = {}
    for count in (64, 1024):
        output = lab.folder / "memory.json"
        command = ["calibrate", lab.spec("resnet20"), "--frames", lab.data / PERSON, "--count", count, "-o", output]
        done = subprocess.run(
            [sys.executable, "-m", "fleet.cli", *map(str, command), "--json"],
            capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip
        told = json.loads(done.stdout)
        assert told["frames"] == count
        peaks[count] = told["peak_rss_bytes"]
    assert peaks[1024] == pytest.approx(peaks[64], rel=0.05)
