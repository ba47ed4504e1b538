"""The control room's units: by systemd's verdict, and under systemd itself, with a broker and boards that report."""

from __future__ import annotations

import inspect
import json
import re
import shutil
import subprocess
import sys
import time
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import psutil
import pytest
from brokers import Mosquitto, Watcher, free_port, running_mosquitto
from collector_bench import ONLINE, alarm
from device import TOPICS
from systemd_machine import Machine, process_status, sandbox_of_this_interpreter, why_not
from systemd_unit import MAX_EXPOSURE, UNIT, read_unit
from systemd_unit import systemd_analyze as systemd_analyze
from web_bench import Site

from agent.contract.signing import Keyring, new_key
from agent.mqtt.client import MqttClient

ROOT = UNIT.parents[1]
UNITS = ("tared-collector.service", "tared-controller.service")
WEB = "tared-web.service"
PASSWORD = "of-the-control-room"
WEB_PASSWORD = "of-those-who-look"
STATE = "/var/lib/tared-fleet/fleet.sqlite"

# Beside what `Room` writes of each unit: where this source is, and its interpreter's sandbox.
FOR_TEST = """[Service]
{sandbox}BindReadOnlyPaths={root}:/run/source
Environment=PYTHONPATH=/run/source PYTHONDONTWRITEBYTECODE=1
StandardError=append:{log}
RestartSec=0.5
"""


@pytest.mark.parametrize("name", [*UNITS, WEB])
def test_systemd_accepts_the_units(tmp_path: Path, systemd_analyze: str, name: str) -> None:
    unit = tmp_path / name
    unit.write_text((UNIT.parent / name).read_text().replace("/opt/tared/.venv/bin/tared", sys.executable))
    command = [systemd_analyze, "verify", "--man=no", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "tared" not in done.stderr, done.stderr
    assert done.returncode == 0
    command = [systemd_analyze, "security", "--offline=true", "--threshold=100", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    (exposure,) = re.findall(rf"Overall exposure level for {name}: ([\d.]+)", done.stdout)
    assert float(exposure) < MAX_EXPOSURE - 0.5


@pytest.mark.parametrize("name", [*UNITS, WEB])
def test_a_secret_is_in_no_argument_and_has_a_default(name: str) -> None:
    text = (UNIT.parent / name).read_text()
    loaded = re.findall(r"^LoadCredential=([\w-]+):/etc/tared/\S+$", text, re.MULTILINE)
    assert loaded == re.findall(r"^SetCredential=([\w-]+):", text, re.MULTILINE)
    (command,) = re.findall(r"^ExecStart=((?:.*\\\n)*.*)$", text, re.MULTILINE)
    named = re.findall(r"credential:([\w-]+)", command)
    assert name == WEB or "tared-fleet-db" in named
    assert set(named) <= set(loaded)


def test_both_are_one_user_and_wait_for_what_is_away_for_a_day() -> None:
    for name in (*UNITS, WEB):
        service, unit = (read_unit(section, UNIT.parent / name) for section in ("Service", "Unit"))
        if name != WEB:
            assert (service["User"], service["StateDirectory"]) == ("tared-fleet", "tared-fleet")
        starts = int(unit["StartLimitIntervalSec"]) / int(service["RestartSec"])
        assert starts < int(unit["StartLimitBurst"])


@dataclass
class Room:
    """The services on a machine of their own, with files of root's in the place of /etc/tared."""

    machine: Machine
    log: Path
    broker: Mosquitto
    public: Path
    folder: Path
    web_options: str
    site: Site

    def main(self, unit: str) -> psutil.Process:
        """Its main process, by its id out here."""
        module = {"tared-collector.service": "collect", "tared-controller.service": "rollout", WEB: "web"}[unit]
        (found,) = [
            each
            for each in psutil.process_iter(["cmdline", "uids"])
            if "fleet.cli" in (words := each.info["cmdline"] or [])
            and module in words
            and each.info["uids"].real not in (0, None)
        ]
        return found

    def edit_web(self) -> None:
        """The drop-in of docs/guides/web.md that adds the collector's store, as `systemctl edit` writes it."""
        text = (ROOT / "docs/guides/web.md").read_text()
        (block,) = [each for each in re.findall(r"(?:^    .*\n)+", text, re.MULTILINE) if STATE in each]
        drop_in = inspect.cleandoc(block).replace("/opt/tared/.venv/bin/tared", f"{sys.executable} -m fleet.cli")
        drop_in = drop_in.replace("/etc/tared/", f"{self.folder}/") + f" {self.web_options}\n"
        folder = f"/etc/systemd/system/{WEB}.d"
        done = self.machine.run("sh", "-c", 'printf %s "$1" > "$2"', "sh", drop_in, f"{folder}/with_store.conf")
        assert done.returncode == 0, done.stderr
        assert self.machine.systemctl("daemon-reload").returncode == 0

    def tared(self, *words: str) -> dict[str, object]:
        """Run a command as root there."""
        done = self.machine.run("env", f"PYTHONPATH={ROOT}", sys.executable, "-m", "fleet.cli", *words, "--json")
        assert done.returncode == 0, done.stderr
        found: dict[str, object] = json.loads(done.stdout)
        return found


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Room]:
    if reason := why_not():
        pytest.skip(f"systemd cannot run here: {reason}")
    world, units, log = tmp_path / "world", tmp_path / "units", tmp_path / "log"
    for folder in (world, units):
        folder.mkdir(mode=0o755)
    known = tmp_path / "passwords"
    subprocess.run(["mosquitto_passwd", "-b", "-c", str(known), "room", PASSWORD], check=True)
    known.chmod(0o644)
    private, public, _ = new_key(tmp_path / "operator")
    with running_mosquitto(tmp_path, f"password_file {known}") as broker:
        config = f"mqtt: {{host: localhost, port: {broker.port}, fleet: fleet, username: room, "
        config += 'password_file: "credential:tared-mqtt-password"}\n'
        for name in ("collector", "controller", "web"):
            (world / f"{name}.yaml").write_text(config)
            secret = world / ("web-mqtt-password" if name == "web" else f"{name}-password")
            secret.write_text(f"{PASSWORD}\n")
            secret.chmod(0o600)
        (world / "web-password").write_text(f"{WEB_PASSWORD}\n")
        shutil.copy(private, world / "operator.key")
        added = FOR_TEST.format(sandbox=sandbox_of_this_interpreter(), root=ROOT, log=log)
        for name in (*UNITS, WEB):
            text = (UNIT.parent / name).read_text()
            text = text.replace("/opt/tared/.venv/bin/tared", f"{sys.executable} -m fleet.cli")
            (units / name).write_text(text.replace("/etc/tared/", f"{world}/"))
            (units / f"{name}.d").mkdir()
            shown = f"BindReadOnlyPaths={world}/{name.removeprefix('tared-').removesuffix('.service')}.yaml\n"
            (units / f"{name}.d" / "test.conf").write_text(added + shown)
        port = free_port()
        options = f"--listen 127.0.0.1:{port} --web-password-file credential:tared-web-password"
        command = (
            f"{sys.executable} -m fleet.cli web -c {world}/web.yaml {options} --sign credential:tared-operator-key"
        )
        (units / f"{WEB}.d" / "with_key.conf").write_text(f"[Service]\nExecStart=\nExecStart={command}\n")
        with Machine(units, tmp_path / "systemd.log") as machine:
            password = b64encode(f"ann:{WEB_PASSWORD}".encode()).decode()
            yield Room(machine, log, broker, public, world, options, Site(port, {"Authorization": f"Basic {password}"}))


@pytest.mark.trial
@pytest.mark.broker
def test_collector_controller_and_pages_serve_a_fleet_from_one_store_and_outlive_a_kill(room: Room) -> None:
    collector, controller = UNITS
    with Watcher(room.broker.endpoint) as watcher, MqttClient(room.broker.endpoint, "board") as board:
        assert board.wait_connected(10.0)
        board.publish(ONLINE)
        started = room.machine.systemctl("start", collector)
        assert started.returncode == 0, started.stderr
        watcher.expect(TOPICS.ack, epoch=0, upto=0)
        board.publish(alarm(1))
        watcher.expect(TOPICS.ack, epoch=7, upto=1)
        main = room.main(collector)
        assert PASSWORD not in " ".join([*main.cmdline(), *main.environ().values()])
        assert process_status(main, "CapEff") == process_status(main, "CapBnd") == "0000000000000000"
        main.kill()
        room.machine.eventually(lambda: room.machine.property(collector, "NRestarts") == "1", tell=room.log)
        watcher.expect(TOPICS.ack, epoch=7, upto=1)  # for the status that the broker has kept, from its directory
        board.publish(alarm(2))
        watcher.expect(TOPICS.ack, epoch=7, upto=2)

        started = room.machine.systemctl("start", controller)
        assert started.returncode == 0, started.stderr
        create = ("fleet", "rollout", "create", "--op", "recalibrate", "--fleet", "fleet", "--signed", "--db", STATE)
        assert room.tared(*create)["id"]
        command = watcher.expect(TOPICS.command, op="recalibrate")
        assert Keyring([room.public]).signer_id(command)
        assert room.main(controller).uids().real == room.main(collector).uids().real != 0
        assert time.time() < command["expires"]

        room.edit_web()
        started = room.machine.systemctl("start", WEB)
        assert started.returncode == 0, started.stderr
        room.machine.eventually(lambda: room.site.answers("/devices"), tell=room.log)
        room.machine.eventually(lambda: TOPICS.device in room.site.page("/devices"), tell=room.log)
        assert "recalibrate" in room.site.page("/rollouts")
        assert room.main(WEB).uids().real == room.main(collector).uids().real
    for unit in (WEB, controller, collector):
        assert room.machine.systemctl("stop", unit).returncode == 0
        assert room.machine.property(unit, "Result") == "success"
    said = room.log.read_text() if room.log.exists() else ""
    assert not re.search("EPERM|Operation not permitted|Traceback|" + PASSWORD, said), said


@pytest.mark.trial
@pytest.mark.broker
def test_the_pages_are_served_to_who_knows_the_password_and_sign(room: Room) -> None:
    site = room.site
    with Watcher(room.broker.endpoint) as watcher, MqttClient(room.broker.endpoint, "board") as board:
        assert board.wait_connected(10.0)
        board.publish(ONLINE)
        started = room.machine.systemctl("start", WEB)
        assert started.returncode == 0, started.stderr
        path = f"/boards/{quote(TOPICS.device)}"
        room.machine.eventually(lambda: site.answers(path), tell=room.log)
        assert site.ask("GET", path, Authorization="")[0] == 401
        main = room.main(WEB)
        given = " ".join([*main.cmdline(), *main.environ().values()])
        assert PASSWORD not in given
        assert WEB_PASSWORD not in given
        assert process_status(main, "CapEff") == process_status(main, "CapBnd") == "0000000000000000"
        assert site.order(TOPICS.device, op="rollback") == 303
        command = watcher.expect(TOPICS.command, op="rollback")
        assert Keyring([room.public]).signer_id(command)
        main.kill()
        room.machine.eventually(lambda: room.machine.property(WEB, "NRestarts") == "1", tell=room.log)
        room.machine.eventually(lambda: site.answers(path), tell=room.log)
    assert room.machine.systemctl("stop", WEB).returncode == 0
    assert room.machine.property(WEB, "Result") == "success"
    said = room.log.read_text() if room.log.exists() else ""
    assert not re.search(f"EPERM|Operation not permitted|Traceback|{PASSWORD}|{WEB_PASSWORD}", said), said
