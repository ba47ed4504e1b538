"""The doctor on a machine that has the service, and on its configuration, which others than root see half of."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import yaml
from boards import lay_down
from brokers import RealBroker
from doctor_findings import by_name, configured

from agent.contract.signing import new_key
from agent.doctor import service as as_service
from agent.doctor import service as installed
from agent.doctor.examine import Finding, examine
from agent.doctor.service import examine_service
from agent.system.service_unit import TARED

UNIT, CONFIG = str(TARED.unit_path), str(TARED.config_path)


@pytest.fixture
def unit(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("agent.doctor.service.unit_text", lambda *_: "[Service]\nas shipped\n")
    return "[Service]\nas shipped\n"


@pytest.mark.parametrize("changed", ["", "Nice=5\n"])
def test_a_unit_that_differs_is_named(tmp_path: Path, unit: str, changed: str) -> None:
    lay_down({UNIT: unit + changed, CONFIG: "model: x"}, tmp_path)
    found = by_name(examine_service(tmp_path))
    assert found["service"].ok == (not changed)
    assert ("--dry-run" in found["service"].remedy) == bool(changed)
    assert found["service state"].found == "no systemd runs here"


def test_a_configuration_that_the_service_cannot_read_is_named(tmp_path: Path, unit: str) -> None:
    lay_down({UNIT: unit, CONFIG: "model: x"}, tmp_path)
    for path, mode, remedy in (
        (tmp_path / TARED.config_path, 0o600, "o+r"),
        ((tmp_path / TARED.config_path).parent, 0o700, "o+rx"),
    ):
        path.chmod(mode)
        assert by_name(examine_service(tmp_path))["service"].remedy == f"sudo chmod {remedy} {path}"


def test_a_csi_camera_needs_its_addition_to_the_unit(tmp_path: Path, unit: str) -> None:
    files = {UNIT: unit, CONFIG: "model: x"}
    lay_down(files, tmp_path)
    assert by_name(examine_service(tmp_path, csi=True))["service"].remedy == "sudo tared install-service --csi"
    lay_down({str(TARED.drop_ins_path / "csi.conf"): ""}, tmp_path)
    assert by_name(examine_service(tmp_path, csi=True))["service"].ok


def test_a_group_that_is_missing_is_named(tmp_path: Path, unit: str) -> None:
    """systemd ends with 216/GROUP."""
    text = unit + "SupplementaryGroups=video render\n"
    lay_down({UNIT: text, CONFIG: "", "etc/group": "root:x:0:\nvideo:x:44:\n"}, tmp_path)
    service = by_name(examine_service(tmp_path))["service"]
    assert service.found.startswith("no group render, ")
    assert service.remedy == "sudo groupadd --system render"


def test_the_state_of_the_service_is_systemds(tmp_path: Path, unit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lay_down(
        {UNIT: unit, CONFIG: "", "bin/systemctl": "#!/bin/sh\necho failed\nexit 3\n"},
        tmp_path,
    )
    (tmp_path / "run/systemd/system").mkdir(parents=True)
    program = tmp_path / "bin/systemctl"
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    state = by_name(examine_service(tmp_path))["service state"]
    assert (state.ok, state.found) == (False, "failed")
    assert "journalctl -u tared" in state.remedy


def test_a_systemd_that_does_not_answer_is_named(tmp_path: Path, unit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lay_down(
        {UNIT: unit, CONFIG: "", "bin/systemctl": "#!/bin/sh\nexec sleep 60\n"},
        tmp_path,
    )
    (tmp_path / "run/systemd/system").mkdir(parents=True)
    (tmp_path / "bin/systemctl").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    monkeypatch.setattr(installed, "_SYSTEMCTL_S", 0.2)
    assert "did not answer" in by_name(examine_service(tmp_path))["service state"].found


# ---- its own configuration

CREDENTIALS = ("mqtt-password", "operator-keys")


@pytest.fixture
def service(tmp_path: Path, mosquitto: RealBroker, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of a machine whose service speaks to a broker with a password, and knows an operator."""
    lines = [f"LoadCredential=tared-{name}:/etc/tared/{name}\n" for name in CREDENTIALS]
    unit = "[Service]\n" + "".join(lines)
    monkeypatch.setattr("agent.doctor.service.unit_text", lambda *_: unit)
    folder = (tmp_path / TARED.config_path).parent
    folder.mkdir(parents=True)
    configured(folder)
    lay_down({UNIT: unit, str(folder / "mqtt-password"): "secret\n"}, tmp_path)
    new_key(folder / "ann")[1].rename(folder / "operator-keys")
    content = yaml.safe_load((tmp_path / TARED.config_path).read_text())
    del content["state_dir"]
    content["mqtt"] = {"host": "localhost", "port": mosquitto.port, "device": "board", "username": "board"}
    content["mqtt"]["password_file"] = "credential:tared-mqtt-password"
    content["commands"] = {"operator_keys": ["credential:tared-operator-keys"]}
    (tmp_path / TARED.config_path).write_text(yaml.safe_dump(content))
    return tmp_path


def examined(root: Path) -> dict[str, Finding]:
    before = dict(os.environ)
    found = by_name(examine(root / TARED.config_path, root))
    assert dict(os.environ) == before
    return found


@pytest.mark.broker
def test_the_services_configuration_is_examined_as_the_service_sees_it(service: Path) -> None:
    found = examined(service)
    assert found["broker"].found.endswith(": connected")
    assert (found["keys"].ok, found["keys"].found) == (True, "1 of operators, 0 of releases")
    assert found["state directory"].ok
    assert found["state directory"].found == f"{service}: writable"  # in which systemd makes it


@pytest.mark.broker
@pytest.mark.parametrize("root", [True, False])
def test_credentials_that_only_root_may_read_are_no_fault(
    service: Path, root: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if root:
        for name in CREDENTIALS:
            (service / "etc/tared" / name).unlink()
    else:
        monkeypatch.setattr(as_service, "_provide_credential", lambda _file, _to: None)
    monkeypatch.setattr(os, "geteuid", lambda: 0 if root else 1000)
    found = examined(service)
    for name in ("broker", "keys"):
        assert (found[name].ok, found[name].needed) == (False, root)
        assert found[name].remedy.startswith("sudo tared doctor") != root


@pytest.mark.broker
def test_a_key_that_is_none_keeps_the_daemon_from_starting(service: Path) -> None:
    (service / "etc/tared/operator-keys").write_text("no key")
    keys = examined(service)["keys"]
    assert (keys.ok, keys.needed) == (False, True)
    assert "tared keys new" in keys.remedy


@pytest.mark.broker
def test_another_configuration_is_looked_at_as_this_user_sees_it(service: Path) -> None:
    other = service / "etc/tared/other.yaml"
    other.write_text((service / TARED.config_path).read_text())
    found = by_name(examine(other, service))
    assert "no $CREDENTIALS_DIRECTORY" in found["keys"].found
