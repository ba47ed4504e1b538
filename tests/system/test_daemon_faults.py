"""The daemon when something around it is wrong: as a process, with real signals and files."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest
import yaml
from brokers import RealBroker, Watcher, eventually
from daemon_life import LIMIT_S, TOPICS, LiveCamera, answer, code, order
from warm_start import tared
from worlds import FIRST_COMMIT, OUTLASTS_S, SPEC, World, make_world

from fleet.operator import new_command, send


def steady(folder: Path, seconds: float = OUTLASTS_S, **changes: object) -> World:
    return make_world(folder, lambda _: 0.5, seconds, **changes)


def refused(world: World) -> str:
    """Run a daemon that must not start: what it said."""
    done = tared(*world.arguments())
    assert done.returncode == 2, done.stderr
    assert f"error: {json.loads(done.stdout)['error']['code']}: " in done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def test_a_second_daemon_on_the_same_state_is_refused(tmp_path: Path) -> None:
    world = steady(tmp_path)
    with world.running():
        eventually(lambda: (world.state_dir / "outbox.sqlite").exists(), 20.0)
        assert "error: state.locked" in refused(world)
    summary, _ = world.run("--frames", "10")  # the lock went with its process
    assert summary["frames"] == 10


def test_box_labels_for_a_classifier_are_refused_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "labels.jsonl").write_text('{"frame": 0, "labels": []}\n')
    world = steady(tmp_path, 1.0, camera={"labels": "labels.jsonl"})
    assert "error: labels.task" in refused(world)


def test_impatient_signals_still_end_in_a_summary(tmp_path: Path) -> None:
    world = steady(tmp_path)
    with world.running() as process:
        eventually(lambda: bool(list((world.state_dir / "jobs").glob("*/held_out.npy"))), 30.0)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
            process.send_signal(number)
        output, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, errors
    assert json.loads(output)["frames"] > 0
    assert "Traceback" not in errors


def test_other_preprocessing_does_not_serve_with_the_old_scales(calibrated_world: World) -> None:
    before = (calibrated_world.state_dir / "current").resolve()
    changed = {**SPEC, "input": {"color": "rgb", "resize": "stretch", "scale": 1 / 255}}
    (calibrated_world.folder / "model.yaml").write_text(yaml.safe_dump(changed))
    again, errors = calibrated_world.run("--frames", "20")
    assert "calibration.input" in errors
    assert again["artefact"] != str(before)


@pytest.mark.trial
def test_a_store_that_cannot_be_changed_does_not_stop_the_new_engine(tmp_path: Path) -> None:
    world = steady(tmp_path)
    (world.state_dir / "current").mkdir(parents=True)  # no symlink can take its place
    summary, errors = world.run(until="event=swap")  # no commit follows
    assert "store.write" in errors
    assert summary["dropped"] == {}
    assert len(summary["swaps"]) == 1


@pytest.mark.trial
@pytest.mark.broker
def test_a_cancelled_job_gives_the_observer_its_pace_back(tmp_path: Path, any_broker: RealBroker) -> None:
    mqtt = {"host": any_broker.host, "port": any_broker.port}
    # A block that outlasts the test: none can be suspicious, which would be a reason of its own for the alert pace.
    drift = {"block_s": 3600.0}
    world = steady(tmp_path, mqtt=mqtt, drift=drift)
    world.run(until=FIRST_COMMIT)  # what ends before that leaves no engine, and the next start a job of its own
    with Watcher(any_broker.endpoint) as watcher, world.running():
        watcher.expect(TOPICS.telemetry)
        command = new_command("recalibrate", {"frames": "9000"}, time.time())
        for result in send(any_broker.endpoint, TOPICS, command, silence_s=LIMIT_S):
            if result.step == "COLLECTING":
                order(any_broker, "cancel")
        assert code(result) == "recalibration.cancelled"
        begin = answer(any_broker, "status")
        eventually(lambda: answer(any_broker, "status")["frames"] >= begin["frames"] + 150, LIMIT_S)
        end = answer(any_broker, "status")
        # One observation per ten frames of the video; at the alert pace it would be one per two.
        assert end["fidelity"]["n"] - begin["fidelity"]["n"] < 0.2 * (end["frames"] - begin["frames"])


@pytest.mark.trial
@pytest.mark.broker
def test_a_rollback_by_the_operator_is_not_undone_by_an_alarm(tmp_path: Path, any_broker: RealBroker) -> None:
    mqtt = {"host": any_broker.host, "port": any_broker.port, "telemetry_period_s": 0.5}
    camera = LiveCamera(tmp_path, mqtt=mqtt)
    with Watcher(any_broker.endpoint) as watcher, camera.running():
        watcher.expect(TOPICS.event, kind="commit", trigger="first-start")
        camera.show("day")
        watcher.expect(TOPICS.event, kind="commit", trigger="alarm")
        assert order(any_broker, "rollback").status == "SUCCEEDED"
        watcher.expect(TOPICS.event, kind="alarm")  # it is the night's engine in the morning, and said to be
        for _ in range(6):
            watcher.expect(TOPICS.telemetry)
        kinds = [json.loads(m.payload).get("kind") for m in watcher.seen if m.topic == TOPICS.event]
        assert kinds.count("swap") == 2


@pytest.mark.parametrize(("tls", "warned"), [(None, 1), ({}, 0)])
def test_a_password_that_crosses_the_network_as_it_is_is_warned_of(
    tmp_path: Path, tls: dict[str, str] | None, warned: int
) -> None:
    (tmp_path / "password").write_text("hush-hush\n")
    broker = {"host": "broker.invalid", "username": "me", "password_file": "password", "tls": tls}
    _, errors = steady(tmp_path, 4.0, mqtt=broker).run("--frames", "5")
    assert errors.count("warning: the broker's password") == warned
    assert "hush-hush" not in errors
