"""The whole daemon as a process: real video, real broker, real signals."""

from __future__ import annotations

import json
import signal
import socket
import stat
import time
from itertools import groupby
from pathlib import Path

import psutil
import pytest
from brokers import RealBroker, Watcher, eventually
from daemon_life import LIMIT_S, TOPICS, LiveCamera, answer, code, order
from worlds import OUTLASTS_S, World, make_world

from agent.contract.commands import CommandResult
from engines.store.artefact import Store
from fleet.operator import new_command, send

USUAL = 60  # observed frames, from which a change of the view has a cause


def mqtt(broker: RealBroker) -> dict[str, object]:
    return {"host": broker.host, "port": broker.port}


@pytest.mark.broker
def test_night_calibration_morning_alarm_recalibration_and_swap(tmp_path: Path, any_broker: RealBroker) -> None:
    """The night ends when its engine serves and the usual view is known, however long that took."""
    camera = LiveCamera(tmp_path, mqtt={**mqtt(any_broker), "telemetry_period_s": 0.5})
    world = camera.world
    with Watcher(any_broker.endpoint) as watcher, camera.running() as process:
        watcher.expect(TOPICS.event, kind="commit", trigger="first-start")
        eventually(lambda: answer(any_broker, "status")["fidelity"]["n"] >= USUAL, LIMIT_S)
        changed_s = time.time()
        camera.show("day")
        watcher.expect(TOPICS.event, kind="commit", trigger="alarm")
        process.terminate()
        output, _ = process.communicate(timeout=LIMIT_S)
        summary = json.loads(output)
        watcher.expect(TOPICS.status, state="offline")
        seen = watcher.seen

    assert [swap["trigger"] for swap in summary["swaps"]] == ["first-start", "alarm"]
    first, second = summary["swaps"]
    (alarm,) = summary["alarms"]
    assert first["ts"] < changed_s < alarm["ts"] < second["ts"]
    assert first["ts"] < alarm["onset_ts"] < alarm["ts"]
    assert alarm["gain_db"] > 3.0
    assert second["fidelity"] > second["fidelity_before"]

    store = Store(world.state_dir)
    current, previous = store.read("current"), store.read("previous")
    assert current is not None
    assert previous is not None
    assert (current.id, previous.id) == (second["artefact"], first["artefact"])
    assert summary["artefact"] == str(current.path)
    assert not (world.state_dir / "jobs").exists() or not list((world.state_dir / "jobs").iterdir())

    states = [json.loads(message.payload)["state"] for message in seen if message.topic == TOPICS.status]
    assert [state for state, _ in groupby(states)] == ["degraded", "online", "stopping", "offline"]
    numbered = [json.loads(m.payload) for m in seen if m.topic in (TOPICS.telemetry, TOPICS.event)]
    assert [message["seq"] for message in numbered] == list(range(1, len(numbered) + 1))
    assert len({message["epoch"] for message in numbered}) == 1
    selections = [message["selection"] for message in numbered if "selection" in message]
    assert [chosen["taken"] - chosen["held_out"] >= 32 for chosen in selections] == [True, True]
    assert json.loads((world.state_dir / "selection.json").read_text()) == selections[-1]
    kept = [path for path in world.state_dir.rglob("*") if not path.is_symlink()]
    assert {stat.S_IMODE(path.stat().st_mode) & 0o077 for path in kept} == {0}, "frames, and what is learnt of them"
    kinds = [message["kind"] for message in numbered if "kind" in message]
    assert kinds.count("swap") == 2
    assert kinds.count("alarm") == 1
    (cause,) = [message for message in numbered if message.get("kind") == "cause"]
    assert cause["changes"][0]["cause"] == "light"
    assert cause["changes"][0]["octaves"] > 2.0
    gains = {remedy["remedy"]: remedy["gain_db"] for remedy in cause["remedies"]}
    assert min(gains["recalibrate"], gains["restore exposure"]) > 3.0
    assert any("cameras" in message for message in numbered)


def long_night(folder: Path, broker: RealBroker) -> World:
    return make_world(folder, lambda _: 0.5, OUTLASTS_S, mqtt=mqtt(broker))


def results(broker: RealBroker, op: str, **arguments: str) -> list[CommandResult]:
    return list(send(broker.endpoint, TOPICS, new_command(op, arguments, time.time()), silence_s=LIMIT_S))


@pytest.mark.broker
def test_an_operator_recalibrates_and_rolls_back(calibrated_world: World, any_broker: RealBroker) -> None:
    calibrated_world.change(mqtt=mqtt(any_broker))
    store = Store(calibrated_world.state_dir)
    first = store.read("current")
    with calibrated_world.running():
        answers = results(any_broker, "recalibrate", frames="24", method="max")
        statuses = [result.status for result in answers]
        assert statuses[0] == "ACCEPTED"
        assert statuses[-1] == "SUCCEEDED", answers[-1]
        assert set(statuses[1:-1]) == {"IN_PROGRESS"}
        steps = list(dict.fromkeys(result.step for result in answers if result.step))
        assert steps == ["COLLECTING", "CALIBRATING", "PLANNING", "BUILDING", "VALIDATING", "PROBATION"]
        second = store.read("current")
        assert first is not None
        assert second is not None
        assert second.id != first.id
        assert second.manifest["inputs"]["calibration"]["method"] == "max"
        assert answers[-1].result is not None
        assert answers[-1].result["artefact"] == second.id

        assert [result.status for result in results(any_broker, "rollback")] == ["ACCEPTED", "IN_PROGRESS", "SUCCEEDED"]
        current = store.read("current")
        assert current is not None
        assert current.id == first.id
        status = answer(any_broker, "status")
        assert status["engine"] == first.id
        assert (status["automatic"], status["stopped_by"]) == (True, "")

        refused = order(any_broker, "recalibrate", method="guess")
        assert (refused.status, code(refused)) == ("FAILED", "threshold.method")


@pytest.mark.broker
@pytest.mark.parametrize("numbers", [[signal.SIGINT], [signal.SIGTERM, signal.SIGINT, signal.SIGTERM]])
def test_a_signal_ends_it_cleanly_with_its_child(
    tmp_path: Path, any_broker: RealBroker, numbers: list[signal.Signals]
) -> None:
    world = long_night(tmp_path, any_broker)
    with Watcher(any_broker.endpoint) as watcher, world.running() as process:
        watcher.expect(TOPICS.event, kind="job")
        eventually(lambda: bool(psutil.Process(process.pid).children()), LIMIT_S)
        children = psutil.Process(process.pid).children()
        for number in numbers:
            process.send_signal(number)
        output, errors = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, errors
        assert json.loads(output)["frames"] > 0
        assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)
        watcher.expect(TOPICS.status, state="stopping")
        watcher.expect(TOPICS.status, state="offline")
        assert "Traceback" not in errors


def test_a_restart_serves_what_was_current_and_a_damaged_one_falls_back(calibrated_world: World) -> None:
    world, first = calibrated_world, (calibrated_world.state_dir / "current").resolve()
    again, _ = world.run("--frames", "20")
    assert again["artefact"] == str(first)
    assert again["swaps"] == []
    assert again["frames"] == 20

    engine = first / "engine.onnx"
    engine.write_bytes(engine.read_bytes()[:-1])
    rebuilt, errors = world.run("--frames", "20")
    assert (rebuilt["artefact"], rebuilt["swaps"]) == (str(first), [])
    assert "artefact.damaged" in errors
    assert "engine.onnx" in errors

    for name in ("engine.onnx", "calibration.json"):
        (engine.parent / name).write_bytes(b"")
    fallen, errors = world.run("--frames", "20")
    assert fallen["artefact"] != str(first)
    assert "calibration.json" in errors


@pytest.mark.parametrize(
    ("most_bytes", "refused"), [(6_000, "the journal of jobs, kept"), (130_000, "recalibration.disk")]
)
def test_a_full_disk_costs_the_job_and_not_the_video(tmp_path: Path, most_bytes: int, refused: str) -> None:
    world = make_world(tmp_path, lambda _: 0.5, OUTLASTS_S, observe={"held_out": 256}, calibration={"frames": 1200})
    summary, said = world.run(until=refused, file_bytes=most_bytes)
    assert said.count("the journal of jobs, kept") <= 1
    assert summary["dropped"] == {}
    assert summary["swaps"] == []
    assert not list((world.state_dir / "jobs").glob("*"))


def test_a_killed_daemon_leaves_nothing_that_hinders_the_next(tmp_path: Path, any_broker: RealBroker) -> None:
    world = long_night(tmp_path, any_broker)
    with world.running() as process:
        eventually(lambda: bool(list((world.state_dir / "jobs").glob("*/held_out.npy"))), LIMIT_S)
        children = psutil.Process(process.pid).children()
        process.send_signal(signal.SIGKILL)
        process.communicate()
    _, gone = (0, 0), psutil.wait_procs(children, timeout=LIMIT_S)
    assert not gone[1]
    world.config["camera"]["speed"] = 0
    summary, _ = world.run("--frames", "50")
    assert summary["frames"] == 50
    assert not list((world.state_dir / "jobs").glob("*"))


@pytest.mark.parametrize("camera", ["clip.avi", "rtsp://127.0.0.1:1/nothing"], ids=["a camera", "a lost camera"])
def test_systemd_is_notified_from_start_to_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, camera: str) -> None:
    world = make_world(tmp_path, lambda _: 0.5, OUTLASTS_S, camera={"source": camera})
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(LIMIT_S)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        with world.running() as process:
            said: list[bytes] = []
            while said.count(b"WATCHDOG=1") < 4:
                said.append(manager.recv(100))
            process.terminate()
            _, errors = process.communicate(timeout=LIMIT_S)
            while said[-1] != b"STOPPING=1":
                said.append(manager.recv(100))
    assert process.returncode == 0, errors
    assert said[0] == b"READY=1"
