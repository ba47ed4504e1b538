"""The unit file, by systemd's own verdict where systemd is installed."""

from __future__ import annotations

import configparser
import inspect
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from agent import child, pipeline
from agent.connection import CONNECT_TIMEOUT_S
from agent.link import MqttLink
from engines.seal import CREDENTIAL, find_key

UNIT = Path(__file__).resolve().parents[1] / "systemd" / "tared.service"


def read_unit(section: str = "Service") -> configparser.SectionProxy:
    """A section of the unit."""
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]  # keeps the case of keys
    unit.read(UNIT)
    return unit[section]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    text = UNIT.read_text().replace("/opt/tared/.venv/bin/tared", sys.executable)
    (tmp_path / "tared.service").write_text(text)
    command = ["systemd-analyze", "verify", "--man=no", str(tmp_path / "tared.service")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "tared.service" not in done.stderr, done.stderr
    assert done.returncode == 0


def test_the_watchdog_is_fed_by_frames_and_may_restart() -> None:
    assert read_unit()["Type"] == "notify"
    assert int(read_unit()["WatchdogSec"]) > 0
    assert read_unit()["Restart"] == "on-failure"


def test_systemd_waits_as_long_as_the_daemon_takes_to_end() -> None:
    """The child is asked and killed, the threads are joined, the link delivers what is left."""
    parts_s = 2 * child._END_S + pipeline.JOIN_S + inspect.signature(MqttLink.close).parameters["timeout_s"].default
    assert parts_s + CONNECT_TIMEOUT_S + 1.0 < int(read_unit()["TimeoutStopSec"])


def test_the_camera_daemons_socket_is_seen_in_the_private_tmp() -> None:
    """What else it takes on a board nobody has tried; see systemd.exec(5) for the minus."""
    assert read_unit()["DynamicUser"] == read_unit()["PrivateTmp"] == "yes"
    assert read_unit()["BindPaths"] == "-/tmp/argus_socket"
    assert read_unit("Unit")["PartOf"] == "nvargus-daemon.service"
    assert "nvargus-daemon.service" in read_unit("Unit")["After"].split()


def test_without_a_key_file_the_unit_hands_over_what_is_read_as_no_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """systemd.exec(5): SetCredential= is the default where LoadCredential= of the same name finds nothing."""
    name, _, source = read_unit()["LoadCredential"].partition(":")
    default_name, _, default = read_unit()["SetCredential"].partition(":")
    assert (name, default_name) == (CREDENTIAL, CREDENTIAL)
    assert Path(source).is_absolute()  # any other is looked for in /etc/credstore, which systemd 249 does not know
    (tmp_path / name).write_text(default)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    assert find_key() is None


def test_the_command_in_the_unit_makes_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = read_unit()["LoadCredential"].partition(":")[2]
    commands = [line.partition("as root: ")[2] for line in UNIT.read_text().splitlines() if "/dev/urandom" in line]
    assert len(commands) == 1
    assert source in commands[0]
    monkeypatch.delenv("CREDENTIALS_DIRECTORY", raising=False)
    subprocess.run(["sh", "-c", commands[0].replace(source, str(tmp_path / "key"))], check=True)
    key = find_key(tmp_path / "key")
    assert key is not None
    assert len(key) in (31, 32)  # the last of 32 random bytes may be a newline
