"""`tared benchmark`: every engine that a model can have here, measured on frames that did not make it."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from worlds import SPEC, make_world

import agent.cli.benchmark as benchmark
from agent.cli.benchmark import FLOAT, PLAIN, PLANNED, print_benchmark, run_benchmark
from agent.common.errors import AgentError

pytestmark = pytest.mark.slow

CONTRACT = {  # of `tared benchmark --json`, each row
    "backend", "precision", "latency_ms", "fidelity", "metric", "int8_macs_share", "peak_rss_bytes", "engine_bytes",
    "seconds",
}  # fmt: skip


def test_all_engines_of_all_runtimes_on_the_same_frames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world(tmp_path, lambda at: 0.3 + 0.05 * at, 4.0)
    weigh, weighed = benchmark._memory_bytes, dict[str, tuple[int, int]]()

    def weigh_once(made: benchmark._Made, shape: Sequence[int | None]) -> tuple[int, int]:
        """Weigh one engine of each runtime: every weighing is a process of its own."""
        name = made.backend.name
        weighed[name] = weighed.get(name) or weigh(made, shape)
        return weighed[name]

    monkeypatch.setattr(benchmark, "_memory_bytes", weigh_once)
    monkeypatch.setattr(benchmark, "_TIMED", 20)
    others = {("onnxruntime", "of another tool"): (world.folder / "model.onnx").read_bytes()}
    clip = str(world.folder / "clip.avi")
    result = run_benchmark(world.folder / "model.yaml", clip, 40, 1, 0.1, others=others)
    assert result["frames"] == 20
    rows = {(each["backend"], each["precision"]): each for each in result["rows"]}
    assert rows.pop(("onnxruntime", "of another tool"))["fidelity"] == 1.0
    measured = {place for place, each in rows.items() if not each["reason"]}
    runtimes = {runtime for runtime, _ in measured}
    assert {"onnxruntime", "openvino"} <= runtimes
    assert measured == {(runtime, precision) for runtime in runtimes for precision in (FLOAT, PLAIN, PLANNED)}
    for runtime, precision in measured:
        each = rows[runtime, precision]
        assert each.keys() >= CONTRACT
        assert 0.0 < each["latency_ms"]["p50"] <= each["latency_ms"]["p99"]
        assert each["fidelity"] >= (1.0 if precision == FLOAT else 0.8)
        assert 0 < each["memory_bytes"] < each["peak_rss_bytes"]
        assert (each["int8_macs_share"] > 0.0) == (precision != FLOAT)
        assert each["seconds"] > 0.0
    absent = rows.get(("tensorrt", FLOAT))
    assert absent is None or absent["latency_ms"] is not None or absent["reason"]
    console = Console(file=io.StringIO(), width=80)  # nothing is cut off there
    print_benchmark(result, console)
    assert isinstance(console.file, io.StringIO)
    assert "1.00x" in console.file.getvalue()
    assert "…" not in console.file.getvalue()
    *_, slowest = console.file.getvalue().rstrip().splitlines()
    assert f"{max(each['latency_ms']['p50'] for each in result['rows'] if each['latency_ms']):.2f} ms" in slowest
    assert "█" * 36 in slowest


def test_a_recording_that_is_too_short_is_named(tmp_path: Path) -> None:
    world = make_world(tmp_path, lambda _: 0.5, 1.0)
    (world.folder / "model.yaml").write_text(yaml.safe_dump(SPEC))
    with pytest.raises(AgentError, match=r"benchmark\.frames: 10 frames in .* at least 16"):
        run_benchmark(world.folder / "model.yaml", str(world.folder / "clip.avi"), 40, 1, 0.1)
