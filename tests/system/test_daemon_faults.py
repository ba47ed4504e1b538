"""The daemon when something around it is wrong: as a process, with real signals and files."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest
import yaml
from brokers import RealBroker, Watcher, eventually
from warm_start import tared
from worlds import FIRST_COMMIT, OUTLASTS_S, SPEC, World, make_world

from agent.contract.topics import Topics
from fleet.operator import new_command, send

TOPICS = Topics("default", "board")


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


def test_a_state_dir_that_cannot_be_is_named(tmp_path: Path) -> None:
    world = steady(tmp_path, 1.0)
    world.state_dir.write_text("a file in the way")
    assert "error: state.unwritable" in refused(world)


def test_box_labels_for_a_classifier_are_refused_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "labels.jsonl").write_text('{"frame": 0, "labels": []}\n')
    world = steady(tmp_path, 1.0, camera={"labels": "labels.jsonl"})
    assert "error: labels.task" in refused(world)


def test_impatient_signals_still_end_in_a_summary(tmp_path: Path) -> None:
    world = steady(tmp_path)
    with world.running() as process:
        eventually(lambda: bool(list((world.state_dir / "jobs").glob("*/held_out.npy"))), 30.0)
        for _ in range(3):
            process.send_signal(signal.SIGTERM)
            time.sleep(0.05)  # apart enough to arrive as three
        output, errors = process.communicate(timeout=20.0)
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
        for result in send(any_broker.endpoint, TOPICS, command, silence_s=20.0):
            if result.step == "COLLECTING":
                list(send(any_broker.endpoint, TOPICS, new_command("cancel", {}, time.time())))
        assert result.status == "FAILED"
        assert result.error is not None
        assert result.error.code == "recalibration.cancelled"
        (start_s, before), (end_s, after) = observed(watcher, time.time()), observed(watcher, time.time() + 4.0)
        # One observation per second of video, ten of which pass in one; at the alert pace it would be fifty.
        assert (after - before) / (10 * (end_s - start_s)) < 2.0


def observed(watcher: Watcher, since_s: float) -> tuple[float, int]:
    """When the first telemetry from `since_s` on was sent, and how many frames are behind its fidelity."""
    while (sample := watcher.expect(TOPICS.telemetry))["ts"] < since_s:
        pass
    return sample["ts"], int(sample["cameras"]["camera"]["fidelity"]["n"])


@pytest.mark.trial
@pytest.mark.broker
def test_what_the_operator_rolled_back_does_not_return_by_itself(tmp_path: Path, any_broker: RealBroker) -> None:
    mqtt = {"host": any_broker.host, "port": any_broker.port}
    world = make_world(tmp_path, lambda ts: 0.06 if ts < 60.0 else 1.0, OUTLASTS_S, mqtt=mqtt)
    with Watcher(any_broker.endpoint) as watcher, world.running():
        watcher.expect(TOPICS.event, kind="swap", trigger="first-start")
        watcher.expect(TOPICS.event, kind="swap", trigger="alarm")
        *_, last = send(any_broker.endpoint, TOPICS, new_command("rollback", {}, time.time()))
        assert last.status == "SUCCEEDED"
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
