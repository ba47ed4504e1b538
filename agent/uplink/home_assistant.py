"""Announce the board to Home Assistant: one retained message lists the device and its sensors.

This is Home Assistant's MQTT device discovery:
https://www.home-assistant.io/integrations/mqtt/#device-discovery-payload. Every value is a template over documents that
the board publishes anyway; nothing else is sent for Home Assistant.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from agent.contract.messages import Birth
from agent.contract.topics import Topics
from agent.mqtt.config import HomeAssistantConfig
from agent.mqtt.message import Mailbox, Message
from agent.state.salvage import Row
from agent.state.store import StateStore

BORN = b"online"  # payload on its status topic when Home Assistant has started
_EXPIRES_S = 300  # a command's validity; the clocks of Home Assistant and the board may differ by as much
# For any prefix; a topic that nobody may publish to would end the connection each time.
_ANNOUNCEMENT = re.compile(r"(?!\$)[^\x00-\x1f+#\ud800-\udfff]{1,255}/device/[a-zA-Z0-9_-]{1,255}/config")
_HOTTEST = (
    "{% set hottest = namespace(c=none) %}{% for name, value in value_json.health.items() %}"
    "{% if name.startswith('temperature_') and (hottest.c is none or value > hottest.c) %}"
    "{% set hottest.c = value %}{% endif %}{% endfor %}{{ hottest.c }}"
)
_CAMERA = "CAMERA"
_MOST_CHARACTERS = 255  # Home Assistant refuses a longer state


def _number(name: str, unit: str, template: str, **more: str) -> dict[str, Any]:
    """Return a sensor of something measured."""
    shown = {"name": name, "value_template": template, "unit_of_measurement": unit}
    return {**shown, "state_class": "measurement", "suggested_display_precision": 1, **more}


# Sensors by the document they read. CAMERA stands for the camera's name, as a literal of the template language. An
# unknown value is none, which Home Assistant shows as unknown.
_SENSORS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "telemetry": {
        "up": {
            "platform": "binary_sensor",
            "name": "Camera",
            "value_template": "{{ 'ON' if value_json.cameras[CAMERA].up else 'OFF' }}",
            "device_class": "connectivity",
        },
        "fps": _number("Frame rate", "fps", "{{ value_json.cameras[CAMERA].fps }}"),
        "latency": _number(
            "Latency p99", "ms", "{{ value_json.cameras[CAMERA].latency_ms.p99 }}", device_class="duration"
        ),
        "fidelity": _number(
            "Fidelity",
            "%",
            "{% set it = value_json.cameras[CAMERA].fidelity | default(none) %}{{ it.estimate * 100 if it else none }}",
        ),
        "gain": _number(
            "Predicted gain",
            "dB",
            "{{ (value_json.cameras[CAMERA].drift | default({})).gain_db | default(none) }}",
        ),
        "temperature": _number("Temperature", "°C", _HOTTEST, device_class="temperature"),
        "drift": {
            "name": "Drift",
            "value_template": "{{ (value_json.cameras[CAMERA].drift | default({})).state | default(none) }}",
            "device_class": "enum",
            "options": ["calm", "warning", "alarm"],
        },
    },
    "birth": {
        "engine": {
            "name": "Engine",
            "value_template": "{{ value_json.engine | default(none) }}",
            "entity_category": "diagnostic",
        }
    },
    "status": {
        "state": {
            "name": "State",
            "value_template": "{{ value_json.state }}",
            "device_class": "enum",
            "options": ["online", "degraded", "stopping", "offline"],
            "entity_category": "diagnostic",
        },
        "reason": {
            "name": "Reason",
            "value_template": f"{{{{ (value_json.reason | default(''))[:{_MOST_CHARACTERS}] or none }}}}",
            "entity_category": "diagnostic",
        },
    },
}
# A command with a random id. Home Assistant's sandbox allows ranges up to 100000.
_RECALIBRATE = (
    '{"id": "ha-{{ (now().timestamp() * 1000) | int }}-{{ range(100000) | random }}", "op": "recalibrate", "args": {}, '
    f'"issued": {{{{ now().timestamp() }}}}, "expires": {{{{ now().timestamp() + {_EXPIRES_S} }}}}, "version": 1}}'
)


class Discovery(Mailbox):
    """A mailbox that announces the board with every connection, and whenever Home Assistant has started.

    It also removes earlier announcements: under another name or prefix, or after discovery was switched off. Their
    topics stay in the board's state until the broker has acknowledged the removal.
    """

    def __init__(
        self,
        topics: Topics,
        cameras: Sequence[str],
        birth: Birth,
        state: StateStore,
        config: HomeAssistantConfig,
        button: bool,
    ) -> None:
        """Prepare the announcement, and the removal of earlier ones.

        Args:
            state: Keeps the topics under which the board was announced.
            config: Whether to announce the board, and the prefix of Home Assistant's topics.
            button: Whether to offer a button that recalibrates. Only if commands need no signature: Home Assistant
                makes none.
        """
        super().__init__()
        self._kept = state
        self._announcement: Message | None = None
        self.prefix = config.prefix
        self.birth_topic = f"{self.prefix}/status" if config.enabled else ""
        self._announced = state.read("announcements", _topics) or []
        if config.enabled:
            identity = device_id(topics)
            document = describe(topics, identity, cameras, birth, button)
            payload = json.dumps(document, separators=(",", ":")).encode()
            self._announcement = Message(f"{self.prefix}/device/{identity}/config", payload, retain=True)
        topic = self._announcement.topic if self._announcement is not None else ""
        for old in self._announced:
            if old != topic:
                self.put(Message(old, b"", retain=True))
        if topic and topic not in self._announced:
            self._announced.append(topic)
            self._kept.write("announcements", [(topic,) for topic in self._announced])
        self.announce()

    def announce(self) -> None:
        """Publish the announcement again: Home Assistant may have lost it."""
        if self._announcement is not None:
            self.put(self._announcement)

    def delivered(self, message: Message) -> None:
        """Forget the topic of a removed announcement: another board may be announced there from now on."""
        if message is not self._announcement:
            self.forget(message.topic)
            self._announced.remove(message.topic)
            self._kept.write("announcements", [(topic,) for topic in self._announced])


def _topics(rows: Sequence[Row]) -> list[str]:
    """Return the topics that an announcement may have had."""
    return [topic for (topic,) in rows if _ANNOUNCEMENT.fullmatch(topic)]


def device_id(topics: Topics) -> str:
    """Return a unique name for a device, of the characters that a discovery topic may have."""
    name = f"{topics.fleet}/{topics.device}"
    plain = re.sub(r"[^a-zA-Z0-9_-]", "-", f"tared-{topics.fleet}-{topics.device}")
    unique = "-" not in topics.fleet and re.fullmatch(r"[a-zA-Z0-9_/-]+", name)
    return plain if unique else f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def describe(topics: Topics, identity: str, cameras: Sequence[str], birth: Birth, button: bool) -> dict[str, Any]:
    """Return the payload of the announcement: device, origin, components."""
    version = birth.agent_version
    hardware = {key: str(value) for key, value in birth.hardware.items()}
    device = {
        "identifiers": [identity],
        "name": topics.device,
        "manufacturer": "tared",
        "model": hardware.get("model") or hardware.get("machine", "unknown"),
        "sw_version": version,
        **({"hw_version": hardware["l4t"]} if "l4t" in hardware else {}),
    }
    components = _sensors(topics, cameras)
    if button:
        components["recalibrate"] = {
            "platform": "button",
            "name": "Recalibrate",
            "icon": "mdi:tune",
            "entity_category": "config",
            "command_topic": topics.command,
            "command_template": _RECALIBRATE,
        }
    for key, component in components.items():
        component["unique_id"] = f"{identity}_{key}"
    return {
        "device": device,
        "origin": {"name": "tared", "sw_version": version},
        "availability": [
            {
                "topic": topics.status,
                "value_template": "{{ 'online' if value_json.state in ('online', 'degraded') else 'offline' }}",
            }
        ],
        "qos": 1,
        "components": components,
    }


def _sensors(topics: Topics, cameras: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the sensors by key. With several cameras, the sensors of each carry its name."""
    sensors = {}
    for document, table in _SENSORS.items():
        for key, fields in table.items():
            sensor = {"platform": "sensor", "state_topic": getattr(topics, document), **fields}
            if _CAMERA not in fields["value_template"]:
                sensors[key] = sensor
            elif len(cameras) == 1:
                sensors[key] = sensor | _template_for(fields, cameras[0])
            else:
                for camera in cameras:
                    named = _template_for(fields, camera) | {"name": f"{camera} {fields['name'].lower()}"}
                    sensors[f"{key}_{hashlib.sha256(camera.encode()).hexdigest()[:8]}"] = sensor | named
    return sensors


def _template_for(fields: Mapping[str, Any], camera: str) -> dict[str, str]:
    """Insert a camera's name. The template language reads JSON's escapes, so any character is safe."""
    return {"value_template": fields["value_template"].replace(_CAMERA, json.dumps(camera))}
