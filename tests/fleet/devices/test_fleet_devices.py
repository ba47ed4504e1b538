"""`tared fleet devices` and `tag`: who they are, how they are, which of them are meant."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from stored import Reports

from agent.common.errors import CommandError
from agent.contract.messages import Birth, Status
from fleet.cli.main import main
from fleet.devices.devices import Device, Devices
from fleet.devices.facts import facts
from fleet.devices.reports import Report, Stream
from fleet.devices.selection import matches, parse, parse_tag
from fleet.store.opening import open_store

NOW = 1_000_000.0


def device(**shown: Any) -> Device:
    values: dict[str, Any] = dict.fromkeys(("state", "agent_version", "model", "engine", "calibration"))
    values |= {"id": 1, "fleet": "f", "name": "board-7", "last_seen": NOW - 5.0}
    return Device(**{**values, **shown})


def camera(
    low: float = 0.9, gain: float = 0.2, state: str = "calm", p99: float = 9.0, fps: float = 30.0
) -> dict[str, Any]:
    return {
        "fps": fps,
        "latency_ms": {"p50": 4.0, "p99": p99},
        "drift": {"state": state, "gain_db": gain, "gain": {"estimate": gain / 100.0}},
        "fidelity": {"estimate": low + 0.05, "low": low, "high": 1.0, "n": 50},
    }


def test_the_worst_of_several_cameras_counts() -> None:
    cameras = {
        "a": camera(),
        "b": camera(0.5, 3.0, "warning", 20.0, 12.0),
        "c": {"fps": "fast", "drift": [], "fidelity": None},
    }
    shown = facts(device(telemetry={"cameras": cameras}), NOW)
    worst = {name: shown[name] for name in ("fidelity_low", "gain_db", "gain", "drift", "latency_p99", "fps")}
    gains = {"gain_db": 3.0, "gain": 0.03}
    assert worst == {**gains, "fidelity_low": 0.5, "drift": "warning", "latency_p99": 20.0, "fps": 12.0}


@pytest.mark.parametrize(
    "cameras", [[], "none", {"a": 3}, {"a": {"fidelity": {"low": 1e400}, "fps": True}}, {"a": {"fps": 1e308}}]
)
def test_nonsense_in_telemetry_is_nothing_known(cameras: object) -> None:
    shown = facts(device(telemetry={"cameras": cameras}), NOW)
    assert {shown[name] for name in ("fidelity", "fidelity_low", "fps", "drift", "gain_db", "gain")} == {None}


def test_an_online_device_without_messages_is_silent() -> None:
    assert facts(device(state="online", last_seen=NOW - 601.0), NOW)["state"] == "silent"
    assert facts(device(state="online", last_seen=NOW - 601.0), NOW, silent_s=700.0)["state"] == "online"
    assert facts(device(state="offline", last_seen=NOW - 601.0), NOW)["state"] == "offline"


def test_an_engine_is_a_regime_where_it_is_kept_as_one() -> None:
    regime = {"artefact": "e1"}
    assert facts(device(engine="e1", regime=regime), NOW)["regime"] == "e1"
    assert facts(device(engine="e2", regime=regime), NOW)["regime"] is None


@pytest.mark.parametrize(
    ("where", "holds"),
    [
        ("state=online", True),
        ("fidelity_low<0.9", False),
        ("accuracy>=0.8, accuracy_low<0.8, accuracy_n>=50", True),
        ("fidelity_low<=0.9, gain_db>0.1", True),
        ("gain_db=0.2", True),
        ("gain<0.01", True),
        ("agent<1.10", True),
        ("engine=none", False),
        ("canary", True),
        ("tag.site=berlin", True),
        ("tag.site=b*,state=degraded", False),
        ("tag.never=x", False),
        ("never", False),
    ],
)
def test_conditions(where: str, holds: bool) -> None:
    tags = {"canary": "", "site": "berlin"}
    labelled = {"labels": 60, "accuracy": {"estimate": 0.85, "low": 0.75, "high": 0.9, "n": 50}}
    telemetry = {"cameras": {"a": camera()}, "labelled_accuracy": labelled}
    board = device(state="online", agent_version="1.9", telemetry=telemetry, tags=tags)
    assert matches(board, parse(where), NOW) is holds


@pytest.mark.parametrize("where", ["fidelity_low<high", "colour=red", "=3", "gain_db>nan", "a b"])
def test_a_malformed_condition_is_refused(where: str) -> None:
    with pytest.raises(CommandError, match=r"fleet\.where"):
        parse(where)


@pytest.mark.parametrize("text", ["", "a,b", "a=b,c", "=x", "x" * 65, "a=\x1b"])
def test_a_malformed_tag_is_refused(text: str) -> None:
    with pytest.raises(CommandError, match=r"fleet\.tag"):
        parse_tag(text)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return a store with two boards, of which one has been silent for an hour."""
    path, now = tmp_path / "fleet.sqlite", time.time()
    with open_store(path) as store:
        reports, devices = Reports(store), Devices(store)
        for name, seen_at in (("board-1", now), ("board-2", now - 3600.0)):
            document = json.dumps({"cameras": {"a": camera()}})
            status = Status(state="online", session="s", boot_id="b", ts=seen_at)
            birth = Birth(agent_version="1.0", engine="0123456789abcdef")
            with store.transaction() as transaction:
                reports.put(
                    transaction, [Report(Stream("default", name, 1), 1, "telemetry", seen_at, document)], seen_at
                )
                devices.apply_statuses(transaction, {("default", name): status}, seen_at)
                devices.apply_births(transaction, {("default", name): (birth, birth.to_json().decode())}, seen_at)
    return path


def test_the_command_lists_them(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fleet", "devices", "--db", str(path)]) == 0
    shown = capsys.readouterr().out
    for words in (
        "board-1",
        "online",
        "0123456789ab",
        "0.950 [0.900, 1.000]",
        "60 min ago",
        "2 devices: 1 online, 1 silent",
    ):
        assert words in shown


def test_the_command_tags_and_selects_by_tags(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    database = ["--db", str(path), "--json"]
    assert main(["fleet", "tag", "site=berlin", "canary", "--where", "name=board-1", *database]) == 0
    assert json.loads(capsys.readouterr().out) == {"tagged": ["board-1"]}
    assert main(["fleet", "devices", "--where", "tag.site=berlin", *database]) == 0
    (shown,) = json.loads(capsys.readouterr().out)["devices"]
    assert (shown["name"], shown["tags"], shown["fidelity_low"]) == ("board-1", {"canary": "", "site": "berlin"}, 0.9)
    assert main(["fleet", "tag", "--remove", "canary", *database]) == 0
    assert main(["fleet", "devices", "--where", "canary", *database]) == 2
    assert "fleet.nobody" in capsys.readouterr().err


def test_a_database_that_is_not_there_is_not_begun(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fleet", "devices", "--db", str(tmp_path / "typo.sqlite")]) == 2
    assert capsys.readouterr().err.startswith("error: fleet.db: no file ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("part", ["0/2", "3/2", "2", "a/b", "1/0"])
def test_a_part_is_one_of_so_many(part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fleet", "collect", "--part", part]) == 2
    assert "expected N/M" in capsys.readouterr().err
