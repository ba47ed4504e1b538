"""`tared watch`: every device that the broker knows is seen, however many there are."""

from __future__ import annotations

import json

import pytest
from brokers import RealBroker
from mqtt_clients import connected

from agent.contract.topics import Topics
from agent.mqtt.message import Message
from fleet.views.watch import watch

DEVICES = 300


def test_retained_messages_of_many_devices_are_shown(
    any_broker: RealBroker, capsys: pytest.CaptureFixture[str]
) -> None:
    with connected(any_broker.endpoint) as speaker:
        for number in range(DEVICES):
            document = {"state": "online", "session": "s", "boot_id": "b", "ts": 1.0}
            speaker.publish(Message(Topics("f", f"b{number}").status, json.dumps(document).encode(), retain=True))
    seen = set[str]()
    looks = 0

    def has_seen_all() -> bool:
        nonlocal looks
        looks += 1
        seen.update(json.loads(line)["device"] for line in capsys.readouterr().out.splitlines())
        return len(seen) == DEVICES or looks > 50

    watch(any_broker.endpoint, "f", as_json=True, ended=has_seen_all)
    assert len(seen) == DEVICES
