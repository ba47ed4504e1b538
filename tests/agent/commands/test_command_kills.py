"""Commands to a device that is killed at any moment: each is done at most once, and answered truly."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from brokers import RealBroker, Watcher
from device import TOPICS
from places import SUPPORT
from warm_start import WarmProcess

from agent.contract.commands import CommandResult
from agent.mqtt.client import MqttClient
from agent.mqtt.message import Message
from fleet import operator

_DEVICE = SUPPORT / "command_device.py"
_RUN_DEVICE = f"import runpy; runpy.run_path({str(_DEVICE)!r}, run_name='__main__')"


class MortalDevice:
    """Killed with SIGKILL after a random while, and started again, until it is left alone."""

    def __init__(self, broker: RealBroker, folder: Path, seed: int) -> None:
        self.kills = 0
        self._arguments = [str(broker.port), str(folder)]
        self._random = random.Random(seed)
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> MortalDevice:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._leaving.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._leaving.is_set():
            process = WarmProcess(self._arguments, source=_RUN_DEVICE)
            # It needs some tenths of a second to be there: some of them die on the way, most at work.
            self._leaving.wait(self._random.uniform(0.1, 2.0))
            process.kill()
            process.wait()
            self.kills += 1


def send_all(broker: RealBroker, folder: Path, number: int, seed: int) -> Counter[str]:
    """How many commands ended with each status."""
    ends: list[CommandResult] = []
    with MortalDevice(broker, folder, seed) as device:
        while device.kills < number:
            command = operator.new_command("cancel", {}, time.time(), valid_s=600.0)
            results = list(operator.send(broker.endpoint, TOPICS, command, silence_s=60.0))
            ends.append(results[-1])
    path = folder / "done"
    done = Counter(path.read_text().split()) if path.exists() else Counter()
    assert not [identity for identity, times in done.items() if times > 1], "a command was carried out twice"
    for end in ends:
        if end.status == "SUCCEEDED":
            assert done[end.id] == 1, "a command was said to be done, and is not"
        else:
            assert end.error is not None
            assert end.error.code == "command.interrupted"
    return Counter(end.status for end in ends)


@pytest.fixture
def quick_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator, "REPEAT_S", 0.05)


@pytest.mark.trial
@pytest.mark.broker
@pytest.mark.usefixtures("quick_repeats")
def test_each_command_is_done_once_and_answered_truly_whenever_the_device_dies(
    tmp_path: Path, mosquitto: RealBroker
) -> None:
    ends = send_all(mosquitto, tmp_path, 10, seed=1)
    assert ends["SUCCEEDED"] > 10


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.broker
@pytest.mark.usefixtures("quick_repeats")
def test_each_command_is_done_once_over_hundreds_of_deaths(tmp_path: Path, mosquitto: RealBroker) -> None:
    assert send_all(mosquitto, tmp_path, 300, seed=2)["SUCCEEDED"] > 300


@pytest.mark.trial
@pytest.mark.broker
def test_a_command_that_is_sent_once_outlives_a_kill_in_the_next_tenth_of_a_second(
    tmp_path: Path, mosquitto: RealBroker
) -> None:
    """Its sender has nothing to repeat: the broker has taken it, and the device has not refused it."""
    device, chance = [str(mosquitto.port), str(tmp_path)], random.Random(3)
    commands = [operator.new_command("cancel", {}, time.time(), valid_s=600.0) for _ in range(12)]
    with Watcher(mosquitto.endpoint) as watcher, MqttClient(mosquitto.endpoint, "once") as sender:
        for command in commands:
            process = WarmProcess(device, source=_RUN_DEVICE)
            watcher.expect(TOPICS.status, state="degraded")
            sender.publish(Message(TOPICS.command, command.to_json()))
            time.sleep(chance.uniform(0.0, 0.1))
            process.kill()
            process.wait()
            process = WarmProcess(device, source=_RUN_DEVICE)
            while (result := watcher.expect(TOPICS.result(command.id)))["status"] == "ACCEPTED":
                pass
            assert result["status"] == "SUCCEEDED" or result["error"]["code"] == "command.interrupted"
            process.kill()
            process.wait()
    done = Counter((tmp_path / "done").read_text().split())
    assert set(done.values()) == {1}, "a command was carried out twice"


@pytest.mark.slow
@pytest.mark.broker
def test_a_result_that_no_broker_took_is_published_by_the_next_process(tmp_path: Path, mosquitto: RealBroker) -> None:
    """The sender does not repeat itself here: it waits."""
    device = [sys.executable, str(_DEVICE), str(mosquitto.port), str(tmp_path)]
    command = operator.new_command("recalibrate", {}, time.time(), valid_s=600.0)
    with subprocess.Popen(device) as process:
        results = operator.send(mosquitto.endpoint, TOPICS, command, silence_s=60.0)
        assert next(results).status == "ACCEPTED"
        process.kill()
    with Watcher(mosquitto.endpoint) as watcher, subprocess.Popen(device) as process:
        result = watcher.expect(TOPICS.result(command.id), status="FAILED")
        assert result["error"]["code"] == "command.interrupted"
        process.kill()
