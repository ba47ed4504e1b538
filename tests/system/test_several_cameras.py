"""Several cameras on one engine, as a process: each has its name, and none costs the others anything."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from brokers import RealBroker, Watcher, eventually, free_port
from daemon_life import LIMIT_S, TOPICS, LiveCamera, answer, code, order
from mjpeg_server import MjpegServer
from prometheus_values import value
from worlds import ALARM_COMMIT, FIRST_COMMIT, FPS, OUTLASTS_S, World, make_world, run_until, write_clip


def pictures(watcher: Watcher) -> list[bytes]:
    return [message.payload for message in watcher.all() if message.topic == TOPICS.snapshot]


def of_cameras(world: World, *cameras: dict[str, Any]) -> World:
    world.config.pop("camera", None)
    world.config["cameras"] = list(cameras)
    return world


def mqtt(broker: RealBroker) -> dict[str, object]:
    return {"host": broker.host, "port": broker.port}


def documents(watcher: Watcher, topic: str) -> list[dict[str, Any]]:
    return [json.loads(message.payload) for message in watcher.all() if message.topic == topic]


def test_every_frame_of_each_camera_is_answered_under_its_name(tmp_path: Path) -> None:
    world = make_world(tmp_path, lambda _: 0.5, 4.0, results={"file": "results.jsonl"})
    write_clip(tmp_path / "long.avi", lambda _: 0.5, 70)
    of_cameras(world, *({"name": name, "source": f"{name}.avi", "speed": 0} for name in ("clip", "long")))
    summary, _ = world.run()
    cameras = summary["cameras"]
    assert {name: camera["frames"] for name, camera in cameras.items()} == {"clip": 40, "long": 70}
    assert (summary["frames"], summary["dropped"]) == (110, {})
    assert summary["latency_ms"]["p50"] > 0.0
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    for name, frames in (("clip", 40), ("long", 70)):
        assert [line["frame"] for line in lines if line["camera"] == name] == list(range(frames))


@pytest.mark.broker
@pytest.mark.trial
def test_an_alarm_names_the_camera_that_drifts_and_the_new_engine_suits_both(
    tmp_path: Path, any_broker: RealBroker
) -> None:
    """The yard has a night, the hall has not: a recalibration is made of both."""
    gate = LiveCamera(tmp_path, mqtt={**mqtt(any_broker), "telemetry_period_s": 0.5})
    write_clip(gate.world.folder / "hall.avi", lambda _: 0.06, round(OUTLASTS_S * FPS))
    yard = {"name": "yard", "source": "rtsp://camera"}
    of_cameras(gate.world, yard, {"name": "hall", "source": "hall.avi", "speed": 10})

    def follow(line: str) -> None:
        if re.search(FIRST_COMMIT, line):
            gate.show("day")

    with Watcher(any_broker.endpoint) as watcher:
        summary, _ = run_until(gate.process(), ALARM_COMMIT, follow=follow)
        telemetry = documents(watcher, TOPICS.telemetry)
    assert [swap["trigger"] for swap in summary["swaps"]] == ["first-start", "alarm"]
    assert {alarm["camera"] for alarm in summary["alarms"]} == {"yard"}
    assert all(set(sample["cameras"]) == {"yard", "hall"} for sample in telemetry)
    drifts = [sample["cameras"]["hall"]["drift"].get("state") for sample in telemetry]
    assert "alarm" not in drifts


@pytest.mark.broker
@pytest.mark.slow
def test_a_lost_camera_is_named_everywhere_and_the_others_go_on(tmp_path: Path, any_broker: RealBroker) -> None:
    """One gives frames, one falls silent and comes back, and one has never given any."""
    port = free_port()
    with MjpegServer(fps=20.0) as steady, MjpegServer(fps=20.0) as shaky:
        world = make_world(
            tmp_path,
            lambda _: 0.5,
            0.2,
            mqtt=mqtt(any_broker),
            metrics={"port": port},
            calibration={"frames": 8},
            results={"file": "results.jsonl"},
        )
        urls = {"steady": steady.url, "shaky": shaky.url, "never": f"http://127.0.0.1:{free_port()}/x"}
        of_cameras(world, *({"name": name, "source": url, "silence_s": 0.5} for name, url in urls.items()))
        with Watcher(any_broker.endpoint) as watcher, world.running():

            def up() -> dict[str, bool]:
                samples = documents(watcher, TOPICS.telemetry)
                return {name: each["up"] for name, each in samples[-1]["cameras"].items()} if samples else {}

            def frames(name: str) -> float:
                return sum(
                    float(sample["cameras"][name].get("fps", 0.0)) for sample in documents(watcher, TOPICS.telemetry)
                )

            def events(**fields: str) -> list[dict[str, Any]]:
                return [event for event in documents(watcher, TOPICS.event) if fields.items() <= event.items()]

            eventually(lambda: up() == {"steady": True, "shaky": True, "never": False}, LIMIT_S)
            eventually(lambda: frames("steady") > 0 and frames("shaky") > 0, LIMIT_S)
            latest = documents(watcher, TOPICS.telemetry)[-1]["cameras"]["steady"]
            assert latest["published_ms"]["p99"] >= latest["latency_ms"]["p50"] > 0.0

            shaky.silent = True
            eventually(lambda: up() == {"steady": True, "shaky": False, "never": False}, LIMIT_S)
            latest = documents(watcher, TOPICS.telemetry)[-1]["cameras"]
            lost = {"steady": None, "shaky": "camera.silent", "never": "camera.open"}
            assert {name: each.get("lost") for name, each in latest.items()} == lost
            before = frames("steady")
            eventually(lambda: frames("steady") > before + 5, LIMIT_S)
            eventually(lambda: events(kind="error", camera="shaky") != [], LIMIT_S)
            cameras = answer(any_broker, "status")["cameras"]
            assert {name: (each["up"], each["lost"], each["view"] is None) for name, each in cameras.items()} == {
                "steady": (True, None, False),
                "shaky": (False, "camera.silent", True),
                "never": (False, "camera.open", True),
            }
            scraped = [value(port, "tared_camera_up", camera=name) for name in urls]
            assert scraped == [1.0, 0.0, 0.0]

            shaky.silent = False
            eventually(lambda: up() == {"steady": True, "shaky": True, "never": False}, LIMIT_S)
            eventually(lambda: events(kind="camera", camera="shaky") != [], LIMIT_S)


@pytest.mark.broker
@pytest.mark.slow
def test_a_snapshot_is_of_the_camera_that_is_named(tmp_path: Path, any_broker: RealBroker) -> None:
    world = make_world(tmp_path, lambda _: 0.2, 300.0, mqtt=mqtt(any_broker), privacy={"snapshot": True})
    write_clip(tmp_path / "bright.avi", lambda _: 1.0, 3000)
    dark = {"name": "dark", "source": "clip.avi", "speed": 1}
    of_cameras(world, dark, {"name": "bright", "source": "bright.avi", "speed": 1})
    with Watcher(any_broker.endpoint) as watcher, world.running():

        def picture(**args: Any) -> float:
            """Its mean brightness."""
            before = len(pictures(watcher))
            while code(result := order(any_broker, "snapshot", **args)) == "command.busy":
                pass  # it came too soon after the one before
            assert result.status == "SUCCEEDED", result
            eventually(lambda: len(pictures(watcher)) > before, LIMIT_S)
            image = cv2.imdecode(np.frombuffer(pictures(watcher)[-1], np.uint8), cv2.IMREAD_COLOR)
            assert image is not None
            return float(image.mean())

        eventually(lambda: len(documents(watcher, TOPICS.telemetry)) > 1, LIMIT_S)
        assert picture() < 60.0
        assert picture(camera="bright") > 90.0
        assert code(order(any_broker, "snapshot", camera="attic")) == "command.camera"
