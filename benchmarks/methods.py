"""The threshold methods beside each other on real models: how near INT8 stays to FP32, and what the task loses.

    python -m benchmarks.methods [--models resnet20 fastestdet ...]

Needs ../shared/data (or $TARED_SHARED/data). Every method gets the same histograms, of 64 images (4096 bins), every
layer is INT8, and the engines run on ONNX Runtime. SQNR is the worst output's, the median over 64 other images. The
task's score: top-1 on 3000 images, mAP50 on 128 images, or the mean F1 against FP32 on the 64 other images where there
are no labels in YOLO's form.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from contextlib import closing

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from agent.models.model import calibrate
from agent.vision.evaluation import evaluate
from agent.vision.fidelity import fidelity
from benchmarks.models import DATA, MODELS, Observed, observe
from calibrate.histogram import AbsHistogram, to_bytes
from calibrate.noise import Density, worst_sqnr_db
from calibrate.threshold import histogram_amax
from engines.interface import Backend, Engine
from engines.quantise.apply_plan import insert_qdq
from engines.registry import open_backend

METHODS = (
    "entropy",
    "mse",
    "percentile:99.9",
    "percentile:99.99",
    "percentile:99.999",
    "max",
    "entropy:nvidia",
    "entropy:onnxruntime",
    "entropy:ppq",
    "entropy:tvm",
)
LABELLED = {
    "resnet20": ("top1", "img_cifar10_test_A_3000.zip"),
    "fastestdet": ("map50", "img_coco_train2017_first128_labelled.zip"),
    "yolox_nano": ("map50", "img_coco_train2017_first128_labelled.zip"),
}


def score(engine: Engine, name: str, observed: Observed, reference: Engine) -> float:
    """The task's own score where there are labels, else the fidelity."""
    if name in LABELLED:
        key, labels = LABELLED[name]
        return evaluate(engine, observed.model.spec, DATA / labels).scores[key]
    decode = observed.task.decode
    pairs = ([decode(each.infer(x), x.shape) for each in (engine, reference)] for x in observed.held_out)
    return float(np.mean([fidelity(served, right).value for served, right in pairs]))


def mean_noise_db(histograms: Mapping[str, AbsHistogram], method: str) -> float:
    """Predicted noise over signal in dB, the mean over the tensors: what the histograms alone say of a method."""
    ratios = []
    for histogram in histograms.values():
        amax = histogram_amax(histogram, method)
        if amax > 0.0:
            density = Density(histogram)
            power = density.density @ np.diff(density.edges**3) / 3.0
            noise = np.add(*density.noise(np.array([amax / 127.0])))[0]
            ratios.append(10.0 * np.log10(noise / power))
    return float(np.mean(ratios))


def kib_per_100(histograms: Mapping[str, AbsHistogram]) -> float:
    """What a hundred such histograms weigh on the wire."""
    return sum(len(to_bytes(histogram)) for histogram in histograms.values()) / len(histograms) * 100 / 1024


def compare(name: str, backend: Backend, advance: Callable[[], object]) -> Table:
    """One model's table."""
    observed = observe(name, backend)
    metric = LABELLED.get(name, ("F1 against FP32", ""))[0]
    table = Table("method", "predicted noise, mean dB", "output SQNR, dB", metric, title=name)
    table.caption = f"as bytes: {kib_per_100(observed.histograms):.0f} KiB per 100 histograms"
    with closing(backend.load(backend.build(observed.model.reference).engine)) as reference:
        table.add_row("FP32", "", "", f"{score(reference, name, observed, reference):.4f}")
        advance()
        for method in METHODS:
            calibration = calibrate(observed.model, observed.histograms, method, observed.frames, observed.source)
            graph = insert_qdq(observed.model.master, observed.model.placement, calibration.amax)
            with closing(backend.load(backend.build(observed.model.build_request(graph, "int8")).engine)) as engine:
                outputs = [(dict(reference.infer(x)), dict(engine.infer(x))) for x in observed.held_out]
                sqnr = float(np.median([worst_sqnr_db(*pair) for pair in outputs]))
                result = score(engine, name, observed, reference)
            noise = mean_noise_db(observed.histograms, method)
            table.add_row(method, f"{noise:.1f}", f"{sqnr:.1f}", f"{result:.4f}")
            advance()
    return table


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="The threshold methods on real models.")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    names = parser.parse_args().models
    backend = open_backend("onnxruntime")
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("methods", total=len(names) * (len(METHODS) + 1))
        tables = [compare(name, backend, lambda: progress.advance(task)) for name in names]
    for table in tables:
        Console().print(table)


if __name__ == "__main__":
    main()
