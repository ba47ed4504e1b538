"""Real models calibrated: constant memory, and histograms that no batch size changes."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from contextlib import closing

import numpy as np
import pytest
from lab import CIFAR_TRAIN, PERSON, Lab

from agent.camera.reader import read_images
from agent.camera.source import parse_source
from agent.models.model import open_model
from agent.vision.spec import load_model_spec
from agent.vision.task import VisionTask
from calibrate.histogram import AbsHistogram, merge
from engines.interface import BackendOptions
from engines.registry import open_backend


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


def test_the_batch_size_never_changes_a_histogram(lab: Lab) -> None:
    backend = open_backend("onnxruntime", BackendOptions(threads=2))
    model = open_model(load_model_spec(lab.spec("resnet20")))
    with closing(backend.observer(model.reference, model.placement.taps)) as observer:
        task = VisionTask(model.spec, observer.inputs, observer.outputs)
        images = itertools.islice(read_images(parse_source(str(lab.data / CIFAR_TRAIN))), 0, 480, 20)
        batch = np.concatenate([task.preprocess(image)[0] for _, image in images])
        assert len(batch) == 24
        by_size = {}
        for size in (1, 3, 8):
            total: dict[str, AbsHistogram] = {}
            for start in range(0, len(batch), size):
                for name, histogram in observer.observe(batch[start : start + size]).histograms.items():
                    total[name] = merge(total[name], histogram) if name in total else histogram
            by_size[size] = total
    assert len(by_size[1]) == 20
    for size in (3, 8):
        for name, expected in by_size[1].items():
            found = by_size[size][name]
            assert np.array_equal(found.counts, expected.counts)
            assert (found.range_exp, found.amax, found.zeros, found.nonfinite) == (
                expected.range_exp, expected.amax, expected.zeros, expected.nonfinite,
            )  # fmt: skip
