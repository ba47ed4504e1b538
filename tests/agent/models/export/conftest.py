"""A bench whose artefact is of ONNX Runtime, on every machine: it holds the graph that is exported."""

from __future__ import annotations

import shutil

import pytest
from bench import Bench


@pytest.fixture(name="bench")
def bench_of_onnxruntime(bench: Bench) -> Bench:
    shutil.rmtree(bench / "artefact")
    bench.built("artefact", "--calibration", bench / "calibration.json")
    return bench
