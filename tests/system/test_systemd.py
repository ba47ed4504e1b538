"""The unit file, by systemd's own verdict where systemd is installed; `make test` installs it."""

from __future__ import annotations

import inspect
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from pydantic import ValidationError
from systemd_unit import DROP_IN, DROP_INS, MAX_EXPOSURE, UNIT, read_unit
from systemd_unit import systemd_analyze as systemd_analyze

from agent.camera import capture
from agent.camera import opencv as opening
from agent.camera.config import CameraConfig
from agent.camera.stream_health import first_picture_s
from agent.common.credentials import locate
from agent.common.errors import ConfigError
from agent.jobs import child_process as child
from agent.mqtt.connection import CONNECT_TIMEOUT_S
from agent.serving import pipeline
from agent.system.service_unit import DROP_INS as DROP_IN_NAMES
from agent.uplink.link import MqttLink
from engines.store.signing import CREDENTIAL, find_key

_LONGEST_SILENCE_S = 20.0  # that camera.silence_s may be


def installed(folder: Path, drop_ins: Sequence[str]) -> Path:
    """The unit in a folder, with a program that is there, and the drop-ins that are wanted."""
    (folder / "tared.service").write_text(UNIT.read_text().replace("/opt/tared/.venv/bin/tared", sys.executable))
    (folder / "tared.service.d").mkdir()
    for name in drop_ins:
        shutil.copy(DROP_INS / name, folder / "tared.service.d")
    return folder / "tared.service"


@pytest.mark.parametrize("drop_ins", [(), DROP_IN_NAMES])
def test_systemd_accepts_the_unit(tmp_path: Path, systemd_analyze: str, drop_ins: Sequence[str]) -> None:
    command = [systemd_analyze, "verify", "--man=no", str(installed(tmp_path, drop_ins))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "tared" not in done.stderr, done.stderr
    assert done.returncode == 0


@pytest.mark.parametrize("drop_ins", [(), *((name,) for name in DROP_IN_NAMES)])
def test_systemd_finds_little_to_say_against_its_security(
    tmp_path: Path, systemd_analyze: str, drop_ins: Sequence[str]
) -> None:
    unit = installed(tmp_path, drop_ins)
    command = [systemd_analyze, "security", "--offline=true", f"--threshold={MAX_EXPOSURE * 10:.0f}", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout  # which is 1 above the threshold
    (exposure,) = re.findall(r"Overall exposure level for tared\.service: ([\d.]+)", done.stdout)
    assert float(exposure) <= MAX_EXPOSURE


def test_the_security_check_can_fail(tmp_path: Path, systemd_analyze: str) -> None:
    (tmp_path / "tared.service").write_text("[Service]\nExecStart=/bin/true\n")
    command = [systemd_analyze, "security", "--offline=true", "--threshold=20", str(tmp_path / "tared.service")]
    assert subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 1


def test_the_drop_ins_are_off() -> None:
    """In the source tree and in a wheel systemd looks for none; `tared install-service` writes them when asked."""
    assert sorted(path.name for path in DROP_INS.iterdir()) == sorted(DROP_IN_NAMES)
    assert "MemoryDenyWriteExecute" not in read_unit()
    assert "MemoryDenyWriteExecute=yes" in DROP_IN.read_text()
    assert "nvargus" not in "".join(line for line in UNIT.read_text().splitlines() if not line.startswith("#"))


def test_a_camera_that_is_away_for_a_day_does_not_use_up_the_starts() -> None:
    """Each start that fails takes RestartSec at least."""
    unit = read_unit("Unit")
    starts = int(unit["StartLimitIntervalSec"]) / int(read_unit()["RestartSec"])
    assert starts < int(unit["StartLimitBurst"])


def test_a_lost_camera_is_tried_again_well_within_the_watchdogs_time() -> None:
    caps = re.findall(r"Backoff\(first_s=[\d.]+, cap_s=([\d.]+)", inspect.getsource(capture.CaptureThread))
    assert len(caps) == 1
    with pytest.raises(ValidationError):
        CameraConfig(source="csi:0", silence_s=_LONGEST_SILENCE_S + 0.1)
    # To wait, to open, and for a first picture that never comes.
    attempt_s = float(caps[0]) + opening._TIMEOUT_MS / 1000.0 + first_picture_s(_LONGEST_SILENCE_S)
    assert attempt_s < 2 / 3 * int(read_unit()["WatchdogSec"])


def test_every_credential_has_a_default() -> None:
    """systemd.exec(5): without one, a file that is not there keeps the service from starting."""
    lines = UNIT.read_text().splitlines()
    loaded = re.findall(r"^LoadCredential=([\w-]+):(/\S+)$", "\n".join(lines), re.MULTILINE)
    defaults = re.findall(r"^SetCredential=([\w-]+):none$", "\n".join(lines), re.MULTILINE)
    assert [name for name, _ in loaded] == defaults
    assert CREDENTIAL in defaults
    assert all(Path(source).parent == Path("/etc/tared") for _, source in loaded)


def test_the_watchdog_is_fed_by_frames_and_may_restart() -> None:
    assert read_unit()["Type"] == "notify"
    assert int(read_unit()["WatchdogSec"]) > 0
    assert read_unit()["Restart"] == "on-failure"


def test_systemd_waits_as_long_as_the_daemon_takes_to_end() -> None:
    """The child is asked and killed, the threads are joined, the link delivers what is left."""
    parts_s = 2 * child._END_S + pipeline.JOIN_S + inspect.signature(MqttLink.close).parameters["timeout_s"].default
    assert parts_s + CONNECT_TIMEOUT_S + 1.0 < int(read_unit()["TimeoutStopSec"])


def test_the_camera_daemons_socket_is_seen_in_the_private_tmp() -> None:
    """No board has tried more than that. See systemd.exec(5) for the minus."""
    assert read_unit()["DynamicUser"] == read_unit()["PrivateTmp"] == "yes"
    csi = DROP_INS / "csi.conf"
    assert read_unit("Service", csi)["BindPaths"] == "-/tmp/argus_socket"
    assert read_unit("Unit", csi)["PartOf"] == read_unit("Unit", csi)["After"] == "nvargus-daemon.service"


def test_without_a_key_file_the_unit_hands_over_what_is_read_as_no_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """systemd.exec(5): SetCredential= is the default where LoadCredential= of the same name finds nothing."""
    (default,) = re.findall(rf"^SetCredential={CREDENTIAL}:(.*)$", UNIT.read_text(), re.MULTILINE)
    (tmp_path / CREDENTIAL).write_text(default)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    assert find_key() is None


def test_a_credential_without_its_file_is_not_taken_for_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The unit's default is no password."""
    (tmp_path / "tared-mqtt-password").write_text("none")
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    with pytest.raises(ConfigError, match=r"config\.credential: no file behind 'credential:tared-mqtt-password'"):
        locate(Path("credential:tared-mqtt-password"))
    (tmp_path / "tared-mqtt-password").write_text("a password\n")
    assert locate(Path("credential:tared-mqtt-password")).read_text() == "a password\n"


def test_the_command_in_the_unit_makes_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (source,) = re.findall(rf"^LoadCredential={CREDENTIAL}:(.*)$", UNIT.read_text(), re.MULTILINE)
    commands = [line.partition("as root: ")[2] for line in UNIT.read_text().splitlines() if "/dev/urandom" in line]
    assert len(commands) == 1
    assert source in commands[0]
    monkeypatch.delenv("CREDENTIALS_DIRECTORY", raising=False)
    subprocess.run(["sh", "-c", commands[0].replace(source, str(tmp_path / "key"))], check=True)
    key = find_key(tmp_path / "key")
    assert key is not None
    assert len(key) in (31, 32)  # the last of 32 random bytes may be a newline
