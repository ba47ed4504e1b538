"""Home Assistant finds the board by itself: one retained message says what it is, and what of it may be shown.

Its MQTT device discovery: https://www.home-assistant.io/integrations/mqtt/#device-discovery-payload. Every value is a
template over documents that the board publishes anyway; nothing is sent for Home Assistant's sake but this.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agent.messages import Birth
from agent.publishing import Message
from agent.topics import Topics

log = logging.getLogger(__name__)

BORN = b"online"  # on its status topic, when Home Assistant has started
_EXPIRES_S = 300  # of a command: its clock and the board's may differ by so much
_HOTTEST = (
    "{% set hottest = namespace(c=none) %}{% for name, value in value_json.health.items() %}"
    "{% if name.startswith('temperature_') and (hottest.c is none or value > hottest.c) %}"
    "{% set hottest.c = value %}{% endif %}{% endfor %}{{ hottest.c }}"
)
# A command of ours with an id of its own. Home Assistant's sandbox allows ranges up to 100000.
_RECALIBRATE = (
    '{"id": "ha-{{ (now().timestamp() * 1000) | int }}-{{ range(100000) | random }}", "op": "recalibrate", "args": {}, '
    f'"issued": {{{{ now().timestamp() }}}}, "expires": {{{{ now().timestamp() + {_EXPIRES_S} }}}}, "version": 1}}'
)


class Discovery:
    """What is said to Home Assistant with every connection, and again whenever it is born.

    note: a file that remembers the topic under which the board was announced, so that it can be taken back, also after
    another name or prefix, or once it is switched off. button: whether to offer one that recalibrates; only where
    commands need no signature, for Home Assistant makes none.
    """

    def __init__(
        self, topics: Topics, camera: str, birth: Birth, note: Path, *, enabled: bool, prefix: str, button: bool
    ) -> None:
        self._note = note
        self._announcement: Message | None = None
        self.births = f"{prefix}/status" if enabled else ""
        if enabled:
            identity = device_id(topics)
            document = describe(topics, identity, camera, birth, button)
            payload = json.dumps(document, separators=(",", ":")).encode()
            self._announcement = Message(f"{prefix}/device/{identity}/config", payload, qos=1, retain=True)

    def greeting(self) -> list[Message]:
        """To be published now, in this order: what takes an earlier announcement back, and the announcement."""
        announced = self._noted()
        topic = self._announcement.topic if self._announcement is not None else ""
        taken_back = [Message(announced, b"", qos=1, retain=True)] if announced not in ("", topic) else []
        if announced != topic:
            self._remember(topic)
        return [*taken_back, *([self._announcement] if self._announcement is not None else [])]

    def _noted(self) -> str:
        try:
            return self._note.read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            return ""
        except (OSError, UnicodeDecodeError) as error:
            log.warning("home_assistant=note_unreadable error=%r", str(error))
            return ""

    def _remember(self, topic: str) -> None:
        try:
            if topic:
                self._note.write_text(f"{topic}\n", encoding="utf-8")
            else:
                self._note.unlink(missing_ok=True)
        except OSError as error:  # a disk that is full or read-only: Home Assistant shows the board all the same
            log.warning("home_assistant=note_unwritten error=%r", str(error))


def device_id(topics: Topics) -> str:
    """A name of the characters that a discovery topic may have, for each device another."""
    name = f"{topics.fleet}/{topics.device}"
    plain = re.sub(r"[^a-zA-Z0-9_-]", "-", f"tared-{topics.fleet}-{topics.device}")
    unique = "-" not in topics.fleet and re.fullmatch(r"[a-zA-Z0-9_/-]+", name)
    return plain if unique else f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def describe(topics: Topics, identity: str, camera: str, birth: Birth, button: bool) -> dict[str, Any]:
    """The payload: device, origin, components."""
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
    components = _sensors(topics, camera)
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


def _sensors(topics: Topics, camera: str) -> dict[str, dict[str, Any]]:
    # As a literal of the template language. JSON's escapes are its own, whatever characters a camera's name has.
    frames = f"value_json.cameras[{json.dumps(camera)}]"
    drift = f"({frames}.drift | default({{}}))"
    measured = {"state_class": "measurement"}
    diagnostic = {"entity_category": "diagnostic"}

    def enum(*options: str) -> Mapping[str, Any]:
        return {"device_class": "enum", "options": list(options)}

    def sensor(name: str, template: str, topic: str = topics.telemetry, **more: Any) -> dict[str, Any]:
        return {"platform": "sensor", "name": name, "state_topic": topic, "value_template": template, **more}

    return {
        "fps": sensor(
            "Frame rate",
            f"{{{{ {frames}.fps }}}}",
            unit_of_measurement="fps",
            suggested_display_precision=1,
            **measured,
        ),
        "latency": sensor(
            "Latency p99",
            f"{{{{ {frames}.latency_ms.p99 }}}}",
            device_class="duration",
            unit_of_measurement="ms",
            suggested_display_precision=1,
            **measured,
        ),
        "fidelity": sensor(
            "Fidelity",
            f"{{% set it = {frames}.fidelity | default(none) %}}{{{{ it.estimate * 100 if it else none }}}}",
            unit_of_measurement="%",
            suggested_display_precision=1,
            **measured,
        ),
        "gain": sensor(
            "Predicted gain",
            f"{{{{ {drift}.gain_db | default(none) }}}}",
            unit_of_measurement="dB",
            suggested_display_precision=1,
            **measured,
        ),
        "temperature": sensor(
            "Temperature",
            _HOTTEST,
            device_class="temperature",
            unit_of_measurement="°C",
            suggested_display_precision=0,
            **measured,
        ),
        "drift": sensor("Drift", f"{{{{ {drift}.state | default(none) }}}}", **enum("calm", "warning", "alarm")),
        "engine": sensor("Engine", "{{ value_json.engine | default(none) }}", topics.birth, **diagnostic),
        "state": sensor(
            "State",
            "{{ value_json.state }}",
            topics.status,
            **enum("online", "degraded", "stopping", "offline"),
            **diagnostic,
        ),
    }
