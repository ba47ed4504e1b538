"""Between the frame path and the outputs: a queue that never waits, and counts what it drops."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from typing import cast

import pytest
from bench import fill, small_file_system
from kept import kept_in
from listening import Listening
from results_bench import CONFIG, frames_of, served
from turned_clock import TurnedClock
from worlds import make_world

from agent.config import load_config
from agent.contract.messages import Birth
from agent.daemon.supervisor import Supervisor
from agent.models.model import open_model
from agent.results.file_output import ResultsFile
from agent.results.writer import Output, ResultLine, ResultsWriter
from agent.uplink.link import MqttLink
from calibrate.errors import TaredError
from engines.registry import open_backend

pytestmark = pytest.mark.usefixtures("no_thread_left")


class Hanging(Output):
    """An output that waits, as on a disk that does not answer."""

    name = "hanging"
    dropped = 0

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


def test_an_output_that_hangs_keeps_no_frame_and_the_oldest_answers_go() -> None:
    output = Hanging()
    with ResultsWriter(CONFIG, [output]) as writer:
        writer.offer(served(0))
        assert output.reached.wait(60.0)
        for number in range(1, 10_001):  # none waits for the output
            writer.offer(served(number))
        assert writer.dropped == {"hanging": 10_000 - 256}
        output.go_on.set()
        writer.flush()
    assert output.frames == [0, *range(10_001 - 256, 10_001)]


@pytest.mark.parametrize("error", [ZeroDivisionError(), MemoryError(), OSError(errno.EMFILE, "no descriptor")])
def test_a_fault_of_an_output_costs_it_that_line_alone(
    tmp_path: Path, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    output, changes = Hanging(error), list[tuple[str, TaredError | None]]()
    output.go_on.set()
    with ResultsWriter(CONFIG, [output, ResultsFile(tmp_path / "results.jsonl")]) as writer:
        writer.on_change = lambda name, error: changes.append((name, error))
        for number in range(5):
            writer.offer(served(number))
        writer.flush()
        assert writer.dropped == {"hanging": 5, "file": 0}
        output.error = None
        for number in range(5, 5 + 30):
            writer.offer(served(number))
            writer.flush()
        assert output.frames == [*range(5, 35)]
        writer.offer(served(35))  # which is written at the end
    (name, failure), end = changes
    assert failure is not None
    assert (name, failure.code, end) == ("hanging", "results.failed", ("hanging", None))
    assert ("report it" in failure.remedy) is isinstance(error, ZeroDivisionError)
    assert caplog.text.count("Traceback") == 1
    assert frames_of(tmp_path / "results.jsonl") == [*range(36)]


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


def test_the_latency_of_a_line_lasts_until_every_output_has_it() -> None:
    output, clock = Hanging(), TurnedClock(monotonic_s=0.001)  # when the frame was captured
    with ResultsWriter(CONFIG, [output], clock) as writer:
        writer.offer(served(0))
        assert output.reached.wait(60.0)
        clock.turn(2.0)
        output.go_on.set()
        writer.flush()
        assert writer.latency["street"].sample().p50_ms == pytest.approx(2000.0, rel=0.03)
        assert not writer.latency["street"].sample().frames, "each stretch is reported once"


def test_the_daemon_counts_lost_lines_in_telemetry_and_in_its_summary(tmp_path: Path) -> None:
    world = make_world(tmp_path, lambda _: 0.5, 600.0, mqtt={"telemetry_period_s": 0.1})
    world.arguments()
    config, link, output = load_config(tmp_path / "config.yaml"), Listening(), Hanging(ZeroDivisionError())
    output.go_on.set()
    link.enough = lambda: link.sent[-1].get("health", {}).get("results_dropped", {}).get("hanging")  # then it ends
    with ResultsWriter(config, [output]) as results:
        model, backend = open_model(config.model), open_backend(config.backend)
        to_nowhere = cast(MqttLink, link)  # as far as a supervisor knows
        summary = Supervisor(
            config, kept_in(config.state_dir), model, backend, to_nowhere, Birth(agent_version="0"), results=results
        ).run()
    assert summary.loop is not None
    assert 0 < summary.results_dropped["hanging"] == summary.loop.frames < 6000


def test_the_daemon_reports_a_full_disk_once_and_serves_on(tmp_path: Path) -> None:
    world = make_world(tmp_path, lambda _: 0.5, 6.0, results={"file": "disk/results.jsonl"})
    with small_file_system(tmp_path / "disk") as disk:
        fill(disk / "ballast")
        summary, errors = world.run()
        assert summary["frames"] == 60
        assert errors.count("code=results.write") == 1, errors
        assert frames_of(disk / "results.jsonl") == []
