"""Between the frame path and the outputs: a queue that never waits, and counts what it drops."""

from __future__ import annotations

import errno
import json
import threading
import time
from pathlib import Path

import pytest
from bench import fill, small_file_system
from results_bench import CONFIG, frames_of, served
from worlds import make_world

from agent.common.errors import AgentError
from agent.config import load_config
from agent.contract.messages import Birth
from agent.daemon.supervisor import Supervisor
from agent.models.model import open_model
from agent.results.file_output import ResultsFile
from agent.results.writer import ResultLine, ResultsWriter
from engines.registry import open_backend

pytestmark = pytest.mark.usefixtures("no_thread_left")


class Hanging:
    """An output that waits, as on a disk that does not answer."""

    name = "hanging"
    dropped = 0
    trouble: AgentError | None = None

    def __init__(self, error: BaseException | None = None) -> None:
        self.frames: list[int] = []
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.error = error

    def add(self, line: ResultLine) -> None:
        self.reached.set()
        assert self.go_on.wait(30.0)
        if self.error is not None:
            raise self.error
        self.frames.append(line.document["frame"])

    def tick(self) -> float:
        return 60.0

    def flush(self) -> None: ...

    def close(self) -> None: ...


def test_all_that_is_offered_is_in_the_file_once_it_has_settled(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    with ResultsWriter(CONFIG, [ResultsFile(path)]) as writer:
        for number in range(100):
            writer.offer(served(number))
        writer.flush()
        assert frames_of(path) == list(range(100))
        writer.offer(served(100))
    assert frames_of(path) == list(range(101))
    assert writer.dropped == {"file": 0}
    published = writer.latency["street"].sample()
    assert published.p99_ms >= published.p50_ms > 0.0
    assert not writer.latency["street"].sample().frames  # each stretch is told once


def test_an_output_that_hangs_keeps_no_frame_and_the_oldest_answers_go() -> None:
    output = Hanging()
    with ResultsWriter(CONFIG, [output]) as writer:
        writer.offer(served(0))
        assert output.reached.wait(10.0)
        started_s = time.perf_counter()
        for number in range(1, 10_001):
            writer.offer(served(number))
        assert time.perf_counter() - started_s < 2.0  # 200 us each; it takes a few
        assert writer.dropped == {"hanging": 10_000 - 256}
        output.go_on.set()
        writer.flush()
    assert output.frames == [0, *range(10_001 - 256, 10_001)]


@pytest.mark.parametrize("error", [ZeroDivisionError(), MemoryError(), OSError(errno.EMFILE, "no descriptor")])
def test_a_fault_of_an_output_costs_it_that_line_alone(tmp_path: Path, error: Exception) -> None:
    output, changes = Hanging(error), list[str]()
    output.go_on.set()
    with ResultsWriter(CONFIG, [output, ResultsFile(tmp_path / "results.jsonl")]) as writer:
        writer.on_change = lambda name, error: changes.append(f"{name} {error.code if error is not None else 'back'}")
        for number in range(5):
            writer.offer(served(number))
        writer.flush()
        assert writer.dropped == {"hanging": 5, "file": 0}
        output.error = None
        for number in range(5, 5 + 30):
            writer.offer(served(number))
            writer.flush()
        assert output.frames == [*range(5, 35)]
    assert changes == ["hanging results.failed", "hanging back"]
    assert frames_of(tmp_path / "results.jsonl") == [*range(35)]


def test_trouble_is_reported_once_and_its_end_too(tmp_path: Path) -> None:
    changes: list[tuple[str, str]] = []
    with small_file_system(tmp_path / "disk") as disk:
        path = disk / "results.jsonl"
        with ResultsWriter(CONFIG, [ResultsFile(path)]) as writer:
            writer.on_change = lambda name, error: changes.append((name, error.code if error is not None else ""))
            fill(disk / "ballast")
            for number in range(3):
                writer.offer(served(number))
                writer.flush()
            assert changes == [("file", "results.write")]
            (disk / "ballast").unlink()
            writer.flush()
            assert changes == [("file", "results.write"), ("file", "")]
        assert frames_of(path) == [0, 1, 2]


def test_the_daemon_writes_a_line_for_each_frame(tmp_path: Path) -> None:
    world = make_world(tmp_path, lambda _: 0.5, 6.0, results={"file": "results.jsonl"})
    summary, _ = world.run()
    documents = [json.loads(each) for each in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [document["frame"] for document in documents] == list(range(summary["frames"])) == list(range(60))
    assert summary["results_dropped"] == {"file": 0}
    assert {*documents[0]} == {"frame", "ts", "camera", "engine", "latency_ms", "class", "label", "score"}
    assert [document["ts"] for document in documents] == pytest.approx([number / 10 for number in range(60)])
    assert all(0.0 < document["latency_ms"] < 10_000.0 for document in documents)


def test_the_daemon_reports_a_full_disk_once_and_serves_on(tmp_path: Path) -> None:
    world = make_world(tmp_path, lambda _: 0.5, 20.0, results={"file": "disk/results.jsonl"})
    with small_file_system(tmp_path / "disk") as disk:
        fill(disk / "ballast")
        summary, errors = world.run()
        assert summary["frames"] == 200
        assert errors.count("code=results.write") == 1, errors
        assert frames_of(disk / "results.jsonl") == []


def test_a_bug_in_an_output_does_not_end_the_run(tmp_path: Path) -> None:
    world = make_world(tmp_path, lambda _: 0.5, 6.0)
    world.command()
    config = load_config(tmp_path / "config.yaml")
    output = Hanging(ZeroDivisionError())
    output.go_on.set()
    model, birth = open_model(config.model), Birth(agent_version="0")
    with ResultsWriter(config, [output]) as results:
        supervisor = Supervisor(config, model, open_backend("onnxruntime"), None, birth, results=results)
        summary = supervisor.run()
    assert summary.loop.frames == 60
    assert summary.results_dropped == {"hanging": 60}
