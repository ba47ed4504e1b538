"""Try what the configuration names: open each camera, connect with the broker, read the keys."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path

from agent.camera.config import CameraConfig
from agent.commands.authority import Authority
from agent.common.errors import AgentError, CameraError, ConfigError
from agent.common.http.addresses import is_loopback
from agent.common.redaction import redact
from agent.config import Config
from agent.contract.topics import Topics
from agent.doctor.finding import Finding
from engines.trial import START_FOLDER

_FRAME_S = 15.0  # a stream's own limits are 5 s to open and 5 s for a frame
_BROKER_S = 8.0


def examine_configured(config: Config, service: bool = False) -> list[Finding]:
    """Try the cameras, the broker and the keys. service: the installed one, some of whose files only root can read."""
    several = len(config.every_camera) > 1
    cameras = [
        examine_camera(camera, f"camera {camera.name}" if several else "camera") for camera in config.every_camera
    ]
    return [*cameras, _broker(config, service), _keys(config, service)]


def examine_unconfigured(root: Path) -> list[Finding]:
    """List the cameras to choose from, where there is no configuration."""
    devices = sorted(root.glob("dev/video*"))
    closed = [path for path in devices if not os.access(path, os.R_OK | os.W_OK)]
    names = [f"v4l2:/{path.relative_to(root)}" for path in devices]
    names += ["csi: through nvargus-daemon"] if (root / "tmp/argus_socket").exists() else []
    if closed:
        remedy = "sudo usermod -aG video $USER, and log in again"
        return [Finding("cameras", f"{', '.join(names)}; no right to open {len(closed)} of them", False, False, remedy)]
    remedy = "" if names else "connect one, or use a file or an rtsp camera"
    return [Finding("cameras", ", ".join(names) or "none", bool(names), False, remedy)]


def examine_camera(camera: CameraConfig, name: str) -> Finding:
    """Read a first frame in a process of its own, which can be ended if a driver hangs, and may crash."""
    try:
        shown = camera.to_source().shown
    except CameraError as error:
        return Finding(name, error.found, False, True, error.remedy)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "agent.doctor.first_frame"],
            input=camera.model_dump_json(),  # not an argument, which every user can read: it may hold a password
            capture_output=True,
            text=True,
            timeout=_FRAME_S,
            check=False,
            cwd=START_FOLDER,
        )
    except subprocess.TimeoutExpired:
        remedy = "check whether another program uses the camera, and whether it plays elsewhere"
        return Finding(name, f"{shown}: no frame within {_FRAME_S:.0f} s", False, True, remedy)
    if done.returncode != 0:
        last = redact(done.stderr.strip().rpartition("\n")[2])
        found = f"{shown}: the test of the camera ended with {done.returncode} {last}".rstrip()
        return Finding(name, found, False, True, "try it with another program, and report this")
    report = json.loads(done.stdout)
    if "error" in report:
        return Finding(name, report["error"], False, True, report["remedy"])
    return Finding(name, f"{shown}: {report['width']} x {report['height']} in {report['seconds']:.1f} s", True, True)


def _keys(config: Config, service: bool) -> Finding:
    """Read the keys, as the daemon does at its start."""
    topics = Topics(config.mqtt.fleet, config.mqtt.device)
    try:
        authority = Authority(config.commands, topics, is_loopback(config.mqtt.host))
    except ConfigError as error:
        return _unreadable("keys", error, service)
    found = f"{len(authority.operators.ids)} of operators, {len(authority.releases.ids)} of releases"
    remedy = 'see docs/guides/commands.md, "Who may command a board"' if authority.warning else ""
    return Finding("keys", authority.warning or found, not authority.warning, False, remedy)


def _unreadable(name: str, error: AgentError, service: bool) -> Finding:
    """Return the finding for a file that cannot be read; that is no fault if only root may read it."""
    if service and os.geteuid() != 0:
        return Finding(
            name, f"only root can see this: {error.found}", False, False, "sudo tared doctor, with the same options"
        )
    return Finding(name, error.found, False, True, error.remedy)


def _broker(config: Config, service: bool) -> Finding:
    mqtt = config.mqtt
    if mqtt.host is None:
        return Finding("broker", "an embedded broker: mqtt.host is null", True, False)
    from agent.mqtt.client import MqttClient  # here, since paho may be missing

    where = f"{mqtt.host} port {mqtt.port}"
    try:
        # Not with the device's own id: the broker would end the connection of a daemon that runs.
        with MqttClient(mqtt.endpoint(), f"tared-doctor-{uuid.uuid4().hex[:8]}") as client:
            connected = client.wait_connected(_BROKER_S)
            outcome = client.outcome
    except ConfigError as error:
        return _unreadable("broker", error, service)
    except AgentError as error:
        return Finding("broker", error.found, False, True, error.remedy)
    remedy = "" if connected else "correct mqtt in the configuration, or see the broker's log"
    return Finding("broker", f"{where}: {outcome}", connected, True, remedy)
