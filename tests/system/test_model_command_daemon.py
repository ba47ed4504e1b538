"""A new model brought onto a board that serves, by an operator with the right to, if it can be served."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from brokers import RealBroker, Watcher
from daemon_life import TOPICS
from job_kills import Case, copied, put_other_model
from worlds import make_world

from agent.core.state import JobState


def tared(*arguments: object) -> dict[str, Any]:
    command = [sys.executable, "-m", "fleet.cli", *map(str, arguments), "--json"]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    assert told.stdout, told.stderr
    result: dict[str, Any] = json.loads(told.stdout)
    return result


@pytest.mark.trial
@pytest.mark.broker
def test_a_released_model_is_sent_and_taken_up_and_an_older_one_is_not(tmp_path: Path, mosquitto: RealBroker) -> None:
    for name in ("operator", "maker"):
        tared("keys", "new", tmp_path / name)
    made = make_world(
        tmp_path / "made",
        lambda _: 1.0,
        20.0,
        camera={"source": "rtsp://camera"},
        observe={"period_s": 0.05, "alert_period_s": 0.05},
        commands={
            "operator_keys": [str(tmp_path / "operator.pub")],
            "release_keys": [str(tmp_path / "maker.pub")],
            "clock": "trusted",  # this machine may follow no time server
        },
    )
    (made.folder / "scene").write_text(str(made.folder / "clip.avi"))
    world = copied(made, tmp_path / "world", mosquitto)
    put_other_model(made)
    new, old = made.folder / "model.onnx", tmp_path / "old.onnx"
    old.write_bytes((world.folder / "model.onnx").read_bytes())
    garbage = tmp_path / "garbage.onnx"
    garbage.write_bytes(new.read_bytes()[:-100])
    statements = {}
    for path, version in ((new, 2), (old, 1), (garbage, 3)):
        statements[path] = tmp_path / f"{version}.json"
        key = ("--key", tmp_path / "maker.key", "--version", version)
        tared("release", path, *key, "--expires", 1, "-o", statements[path])

    def send(*model: str) -> dict[str, Any]:
        signed = ("--port", mosquitto.port, "--sign", tmp_path / "operator.key")
        return tared("send", TOPICS.device, "model", *model, *signed)

    with Watcher(mosquitto.endpoint) as watcher, ExitStack() as stack:
        case = Case(world, world.folder / "scene", mosquitto, stack)
        with case.living("life") as life:
            watcher.expect(TOPICS.birth)
            life.wait(lambda: bool(life.said("event=swap .*trigger=first-start")))
            refused = send(f"file={new}")
            assert refused["error"]["code"] == "command.release", "an operator alone"
            served = (world.folder / "model.onnx").read_bytes()
            failed = send(f"file={garbage}", f"release={statements[garbage]}")
            assert failed["error"]["code"] == "model.changed", "released, and no model all the same"
            assert (world.folder / "model.onnx").read_bytes() == served
            sent = send(f"file={new}", f"release={statements[new]}")
            assert sent["status"] == "SUCCEEDED", sent
            assert life.said("event=job trigger=model step=COMMITTED")
            assert (world.folder / "model.onnx").read_bytes() == new.read_bytes()
            back = send(f"file={old}", f"release={statements[old]}")
            assert back["error"]["code"] == "command.rollback"
        assert [job.state for job in case.records("model")] == [JobState.FAILED, JobState.COMMITTED]
