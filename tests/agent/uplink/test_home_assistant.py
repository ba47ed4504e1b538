"""Announcements for Home Assistant, checked by its own published rules, with its templates rendered.

The rules are those of Home Assistant's MQTT integration: `schemas.py` (DEVICE_DISCOVERY_SCHEMA, which refuses unknown
keys), `sensor.py`, `binary_sensor.py`, `button.py` and the topic pattern of `discovery.py`. They are documented at
https://www.home-assistant.io/integrations/mqtt/#discovery-messages, /integrations/sensor.mqtt/, /binary_sensor.mqtt/
and /button.mqtt/.
"""

from __future__ import annotations

import json
import re
import time
from contextlib import AbstractContextManager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
import yaml
from brokers import RealBroker, eventually, free_port, on_the_air
from jinja2.sandbox import ImmutableSandboxedEnvironment
from kept import kept_in
from pydantic import JsonValue
from worlds import World, make_world

from agent.commands.dispatcher import parse_command
from agent.common.errors import ConfigError
from agent.config import load_config
from agent.contract.messages import Birth, CameraTelemetry, FidelityReport, Latency, Status, Telemetry
from agent.contract.topics import Topics
from agent.mqtt.client import Endpoint, MqttClient, SessionOptions
from agent.mqtt.config import HomeAssistantConfig
from agent.mqtt.message import Message
from agent.state.store import StateStore
from agent.uplink.home_assistant import Discovery, describe, device_id
from agent.uplink.link import MqttLink

TOPICS = Topics("default", "board")
BIRTH = Birth(agent_version="1.2.3", hardware={"model": "Orin", "l4t": "R36"}, engine="abc")
CAMERA = 'front "door" {{ 7 }} é'
DISCOVERY_TOPIC = re.compile(r"homeassistant/device/[a-zA-Z0-9_-]+/config")

DEVICE_KEYS = {
    "identifiers", "connections", "manufacturer", "model", "model_id", "name", "hw_version", "serial_number",
    "sw_version", "via_device", "suggested_area", "configuration_url",
}  # fmt: skip
ORIGIN_KEYS = {"name", "sw_version", "support_url"}
SHARED_KEYS = {
    "device", "origin", "components", "availability", "availability_mode", "availability_topic",
    "availability_template", "payload_available", "payload_not_available", "state_topic",
    "command_topic", "qos", "encoding",
}  # fmt: skip
ENTITY_KEYS = {"platform", "name", "unique_id", "icon", "entity_category", "device_class"}
SENSOR_KEYS = ENTITY_KEYS | {
    "state_topic", "value_template", "unit_of_measurement", "state_class", "options", "suggested_display_precision",
}  # fmt: skip
BINARY_KEYS = ENTITY_KEYS | {"state_topic", "value_template", "payload_on", "payload_off"}
BUTTON_KEYS = ENTITY_KEYS | {"command_topic", "command_template", "payload_press", "retain"}
UNITS: dict[str, set[str | None]] = {
    "duration": {"d", "h", "min", "s", "ms", "μs"},
    "temperature": {"°C", "°F", "K"},
    "enum": {None},
}
BINARY_CLASSES = {None, "connectivity", "problem", "running"}  # of many
CATEGORIES = {
    "sensor": {None, "diagnostic"},
    "binary_sensor": {None, "diagnostic"},
    "button": {None, "config", "diagnostic"},
}


def check_rules(document: dict[str, Any]) -> None:
    """Fails for what Home Assistant would refuse."""
    assert document.keys() >= {"device", "origin", "components"}
    assert document.keys() <= SHARED_KEYS
    device = document["device"]
    assert device.keys() <= DEVICE_KEYS
    assert device.get("identifiers") or device.get("connections")
    assert document["origin"]["name"]
    assert document["origin"].keys() <= ORIGIN_KEYS
    for place in document["availability"]:
        assert place["topic"]
    identities = [component["unique_id"] for component in document["components"].values()]
    assert len(set(identities)) == len(identities)  # required of each entity of a device
    for component in document["components"].values():
        check_component(component)


def check_component(component: dict[str, Any]) -> None:
    platform = component["platform"]
    assert component.get("entity_category") in CATEGORIES[platform]
    if platform == "button":
        assert component["command_topic"]
        assert component.keys() <= BUTTON_KEYS
        return
    assert component["state_topic"]
    if platform == "binary_sensor":
        assert component.keys() <= BINARY_KEYS
        assert component.get("device_class") in BINARY_CLASSES
        return
    assert component.keys() <= SENSOR_KEYS
    kind = component.get("device_class")
    assert component.get("unit_of_measurement") in UNITS.get(kind or "", {component.get("unit_of_measurement")})
    assert component.get("state_class") in (None, "measurement", "total", "total_increasing")
    # An enum has options and no class of states; nothing else has options.
    assert ("options" in component) == (kind == "enum")
    assert not (kind == "enum" and "state_class" in component)


def render(template: str, payload: bytes = b"{}") -> str:
    """As Home Assistant does, in its sandbox, with what it offers."""
    environment = ImmutableSandboxedEnvironment()
    environment.globals["now"] = lambda: datetime.now(timezone.utc)
    return environment.from_string(template).render(value_json=json.loads(payload)).strip()


def telemetry(**camera: Any) -> bytes:
    told = CameraTelemetry(fps=29.97, latency_ms=Latency(p50=4.0, p99=9.5), **{"up": True, **camera})
    health: dict[str, JsonValue] = {"temperature_cpu_c": 51.5, "temperature_tj_c": 61.0, "rss_bytes": 1.0}
    return Telemetry(epoch=1, seq=1, ts=0.0, cameras={CAMERA: told}, health=health).to_json()


def shown(payload: bytes, topic: str) -> dict[str, str]:
    """Every sensor that reads this topic, as it would show."""
    components = describe(TOPICS, "id", [CAMERA], BIRTH, True)["components"]
    return {
        key: render(each["value_template"], payload)
        for key, each in components.items()
        if each.get("state_topic") == topic
    }


@pytest.mark.parametrize("button", [True, False])
def test_the_announcement_keeps_home_assistants_rules(button: bool) -> None:
    document = json.loads(json.dumps(describe(TOPICS, device_id(TOPICS), [CAMERA], BIRTH, button)))
    check_rules(document)
    assert ("recalibrate" in document["components"]) == button


def test_sensors_show_the_telemetry() -> None:
    drift = {"state": "warning", "gain_db": 3.5}
    fidelity = FidelityReport(estimate=0.75, low=0.5, high=1.0, n=9)
    assert shown(telemetry(drift=drift, fidelity=fidelity), TOPICS.telemetry) == {
        "up": "ON",
        "fps": "29.97",
        "latency": "9.5",
        "fidelity": "75.0",
        "gain": "3.5",
        "temperature": "61.0",
        "drift": "warning",
    }
    assert shown(BIRTH.to_json(), TOPICS.birth) == {"engine": "abc"}
    status = Status(state="degraded", session="", boot_id="", ts=0.0)
    assert shown(status.to_json(), TOPICS.status) == {"state": "degraded", "reason": "None"}


def test_the_reason_shows_as_far_as_a_state_may_be_long() -> None:
    why = "the float reference serves, because " + 30 * "a candidate was refused; "
    status = Status(state="degraded", session="", boot_id="", ts=0.0, reason=why)
    assert shown(status.to_json(), TOPICS.status)["reason"] == why[:255].strip()


def test_a_camera_that_is_lost_shows_as_not_connected() -> None:
    """By the two payloads that a binary sensor knows of itself."""
    lost = telemetry(up=False, lost="camera.silent")
    assert shown(lost, TOPICS.telemetry)["up"] == "OFF"


def test_missing_values_show_as_unknown() -> None:
    """A payload `None` is that to Home Assistant's sensors."""
    unknown = shown(telemetry(), TOPICS.telemetry)
    assert {unknown[key] for key in ("fidelity", "gain", "drift")} == {"None"}
    assert shown(Birth(agent_version="1").to_json(), TOPICS.birth) == {"engine": "None"}


@pytest.mark.parametrize(("state", "there"), [("online", "online"), ("degraded", "online"), ("offline", "offline")])
def test_a_degraded_board_is_available(state: Any, there: str) -> None:
    (place,) = describe(TOPICS, "id", [CAMERA], BIRTH, True)["availability"]
    assert render(place["value_template"], Status(state=state, session="", boot_id="", ts=0.0).to_json()) == there


def test_the_button_makes_a_new_command_every_time() -> None:
    template = describe(TOPICS, "id", [CAMERA], BIRTH, True)["components"]["recalibrate"]["command_template"]
    payloads = [render(template).encode() for _ in range(50)]
    commands = [parse_command(payload, time.time()).command for payload in payloads]
    assert {command.op for command in commands} == {"recalibrate"}
    assert len({command.id for command in commands}) == 50
    assert all(60.0 < command.expires - time.time() <= 300.0 for command in commands)


def test_every_device_has_an_id_of_its_own() -> None:
    names = [("a", "b-c"), ("a-b", "c"), ("a", "b c"), ("a", "b.c"), ("å", "b"), ("ä", "b"), ("a", "b_c")]
    ids = [device_id(Topics(fleet, device)) for fleet, device in names]
    assert len(set(ids)) == len(names)
    assert all(DISCOVERY_TOPIC.fullmatch(f"homeassistant/device/{each}/config") for each in ids)
    assert ids[0] == "tared-a-b-c"


@pytest.mark.parametrize("prefix", ["", "a/#", "+", "a//b", "home\n"])
def test_a_prefix_that_is_no_topic_is_refused(tmp_path: Path, prefix: str) -> None:
    world = make_world(tmp_path, lambda _: 0.5, 1.0, mqtt={"home_assistant": {"prefix": prefix}})
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(world.config))
    with pytest.raises(ConfigError, match=r"mqtt\.home_assistant\.prefix"):
        load_config(tmp_path / "config.yaml")


# ---- on the air


class Board:
    """A device with a link of its own for each configuration."""

    def __init__(self, endpoint: Endpoint, state: StateStore) -> None:
        self.endpoint = endpoint
        self.state = state

    def link(self, enabled: bool = True, topics: Topics = TOPICS) -> AbstractContextManager[MqttLink]:
        config = HomeAssistantConfig(enabled=enabled)
        discovery = Discovery(topics, ["front"], BIRTH, self.state, config, button=True)
        return on_the_air(self.endpoint, topics, BIRTH, discovery=discovery)

    def retained(self) -> list[str]:
        """The topics under which a newcomer finds devices."""
        with MqttClient(
            self.endpoint, "newcomer", SessionOptions(subscriptions=["homeassistant/device/+/config", "mark"])
        ) as client:
            assert client.wait_connected(60.0)
            client.publish(Message("mark", b""))
            client.inboxes["mark"].get(timeout=60.0)
            inbox = client.inboxes["homeassistant/device/+/config"]
            return [inbox.get_nowait().topic for _ in range(inbox.qsize())]


@pytest.fixture
def board(any_broker: RealBroker, tmp_path: Path) -> Board:
    return Board(any_broker.endpoint, kept_in(tmp_path))


@pytest.mark.broker
def test_a_device_is_announced_retained_and_again_at_each_birth(board: Board) -> None:
    topic = f"homeassistant/device/{device_id(TOPICS)}/config"
    subscriptions = ["homeassistant/device/#"]
    with MqttClient(board.endpoint, "ha", SessionOptions(subscriptions=subscriptions)) as home, board.link() as link:
        assert home.wait_connected(60.0)
        first = home.inbox.get(timeout=60.0)
        check_rules(json.loads(first.payload))
        assert first.topic == topic
        home.publish(Message("homeassistant/status", b"offline"))
        home.publish(Message("homeassistant/status", b"online"))

        def answered() -> bool:
            link.answer_births()
            return not home.inbox.empty()

        eventually(answered)
        assert home.inbox.get_nowait().payload == first.payload
        assert home.inbox.empty()
    assert board.retained() == [topic]


@pytest.mark.trial
@pytest.mark.slow
@pytest.mark.broker
def test_the_announced_button_recalibrates_a_daemon(any_broker: RealBroker, calibrated_world: World) -> None:
    """The daemon announces itself, and does what the button that it announced says."""
    world = calibrated_world
    world.change(mqtt={"host": any_broker.host, "port": any_broker.port, "home_assistant": {"enabled": True}})
    subscriptions = ["homeassistant/device/+/config", f"{TOPICS.command}/+/result"]
    with MqttClient(any_broker.endpoint, "ha", SessionOptions(subscriptions=subscriptions)) as home, world.running():
        announced = json.loads(home.inboxes[subscriptions[0]].get(timeout=60.0).payload)
        check_rules(announced)
        button = announced["components"]["recalibrate"]
        home.publish(Message(button["command_topic"], render(button["command_template"]).encode()))
        assert json.loads(home.inboxes[subscriptions[1]].get(timeout=60.0).payload)["status"] == "ACCEPTED"
    assert kept_in(world.state_dir).read("announcements", list)


@pytest.mark.broker
def test_the_announcement_is_removed_once_it_is_switched_off(board: Board) -> None:
    with board.link():
        eventually(board.retained)
    with board.link(enabled=False) as link:
        eventually(lambda: link.connected and not board.retained())
    assert board.state.read("announcements", list) is None


@pytest.mark.broker
def test_an_announcement_is_removed_later_if_no_broker_was_there(board: Board) -> None:
    """Switched off while the broker was away, renamed before it was back."""
    with board.link():
        eventually(board.retained)
    away = Board(Endpoint("127.0.0.1", free_port()), board.state)
    with away.link(enabled=False) as link:
        eventually(lambda: link.outcome != "not tried yet")
    renamed = Topics("default", "gate")
    there = f"homeassistant/device/{device_id(renamed)}/config"
    with board.link(topics=renamed):
        eventually(lambda: board.retained() == [there])
        eventually(lambda: board.state.read("announcements", list) == [(there,)])
