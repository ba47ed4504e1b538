"""Descriptors are used up beside a daemon, and strangers hold on to its metrics: frames go on."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from brokers import RealBroker, Watcher, eventually, free_port
from prometheus_values import scrape, value
from promtool import promtool
from telegraf_conf import unanswered
from warm_start import TalkingProcess
from worlds import FIRST_COMMIT, OUTLASTS_S, World, make_world, run_until

from agent.contract.commands import CommandResult
from agent.contract.topics import Topics
from fleet.operator import new_command, send

TOPICS = Topics("default", "board")
STRANGERS = 1000


@pytest.mark.trial
@pytest.mark.broker
def test_strangers_and_a_lack_of_descriptors_do_not_end_the_video(
    calibrated_world: World, any_broker: RealBroker
) -> None:
    port = free_port()
    mqtt = {"host": any_broker.host, "port": any_broker.port, "telemetry_period_s": 0.5, "outbox": {"commit_s": 0.1}}
    calibrated_world.change(metrics={"port": port}, mqtt=mqtt, camera={"loop": True})
    with Watcher(any_broker.endpoint) as watcher, calibrated_world.running() as process:
        watcher.expect(TOPICS.telemetry)
        eventually(lambda: value(port, "tared_frames_total") is not None)
        threads = len(os.listdir(f"/proc/{process.pid}/task"))
        with ExitStack() as stack:
            for number in range(STRANGERS):
                stranger = stack.enter_context(socket.create_connection(("127.0.0.1", port), 10.0))
                if number % 2:
                    stranger.sendall(b"GET /metrics HTTP/1.1\r\nHost: 127")
            assert len(os.listdir(f"/proc/{process.pid}/task")) < threads + STRANGERS // 10
            promtool("check", "metrics", content=scrape(port))
        eventually(lambda: (value(port, "tared_frames_total") or 0.0) > 0.0)
        before = value(port, "tared_frames_total")
        assert before is not None
        watcher.all()
        limits = _exhaust(process.pid)
        eventually(lambda: "memory_available_bytes" not in watcher.expect(TOPICS.telemetry)["health"])
        for _ in range(4):
            assert watcher.expect(TOPICS.telemetry)["cameras"]["camera"]["fps"] > 0.0
        assert [each.status for each in _results(any_broker, "status")] == ["ACCEPTED", "SUCCEEDED"]
        (refusal,) = _results(any_broker, "recalibrate", frames="8")
        assert refusal.error is not None
        assert refusal.error.code == "state.read"  # nothing starts that is not written down
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, limits)
        eventually(lambda: "memory_available_bytes" in watcher.expect(TOPICS.telemetry)["health"])
        eventually(lambda: (value(port, "tared_frames_total") or 0.0) > before)
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=30.0)
        documents = {kind: _documents(watcher, kind) for kind in ("telemetry", "event", "status")}
    assert process.returncode == 0, errors
    assert json.loads(output)["frames"] > before
    assert "Traceback" not in errors
    assert errors.count("board=unreadable") == 1
    for kind, sent in documents.items():  # by the way: what docs/telegraf reads is there
        assert unanswered(kind, sent) <= {"cameras/*/dropped/*"}


@pytest.mark.trial
def test_a_job_that_lacks_descriptors_costs_itself_alone(tmp_path: Path) -> None:
    """The first job, too: much of what is needed a first time is a file that Python opens then."""
    world = make_world(tmp_path, lambda _: 0.5, OUTLASTS_S, mqtt={"host": "127.0.0.1", "port": 1})
    with world.running() as process:
        _read_until(process, "step=COLLECTING")
        limits = _exhaust(process.pid)
        _read_until(process, "code=state.write")
        frames = more = int(_read_until(process, r"serving: (\d+)")[1])
        while more <= frames:
            more = int(_read_until(process, r"serving: (\d+)")[1])
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, limits)
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=30.0)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
    assert more <= json.loads(output)["frames"]


@pytest.mark.slow
def test_the_frame_path_imports_nothing_and_a_failed_report_costs_itself(tmp_path: Path) -> None:
    """A module is a file, so an import without a descriptor would end the video. Health cannot be read at first."""
    watched = """
import builtins
import sys
import threading
from itertools import count
from agent.uplink import reporter
from fleet.cli.main import main
whole, calls = reporter.health, count()
def health():
    if next(calls) < 5:
        raise RuntimeError("unreadable")
    return whole()
reporter.health = health
importing = builtins.__import__
def watch(name, *arguments, **options):
    known = len(sys.modules)
    module = importing(name, *arguments, **options)
    thread = threading.current_thread().name
    if len(sys.modules) > known and thread.split()[0] in ("inference", "engine", "capture", "trial", "results"):
        print(f"imported {name} in {thread}", file=sys.stderr)
    return module
builtins.__import__ = watch
raise SystemExit(main())
"""
    mqtt = {"host": "127.0.0.1", "port": 1, "telemetry_period_s": 0.1}
    world = make_world(tmp_path, lambda _: 0.5, OUTLASTS_S, mqtt=mqtt, results={"file": "results.jsonl"})
    summary, errors = run_until(TalkingProcess(world.arguments(), source=watched), FIRST_COMMIT)
    assert "imported " not in errors
    assert summary["dropped"] == {}
    assert errors.count("code=report.failed message=") == 1
    assert errors.count("Traceback") == 1


def _read_until(process: TalkingProcess, pattern: str) -> re.Match[str]:
    """The match in the next line of stderr that has one."""
    for line in process.stderr:
        if match := re.search(pattern, line):
            return match
    raise AssertionError(f"it has ended without a line like {pattern}")


def _results(broker: RealBroker, op: str, **arguments: str) -> list[CommandResult]:
    return list(send(broker.endpoint, TOPICS, new_command(op, arguments, time.time()), silence_s=20.0))


def _documents(watcher: Watcher, kind: str) -> list[dict[str, Any]]:
    topic = f"tared/v1/default/board/{kind}"
    return [json.loads(each.payload) for each in watcher.all() if each.topic == topic and each.payload]


def _exhaust(process: int) -> tuple[int, int]:
    """Let a process open no descriptor more: those below 3 are taken. Return the limits that it had."""
    limits = resource.prlimit(process, resource.RLIMIT_NOFILE)
    resource.prlimit(process, resource.RLIMIT_NOFILE, (3, limits[1]))
    return limits
