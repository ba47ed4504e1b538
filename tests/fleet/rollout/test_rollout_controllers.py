"""Controllers of rollouts that are killed, halted, or two at once: each board gets one command, no rollout is lost."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from brokers import RealBroker
from databases import where as where
from rollout_bench import Commands, a_fleet, begin, controlling, ended
from simulator_bench import FLEET, topics

from agent.common.errors import AgentError
from fleet.cli.main import main
from fleet.rollout import rows
from fleet.rollout.rows import RolloutState
from fleet.rollout.spec import RolloutSpec
from fleet.store import sqlite
from fleet.store.opening import open_store
from fleet.store.transaction import Transaction

pytestmark = [pytest.mark.broker, pytest.mark.slow]

IN_EACH = pytest.mark.parametrize("where", ["sqlite", pytest.param("postgres", marks=pytest.mark.trial)], indirect=True)


def spec(**overrides: Any) -> RolloutSpec:
    return RolloutSpec("recalibrate", gates="latency_p99<=1.25x", soak_s=0.5, order="name", **overrides)


@IN_EACH
def test_each_board_gets_one_command_beside_another_controller(mosquitto: RealBroker, where: str) -> None:
    with a_fleet(mosquitto, where, 12), Commands(mosquitto) as commands:
        ids = [begin(where, spec(waves="100%", select=f"name=sim-00000{n}")) for n in range(6)]
        with controlling(mosquitto, where), controlling(mosquitto, where):
            assert {ended(where, each).rollout.state for each in ids} == {RolloutState.COMPLETED}
            sent = commands.sent_ids("recalibrate")
    assert {device: len(ids) for device, ids in sent.items()} == {topics(each).device: 1 for each in range(6)}


def claim(
    transaction: Transaction, owner: str, now: float, until: float, fleet: str | None = None
) -> dict[str, str | None]:
    """Claim the free rollouts; return their former owners."""
    free = rows.free_rollouts(transaction, owner, now, fleet)
    rows.lease(transaction, free, owner, until)
    return {each.id: each.lease_owner for each in free}


def test_two_controllers_cannot_claim_one_rollout(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite, "_PATIENCE_S", 0.1)
    with open_store(where) as one, open_store(where) as other:
        with one.transaction("write") as transaction:
            identity = rows.create_rollout(transaction, "f", spec(), [[(1, "UTC")]], 0.0)
            assert claim(transaction, "one", 10.0, 40.0, fleet="another") == {}
        claimed: list[str] = []
        with one.transaction("write") as transaction:
            claimed += claim(transaction, "one", 10.0, 40.0)
            with (
                contextlib.suppress(AgentError),
                other.transaction("write") as beside,
            ):  # SQLite has it wait, and give up
                claimed += claim(beside, "other", 10.0, 40.0)
        with other.transaction("write") as transaction:
            assert rows.renew_lease(transaction, identity, "other", 11.0, 40.0) is None
            assert claim(transaction, "other", 39.0, 70.0) == {}
            assert claim(transaction, "other", 41.0, 70.0) == {identity: "one"}
            assert claim(transaction, "other", 42.0, 71.0) == {identity: "other"}
            assert rows.renew_lease(transaction, identity, "other", 72.0, 80.0) is None, "it has ended"
        with one.transaction("write") as transaction:
            assert rows.renew_lease(transaction, identity, "one", 42.0, 80.0) is None
    assert claimed == [identity]


def test_a_rollout_of_a_file_sends_it(mosquitto: RealBroker, tmp_path: Path) -> None:
    where, file = str(tmp_path / "db"), tmp_path / "model.onnx"
    file.write_bytes(b"a model")
    with a_fleet(mosquitto, where, 2):
        assert main(["fleet", "rollout", "create", "--op", "model", f"file={file}", *options(where)]) == 0
        with open_store(where) as store, store.transaction("read") as transaction:
            (rollout,) = rows.all_rollouts(transaction, FLEET)
        with controlling(mosquitto, where):
            assert ended(where, rollout.id).rollout.state is RolloutState.COMPLETED


def options(where: str) -> list[str]:
    return ["--db", where, "--fleet", "simulated", "--waves", "100%", "--soak", "0.5s", "--gate", "failures<=0%"]


def test_the_command_line_from_creation_to_the_end(
    mosquitto: RealBroker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = str(tmp_path / "db")
    rollout, at = ["fleet", "rollout"], ["--db", where]

    def sent(*words: str) -> dict[str, Any]:
        assert main([*rollout, *words, "--json"]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    with a_fleet(mosquitto, where, 3):
        create = ["create", "--op", "recalibrate", "frames=64", *options(where)]
        dry = sent(*create, "--dry-run")
        assert dry["id"] is None
        assert sent("list", *at, "--fleet", "simulated") == {"rollouts": []}
        created = sent(*create, "--why", "a new season")
        assert created["boards_by_wave"] == dry["boards_by_wave"]
        identity = str(created["id"])
        assert sent("pause", identity[:6], *at)["state"] == "PAUSED"
        assert main([*rollout, "pause", identity, *at]) == 2  # it is already
        assert "is PAUSED; expected RUNNING" in capsys.readouterr().err
        assert sent("resume", identity, *at)["state"] == "RUNNING"
        run = [*rollout, "run", *at, "--port", str(mosquitto.port), "--until-done", "--json"]
        assert main(run) == 0
        assert json.loads(capsys.readouterr().out) == {"ended": {identity: "COMPLETED"}}
    shown = sent("show", identity, *at)
    assert shown["states_by_wave"] == [{"DONE": 3}]
    assert [each["what"] for each in shown["records"]][:3] == ["created", "paused", "resumed"]
    assert len(shown["commands"]) == 3
    for words in (["list", *at, "--fleet", "simulated"], ["show", identity, *at]):
        assert main([*rollout, *words]) == 0
        assert "COMPLETED" in capsys.readouterr().out
    assert main([*rollout, "show", "nobody", *at]) == 2
    assert "rollout.unknown" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "code"),
    [
        (["--select", "tag.site=moon"], "fleet.nobody"),
        (["--gate", "happiness>=1"], "rollout.gate"),
        (["--select", "colour=red"], "fleet.where"),
        (["--window", "tonight"], "rollout.window"),
    ],
)
def test_a_refused_creation_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], code: str
) -> None:
    where = str(tmp_path / "db")
    with open_store(where) as store, store.transaction("write") as transaction:
        transaction.execute(
            "INSERT INTO devices (fleet, name, first_seen, last_seen) VALUES (?, ?, 0.0, 0.0)", ("default", "a")
        )
    assert main(["fleet", "rollout", "create", "--op", "recalibrate", "--db", where, *overrides]) == 2
    assert f"error: {code}:" in capsys.readouterr().err
    with open_store(where) as store, store.transaction("read") as transaction:
        assert rows.all_rollouts(transaction, "default") == []
