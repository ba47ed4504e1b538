"""What INT8 gains on this CPU: every runtime in float, in plain INT8 and under a plan, as `tared benchmark` has them.

    python -m benchmarks.cpu [--models resnet20 ... sample] [--json | --markdown]

Needs ../shared/data (or $TARED_SHARED/data), and for `sample` the video that `make run` renders. One thread; all
engines of a model answer the same frames in turn. Of COCO's photos half calibrate, and all are scored. Meaningful on a
quiet machine only. The graph that OpenVINO is given is also run on ONNX Runtime, which computes it as it is written.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from agent.common.console import say
from agent.planning.benchmark import FLOAT, PLAIN, PLANNED, Entry, run_benchmark
from benchmarks.daemon_process import CIFAR_TEST, CIFAR_TRAIN, COCO, model_spec
from benchmarks.models import DATA
from benchmarks.peers import ROOT
from benchmarks.report import Bar, Section, add_output_option, at_most, bars_section, publish

_FRAMES = 128  # of each scene: half calibrate, half measure
_MAX_LOSS = 0.1


@dataclass(frozen=True)
class Case:
    """frames and dataset lie in ../shared/data; most: of the time of FP32 on ONNX Runtime, the bar."""

    frames: str
    dataset: str | None
    most: float


CASES = {
    "resnet20": Case(CIFAR_TRAIN, CIFAR_TEST, 0.40),
    "ultraface": Case("vid_face_asl_walk_640x480.mkv", None, 0.33),
    "fastestdet": Case(COCO, COCO, 0.82),
    "yolox_nano": Case(COCO, COCO, 0.95),
    "sample": Case("", None, 0.60),
}
_POINTS, _FIDELITY = 0.3, 0.01  # allowed between a graph on OpenVINO and as it is written


def measure(name: str, folder: Path) -> list[Entry]:
    """Return the engines of one model. Raises TaredError as `run_benchmark`."""
    case = CASES[name]
    if name == "sample":
        spec, frames = ROOT / "examples" / "street" / "model.yaml", ROOT / "var" / "sample" / "street.mp4"
    else:
        spec, frames = folder / f"{name}.yaml", DATA / case.frames
        spec.write_text(yaml.safe_dump(model_spec(name).model_dump(mode="json")))
    dataset = DATA / case.dataset if case.dataset is not None else None
    result = run_benchmark(spec, str(frames), _FRAMES, 1, _MAX_LOSS, dataset)
    return [Entry(**entry) for entry in result["engines"]]


def of(entries: Sequence[Entry], runtime: str, engine: str) -> Entry:
    """Return the entry of an engine on a runtime."""
    return next(each for each in entries if (each.runtime, each.engine) == (runtime, engine))


def engines_section(found: Mapping[str, Sequence[Entry]]) -> Section:
    """One row an engine."""
    columns = ("model", "runtime", "engine", "p50, ms", "p99, ms", "to FP32", "fidelity", "top-1, mAP", "memory, MiB")
    table = Section("INT8 on this CPU", (*columns, "engine, MiB", "made in, s"), note="FP32: that of ONNX Runtime.")
    for name, entries in found.items():
        base = of(entries, "onnxruntime", FLOAT).p50_ms or 1.0
        for each in entries:
            if each.without or each.p50_ms is None:
                continue
            figures: list[Any] = [each.fidelity, each.score, each.memory_bytes, each.engine_bytes, each.made_s]
            fidelity, score, memory, size, made = (0.0 if value is None else value for value in figures)
            table.rows.append(
                (
                    name, each.runtime, each.engine, f"{each.p50_ms:.2f}", f"{each.p99_ms:.2f}",
                    f"{each.p50_ms / base:.2f}x", f"{fidelity:.3f}", "" if each.score is None else f"{score:.4f}",
                    f"{memory / 2**20:.0f}", f"{size / 2**20:.2f}", f"{made:.1f}",
                )
            )  # fmt: skip
    return table


def bars(found: Mapping[str, Sequence[Entry]]) -> list[Bar]:
    """Return the bars of every model: the plan's time, its time to OpenVINO's float, and what it computes."""
    judged = list[Bar]()
    for name, entries in found.items():
        base, own = of(entries, "onnxruntime", FLOAT).p50_ms, of(entries, "openvino", FLOAT).p50_ms
        served = min((of(entries, "openvino", engine) for engine in (PLAIN, PLANNED)), key=_time_of_good)
        plan, written = (of(entries, runtime, PLANNED) for runtime in ("openvino", "onnxruntime"))
        assert served.p50_ms is not None
        assert base is not None
        assert own is not None
        judged.append(at_most(f"{name}: {served.engine} on OpenVINO, to FP32", CASES[name].most, served.p50_ms / base))
        judged.append(at_most(f"{name}: the same, to OpenVINO's FP32", 1.0, served.p50_ms / own))
        if plan.score is not None and written.score is not None:
            points = 100.0 * abs(plan.score - written.score)
            judged.append(at_most(f"{name}: the plan, to the same graph as written", _POINTS, points, " points"))
        elif plan.fidelity is not None and written.fidelity is not None:
            apart = abs(plan.fidelity - written.fidelity)
            judged.append(at_most(f"{name}: the plan's fidelity, to the same graph's as written", _FIDELITY, apart, ""))
    return judged


def _time_of_good(entry: Entry) -> float:
    """Return the time of an engine that a daemon would accept; others come last."""
    is_good = entry.fidelity is not None and entry.fidelity >= 1.0 - _MAX_LOSS
    return (entry.p50_ms or 0.0) + (0.0 if is_good else 1e6)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="What INT8 gains on this CPU.")
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES))
    add_output_option(parser)
    options = parser.parse_args()
    found: dict[str, list[Entry]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in options.models:
            say(name)
            found[name] = measure(name, Path(folder))
    publish([engines_section(found), bars_section(bars(found))], options)


if __name__ == "__main__":
    main()
