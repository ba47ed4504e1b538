"""The preview of a daemon as users start it: pictures for those who may look, and the video goes on all the same."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from brokers import RealBroker, Watcher, eventually, free_port
from mjpeg_server import MjpegServer
from preview_bench import asked, connect, descriptors, get, gone, parts
from worlds import World, make_world

from agent.contract.commands import CommandResult
from agent.contract.topics import Topics
from fleet.operator import new_command, send

TOPICS = Topics("default", "board")
pytestmark = [pytest.mark.broker, pytest.mark.slow]


def ask(broker: RealBroker, op: str, **args: Any) -> CommandResult:
    *_, last = send(broker.endpoint, TOPICS, new_command(op, args, time.time()))
    return last


def served(watcher: Watcher, camera: str = "street") -> float:
    """Frames per second, summed up over all telemetry so far: it grows while frames are served."""
    samples = [json.loads(message.payload) for message in watcher.all() if message.topic == TOPICS.telemetry]
    return sum(sample["cameras"].get(camera, {}).get("fps", 0.0) for sample in samples)


def health(watcher: Watcher) -> dict[str, Any]:
    samples = [json.loads(message.payload) for message in watcher.all() if message.topic == TOPICS.telemetry]
    return samples[-1]["health"] if samples else {}


def errors(watcher: Watcher, part: str = "preview") -> list[str]:
    events = [json.loads(message.payload) for message in watcher.all() if message.topic == TOPICS.event]
    return [event["code"] for event in events if event["kind"] == "error" and event.get("part") == part]


def world_with(folder: Path, broker: RealBroker, url: str, address: str, **changes: Any) -> World:
    world = make_world(
        folder,
        lambda _: 0.5,
        0.2,
        mqtt={"host": broker.host, "port": broker.port},
        preview={"address": address},
        **changes,
    )
    world.config["camera"] = {"name": "street", "source": url}
    return world


def open_address(watcher: Watcher) -> str:
    eventually(lambda: bool(health(watcher).get("preview", {}).get("address")), 60.0)
    return str(health(watcher)["preview"]["address"])


def test_it_is_seen_found_by_status_closed_from_afar_and_gone_at_the_end(
    tmp_path: Path, any_broker: RealBroker
) -> None:
    with MjpegServer(fps=20.0) as camera, Watcher(any_broker.endpoint) as watcher:
        world = world_with(tmp_path, any_broker, camera.url, "127.0.0.1:0", privacy={"preview": True})
        with world.running() as process:
            address = open_address(watcher)
            state = (ask(any_broker, "status").result or {})["preview"]
            assert state == {"address": address, "viewers": 0, "error": None}
            with asked(address, "/stream.mjpeg?camera=street") as response:
                shown = parts(response)
                numbers = [int(next(shown)[0]["X-Frame"]) for _ in range(4)]
                assert numbers == sorted(numbers)
                assert (ask(any_broker, "status").result or {})["preview"]["viewers"] == 1
                off = ask(any_broker, "set", **{"privacy.preview": "false"})
                assert off.status == "SUCCEEDED"
                with contextlib.suppress(ConnectionError, OSError):
                    while response.read1(65536):
                        pass
            with pytest.raises(ConnectionRefusedError):
                connect(address)
            on = ask(any_broker, "set", **{"privacy.preview": "true"})
            assert on.error is not None
            assert on.error.code == "command.set"
            before = served(watcher)
            eventually(lambda: served(watcher) > before + 20.0, 30.0)
            assert ask(any_broker, "set", **{"privacy.preview": "null"}).status == "SUCCEEDED"
            again = open_address(watcher)
            eventually(lambda: errors(watcher) == ["preview.privacy"])
            eventually(lambda: get(open_address(watcher), "/frame.jpg")[0] == 200)
            process.send_signal(signal.SIGTERM)
            _, said = process.communicate(timeout=60.0)
            assert process.returncode == 0, said
            with pytest.raises(ConnectionRefusedError):
                connect(again)


def test_what_hinders_the_preview_does_not_hinder_the_video(tmp_path: Path, any_broker: RealBroker) -> None:
    """Forbidden by its owner at first; then, at the next start, the port is another program's."""
    port = free_port()
    for privacy, code in ((False, "preview.privacy"), (True, "preview.address")):
        with (
            MjpegServer(fps=20.0) as camera,
            Watcher(any_broker.endpoint) as watcher,
            contextlib.ExitStack() as stack,
        ):
            world = world_with(
                tmp_path / code, any_broker, camera.url, f"127.0.0.1:{port}", privacy={"preview": privacy}
            )
            if privacy:
                stack.enter_context(contextlib.closing(socket.create_server(("127.0.0.1", port))))
            stack.enter_context(world.running())
            eventually(lambda: errors(watcher) == [code], 60.0)  # noqa: B023
            eventually(lambda: served(watcher) > 20.0, 60.0)
            status = (ask(any_broker, "status").result or {})["preview"]
            assert status == {"address": None, "viewers": 0, "error": code}


def test_viewers_that_misbehave_cost_the_video_nothing(tmp_path: Path, any_broker: RealBroker) -> None:
    """Two that look, two that do not read, a thousand that never finish their request."""
    with MjpegServer(fps=20.0) as camera, Watcher(any_broker.endpoint) as watcher, contextlib.ExitStack() as stack:
        world = world_with(tmp_path, any_broker, camera.url, "127.0.0.1:0", privacy={"preview": True})
        process = stack.enter_context(world.running())
        address = open_address(watcher)
        eventually(lambda: get(address, "/frame.jpg")[0] == 200, 60.0)
        before = descriptors(str(process.pid))
        threads = len(list(Path(f"/proc/{process.pid}/task").iterdir()))
        stuck = [stack.enter_context(contextlib.closing(connect(address))) for _ in range(2)]
        for each in stuck:
            each.sendall(b"GET /stream.mjpeg HTTP/1.1\r\nHost: localhost\r\n\r\n")
        looking = [stack.enter_context(asked(address, "/stream.mjpeg")) for _ in range(2)]
        shown = [parts(each) for each in looking]
        for _ in range(1000):
            with contextlib.closing(connect(address)) as idle, contextlib.suppress(ConnectionError):
                idle.sendall(b"GET /")
        half_open = [stack.enter_context(contextlib.closing(connect(address))) for _ in range(100)]
        for _ in range(5):
            for each in shown:
                next(each)
        served_before = served(watcher)
        eventually(lambda: served(watcher) > served_before + 20.0, 30.0)
        eventually(lambda: descriptors(str(process.pid)) <= before + 4 + 16)
        assert len(list(Path(f"/proc/{process.pid}/task").iterdir())) < threads + 10  # none for a connection
        assert gone(half_open[0])
