"""Descriptors, threads and memory are used up beside a daemon, and strangers hold on to its metrics: frames go on."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import time
import urllib.request
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from brokers import RealBroker, Watcher, eventually, free_port
from prometheus_values import scrape, value
from promtool import promtool
from telegraf_conf import unanswered
from warm_start import TARED, TalkingProcess
from worlds import FIRST_COMMIT, OUTLASTS_S, World, make_world, run_until

from agent.contract.commands import CommandResult
from agent.contract.topics import Topics
from fleet.operator import new_command, send

TOPICS = Topics("default", "board")
STRANGERS = 1000
SPARE_BYTES = 4 << 20  # less than the stack of a thread; a frame of the clip has 3 kB
# The kernel counts processes and threads by the real user, and never those of root, nor of who may raise limits.
# SIGUSR1 takes the right to start one more away, SIGUSR2 gives it back: from outside root may not, without all rights.
# The child's folders are not this user's: its own words say so, once it may start.
COUNTED = """
import ctypes
import os
import resource
import signal

LIMITS = resource.getrlimit(resource.RLIMIT_NPROC)
signal.signal(signal.SIGUSR1, lambda *_: resource.setrlimit(resource.RLIMIT_NPROC, (1, LIMITS[1])))
signal.signal(signal.SIGUSR2, lambda *_: resource.setrlimit(resource.RLIMIT_NPROC, LIMITS))
if os.getuid() == 0:
    os.setreuid(61_234, 0)
    libc = ctypes.CDLL(None)
    SYS_ADMIN, SYS_RESOURCE, VERSION_3 = 21, 24, 0x20080522  # include/uapi/linux/capability.h
    header, sets = (ctypes.c_uint32 * 2)(VERSION_3, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, sets) == 0
    for number in range(3):  # effective, permitted, inheritable
        sets[number] &= ~(1 << SYS_ADMIN | 1 << SYS_RESOURCE)
    assert libc.capset(header, sets) == 0
"""
# A camera whose pictures lie in memory: no decoder of its own asks for more.
STILLS = """
import sys
import time

import cv2

clip, opened = sys.argv.pop(1), cv2.VideoCapture
video, stills = opened(clip), []
while len(stills) < 100:
    stills.append(video.read()[1])


class Stream:
    def __init__(self, *_):
        self.count = 0

    def isOpened(self):
        return True

    def read(self):
        time.sleep(0.02)
        self.count += 1
        return True, stills[self.count % len(stills)].copy()

    def get(self, _what):
        return 0.0

    def release(self):
        pass


cv2.VideoCapture = Stream
"""
REPORTERS = (  # module:attribute
    "agent.results.writer:prediction_as_dict",
    "agent.results.file_output:ResultsFile.tick",
    "agent.daemon.status:StatusReporter.telemetry",
    "agent.daemon.supervisor:explain",
    "agent.collection.report:draw_sheet",
    "agent.monitoring.history:History.add",
    "agent.contract.messages:Telemetry.to_json",
    "agent.uplink.outbox_store:OutboxStore.commit",
    "agent.monitoring.accuracy:LiveAccuracy.add_answer",
    "agent.monitoring.observer:ObserverThread.offer",
)


@pytest.mark.trial
@pytest.mark.broker
def test_neither_strangers_nor_a_lack_of_descriptors_end_the_video(
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
            assert len(os.listdir(f"/proc/{process.pid}/task")) <= threads + 1  # a child's follower may have begun
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
        assert refusal.error.code == "command.log"  # nothing starts that is not written down
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
        _read_until(process, "code=journal.write")
        frames = _read_until(process, r"serving: (\d+)")
        more = _read_until(process, r"serving: (\d+)")
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, limits)
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=30.0)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
    assert int(frames[1]) < int(more[1]) <= json.loads(output)["frames"]


@pytest.mark.trial
@pytest.mark.broker
def test_a_lack_of_threads_costs_jobs_alone(calibrated_world: World, any_broker: RealBroker) -> None:
    mqtt = {"host": any_broker.host, "port": any_broker.port, "telemetry_period_s": 0.5}
    calibrated_world.change(mqtt=mqtt, camera={"loop": True})
    arguments = calibrated_world.arguments()
    with Watcher(any_broker.endpoint) as watcher, TalkingProcess(arguments, source=COUNTED + TARED) as process:
        watcher.expect(TOPICS.telemetry)
        process.send_signal(signal.SIGUSR1)
        refusal = _results(any_broker, "recalibrate", frames="8")[-1]
        assert refusal.error is not None
        assert refusal.error.code == "recalibration.child"
        fetched = _results(any_broker, "model", url="http://127.0.0.1:1/model.onnx", sha256="0" * 64, size="1")[-1]
        assert fetched.error is not None
        assert _results(any_broker, "status")[-1].status == "SUCCEEDED"
        watcher.all()
        for _ in range(4):
            assert watcher.expect(TOPICS.telemetry)["cameras"]["camera"]["fps"] > 0.0
        process.send_signal(signal.SIGUSR2)
        done = _results(any_broker, "recalibrate", frames="8")[-1]
        assert done.error is None or done.error.code == "calibration.write", done  # of the child, which runs again
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=30.0)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors


@pytest.mark.trial
@pytest.mark.broker
def test_a_lack_of_memory_costs_what_only_reports_alone(calibrated_world: World, any_broker: RealBroker) -> None:
    """In the middle of a job: what comes after needs more, a thread for the candidate first of all."""
    port, preview = free_port(), free_port()
    mqtt = {"host": any_broker.host, "port": any_broker.port, "telemetry_period_s": 0.5}
    calibrated_world.change(
        metrics={"port": port},
        preview={"address": f"127.0.0.1:{preview}"},
        privacy={"preview": True},
        results={"file": "results.jsonl", "socket": "results.socket"},
        mqtt=mqtt,
        camera={"source": "rtsp://camera"},
    )
    arguments = [str(calibrated_world.folder / "clip.avi"), *calibrated_world.arguments()]
    with Watcher(any_broker.endpoint) as watcher, TalkingProcess(arguments, source=STILLS + TARED) as process:
        watcher.expect(TOPICS.telemetry)
        command = new_command("recalibrate", {"frames": "8"}, time.time())
        answers = send(any_broker.endpoint, TOPICS, command, silence_s=60.0)
        assert next(answers).status == "ACCEPTED"
        limits = resource.prlimit(process.pid, resource.RLIMIT_AS)
        resource.prlimit(process.pid, resource.RLIMIT_AS, (_address_space(process.pid) + SPARE_BYTES, limits[1]))
        refusal = [*answers][-1]
        assert refusal.error is not None, refusal
        assert refusal.error.code in (  # wherever it was
            "control.failed",
            "engine.room",
            "probation.thread",
            "recalibration.child",
        )
        for attempt in range(3 * 2):
            with suppress(OSError):
                address = f"127.0.0.1:{port}/metrics" if attempt % 2 else f"127.0.0.1:{preview}/frame.jpg?camera=camera"
                urllib.request.urlopen(f"http://{address}", timeout=10.0).read()
        watcher.all()
        for _ in range(4):
            assert watcher.expect(TOPICS.telemetry)["cameras"]["camera"]["fps"] > 0.0
        resource.prlimit(process.pid, resource.RLIMIT_AS, limits)
        assert _results(any_broker, "recalibrate", frames="8")[-1].status == "SUCCEEDED"
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=30.0)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors


@pytest.mark.slow
def test_whatever_reports_may_lack_memory(tmp_path: Path) -> None:
    """At any call of any of them, from the first on: each of them lacks it for a second, whenever that begins."""
    broken = f"""
import atexit
import functools
import importlib
import sys
import time
from fleet.cli.main import main
def break_for_a_second(path):
    module, _, name = path.partition(":")
    *parents, name = name.split(".")
    holder = importlib.import_module(module)
    for parent in parents:
        holder = getattr(holder, parent)
    whole, calls_s = getattr(holder, name), []
    @functools.wraps(whole)
    def lacking(*arguments, **options):
        calls_s.append(time.monotonic())
        if calls_s[-1] < calls_s[0] + 1.0:
            raise MemoryError("no page")
        return whole(*arguments, **options)
    setattr(holder, name, lacking)
    atexit.register(lambda: print("never called: " + path, file=sys.stderr) if not calls_s else None)
for path in {list(REPORTERS)!r}:
    break_for_a_second(path)
raise SystemExit(main())
"""
    mqtt = {"host": "127.0.0.1", "port": 1, "telemetry_period_s": 0.1}
    world = make_world(tmp_path, lambda _: 0.5, OUTLASTS_S, mqtt=mqtt, results={"file": "results.jsonl"})
    summary, errors = run_until(TalkingProcess(world.arguments(), source=broken), FIRST_COMMIT)
    assert summary["dropped"] == {}
    assert "Traceback" not in errors
    assert "never called" not in errors


@pytest.mark.slow
def test_nothing_is_imported_in_the_frame_path(tmp_path: Path) -> None:
    """A module is a file: without a descriptor to spare its import would end the video."""
    watched = """
import builtins
import sys
import threading
from fleet.cli.main import main
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
    world = make_world(tmp_path, lambda _: 0.5, OUTLASTS_S, results={"file": "results.jsonl"})
    _, errors = run_until(TalkingProcess(world.arguments(), source=watched), FIRST_COMMIT)
    assert "imported " not in errors


@pytest.mark.slow
def test_what_only_reports_may_fail(calibrated_world: World) -> None:
    """Memory, too, may be short at any line: here wherever health is read, five times."""
    broken = """
from itertools import count
from agent.uplink import reporter
from fleet.cli.main import main
whole, calls = reporter.health, count()
def health():
    if next(calls) < 5:
        raise MemoryError("no page")
    return whole()
reporter.health = health
raise SystemExit(main())
"""
    calibrated_world.change(mqtt={"host": "127.0.0.1", "port": 1, "telemetry_period_s": 0.1})
    summary, errors = run_until(TalkingProcess(calibrated_world.arguments(), source=broken), "event=report state=back")
    assert summary["dropped"] == {}
    assert errors.count("code=report.failed") == 1
    assert errors.count("event=report state=back") == 1


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


def _address_space(process: int) -> int:
    """Its size in bytes."""
    status = Path(f"/proc/{process}/status").read_text()
    match = re.search(r"VmSize:\s+(\d+) kB", status)
    assert match is not None
    return 1024 * int(match[1])


def _exhaust(process: int) -> tuple[int, int]:
    """Let a process open no descriptor more: those below 3 are taken. Return the limits that it had."""
    limits = resource.prlimit(process, resource.RLIMIT_NOFILE)
    resource.prlimit(process, resource.RLIMIT_NOFILE, (3, limits[1]))
    return limits
