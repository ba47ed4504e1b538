"""`tared fleet report`: one file, that holds all it shows and nothing that strangers could make run."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from checked_page import Checked
from stored import Reports

from agent.contract.messages import Status
from fleet.cli.main import main
from fleet.devices.devices import Devices
from fleet.devices.records import Refused, audit, quarantine
from fleet.devices.reports import Report, Stream
from fleet.rollout.register import RolloutRegister
from fleet.rollout.spec import RolloutSpec
from fleet.store.opening import open_store
from fleet.store.transaction import FleetStore


def fill(store: FleetStore, evil: str) -> None:
    """Two boards, one of which says what no page should run."""
    reports, devices, now = Reports(store), Devices(store), time.time()
    for number, name in enumerate(("board-1", f"b{evil}"[:20].replace("/", ""))):
        document: dict[str, Any] = {"cameras": {"a": {"fidelity": {"estimate": 0.9, "low": 0.8, "high": 1.0, "n": 9}}}}
        document["cameras"]["a"]["drift"] = {"state": ("calm", evil)[number], "gain_db": 1.5}
        status = Status(state="degraded", session="s", boot_id="b", ts=now)
        with store.transaction() as transaction:
            stream = Stream("default", name, 1)
            reports.put(transaction, [Report(stream, 1, "telemetry", now, json.dumps(document))], now)
            devices.apply_statuses(transaction, {("default", name): status}, now)
            quarantine(transaction, [Refused("default", name, "event", "c", evil, evil.encode())], now)
            audit(transaction, evil, evil, evil, evil, "{}")
    devices.tag(list(devices.all("default"))[:1], {"site": "berlin"}, [], "ann")
    register, spec = RolloutRegister(store, "ann"), RolloutSpec("recalibrate", waves="1,100%")
    register.abort(register.create("default", spec, register.plan("default", spec), evil), "all", evil)
    elsewhere = Status(state="online", session="s", boot_id="b", ts=now)
    with store.transaction() as transaction:
        devices.apply_statuses(transaction, {("paris", "board-9"): elsewhere}, now)
        quarantine(transaction, [Refused("paris", "board-9", "event", "c", "of paris alone", b"")], now)
    register.create("paris", spec, register.plan("paris", spec), "of paris alone")


def test_the_command_writes_one_file_in_which_nothing_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = "<script>alert('x')</script>\"&"
    with open_store(tmp_path / "db") as store:
        fill(store, evil)
    output = tmp_path / "report.html"
    assert main(["fleet", "report", "--db", str(tmp_path / "db"), "-o", str(output), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"device_count": 2, "output": str(output)}
    text = output.read_text()
    found = Checked(text, is_file=True)
    assert text.count("<script>") == 1  # the page's own, which its policy names by its hash
    assert "svg" in found.tags
    assert "http:" not in text
    assert "https:" not in text
    for words in (
        "2 devices",
        "degraded",
        "0.900 [0.800, 1.000]",
        "site=berlin",
        "1.5 dB",
        "&lt;script&gt;",
        "UNDOING",
    ):
        assert words in text
    assert "1: 1 WAITING; 2: 1 WAITING" in text
    assert "paris" not in text


def test_a_fleet_of_which_nothing_is_known_has_a_page_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    open_store(tmp_path / "db").close()
    output = tmp_path / "report.html"
    assert main(["fleet", "report", "--db", str(tmp_path / "db"), "-o", str(output)]) == 0
    Checked(output.read_text(), is_file=True)
    assert main(["fleet", "report", "--db", str(tmp_path / "db"), "-o", str(tmp_path)]) == 2
    assert "fleet.report" in capsys.readouterr().err
