"""The preview of a daemon as users start it: pictures for those who may look, and the video goes on all the same."""

from __future__ import annotations

import contextlib
import json
import signal
from pathlib import Path
from typing import Any

import pytest
from brokers import RealBroker, Watcher, eventually
from daemon_life import LIMIT_S, TOPICS, answer, code, order
from mjpeg_server import MjpegServer
from preview_bench import asked, connect, get, parts
from worlds import make_world

pytestmark = [pytest.mark.broker, pytest.mark.slow]


def telemetry(watcher: Watcher) -> list[dict[str, Any]]:
    return [json.loads(message.payload) for message in watcher.all() if message.topic == TOPICS.telemetry]


def served(watcher: Watcher) -> float:
    """Frames per second, summed up over all telemetry so far: it grows while frames are served."""
    return sum(float(sample["cameras"].get("street", {}).get("fps", 0.0)) for sample in telemetry(watcher))


def health(watcher: Watcher) -> dict[str, Any]:
    samples = telemetry(watcher)
    return samples[-1]["health"] if samples else {}


def errors(watcher: Watcher) -> list[str]:
    events = [json.loads(message.payload) for message in watcher.all() if message.topic == TOPICS.event]
    return [event["code"] for event in events if event["kind"] == "error" and event.get("part") == "preview"]


def privacy(value: str) -> dict[str, Any]:
    """The arguments of `set` that let or forbid the preview."""
    return {"privacy.preview": value}


def open_address(watcher: Watcher) -> str:
    eventually(lambda: bool(health(watcher).get("preview", {}).get("address")), LIMIT_S)
    return str(health(watcher)["preview"]["address"])


def test_a_preview_is_shown_reported_closed_by_command_and_gone_at_the_end(
    tmp_path: Path, any_broker: RealBroker
) -> None:
    with MjpegServer(fps=20.0) as camera, Watcher(any_broker.endpoint) as watcher:
        mqtt = {"host": any_broker.host, "port": any_broker.port}
        preview, permitted = {"address": "127.0.0.1:0"}, {"preview": True}
        world = make_world(tmp_path, lambda _: 0.5, 0.2, mqtt=mqtt, preview=preview, privacy=permitted)
        world.config["camera"] = {"name": "street", "source": camera.url}
        with world.running() as process:
            address = open_address(watcher)
            assert answer(any_broker, "status")["preview"] == {"address": address, "viewers": 0, "error": None}
            with asked(address, "/stream.mjpeg?camera=street") as response:
                shown = parts(response)
                numbers = [int(next(shown)[0]["X-Frame"]) for _ in range(4)]
                assert numbers == sorted(numbers)
                assert answer(any_broker, "status")["preview"]["viewers"] == 1
                answer(any_broker, "set", **privacy("false"))
                with contextlib.suppress(ConnectionError, OSError):
                    while response.read1(65536):
                        pass
            with pytest.raises(ConnectionRefusedError):
                connect(address)
            assert code(order(any_broker, "set", **privacy("true"))) == "command.set"
            before = served(watcher)
            eventually(lambda: served(watcher) > before + 20.0, LIMIT_S)
            answer(any_broker, "set", **privacy("null"))
            again = open_address(watcher)
            eventually(lambda: errors(watcher) == ["preview.privacy"])
            eventually(lambda: get(open_address(watcher), "/frame.jpg")[0] == 200)
            process.send_signal(signal.SIGTERM)
            _, said = process.communicate(timeout=LIMIT_S)
            assert process.returncode == 0, said
            with pytest.raises(ConnectionRefusedError):
                connect(again)
