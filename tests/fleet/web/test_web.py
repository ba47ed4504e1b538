"""`tared web`: it shows what boards report as they report it, sends what its buttons say, and nothing else."""

from __future__ import annotations

import json
from base64 import b64encode
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from brokers import RealBroker, eventually
from checked_page import Checked
from web_bench import Board, Site, serving, serving_gate

from agent.common.errors import AgentError, ConfigError
from agent.contract.signing import Signer, new_key
from fleet.cli.main import main
from fleet.web.boards import LiveBoard
from fleet.web.command import Listen, run_web
from fleet.web.views import board_page, fleet_row

EVIL = "<script>alert(1)</script>\u202e'"
DONE = ({"status": "ACCEPTED"}, {"status": "IN_PROGRESS", "step": "BUILDING", "percent": 40.0}, {"status": "SUCCEEDED"})


def shows(site: Site, path: str, *words: str) -> bool:
    status, _, text = site.ask("GET", path)
    return status == 200 and all(word in Checked(text).words for word in words)


def test_a_row_shows_the_least_faithful_camera_also_one_of_no_fidelity_at_all() -> None:
    cameras = {"yard": {"fidelity": {"estimate": 0.5}}, "gate": {"fidelity": {"estimate": 0.0}}, "new": {}}
    assert fleet_row("board", LiveBoard(documents={"telemetry": {"cameras": cameras}}), 0.0)["fidelity"] == 0.0


def test_an_event_that_says_nothing_has_no_row() -> None:
    said: list[Mapping[str, Any]] = [{}, {"kind": "swap"}, {}, {"kind": "swap"}, {"percent": 5.0}, {"kind": "alarm"}]
    events = deque((6.0 - number, event) for number, event in enumerate(said))
    rows = board_page(LiveBoard(events=events), 7.0)["events"]
    assert rows == [(5.0, "swap", ""), (2.0, "", "5 %"), (1.0, "alarm", "")]


def test_a_board_is_shown_as_it_reports(any_broker: RealBroker) -> None:
    with serving(any_broker.endpoint) as site, Board(any_broker.endpoint, "gate") as board:
        board.say(
            "status", True, state="degraded", session="s", boot_id="b", ts=1.0, reason="it is too dark; add light"
        )
        engine, other = "0123456789abcdef", "fedcba9876543210"
        serving_now = {"engine": engine, "precision": "int8", "int8_macs_share": 0.875, "regimes": [other, engine]}
        policy = {"score_threshold": 0.45, "classes": ["car", "<b>"], "masks": 2}
        serving_now["policies"] = {engine: policy}
        board.say("birth", True, agent_version="0.1", runtimes={"runtime": "openvino"}, **serving_now)
        board.report(0.75, 12.5, health={"rss_bytes": 1 << 20, "temperature_cpu_c": 54.25, "power_w": 9.5})
        eventually(lambda: "gate" in site.boards.names() and shows(site, "/", "gate", "0.750", "12.5"))
        eventually(lambda: shows(site, "/boards/gate", "0.750", "0.650 to 1.000", "12.5 dB", "10.0", "1.0 MiB"))
        assert shows(site, "/boards/gate", "degraded", "too dark", "openvino", engine, "INT8, 87.5 %", "2 kept")
        assert shows(site, "/boards/gate", "3 dB are tolerated", "50 frames", "54.25 °C", "9.5 W")
        eventually(lambda: shows(site, "/boards/gate", "scores from 0.45", "2 masks; only car, <b>"))
        assert f'<datalist id="regimes"><option value="{other}"></option></datalist>' in site.page("/boards/gate")
        board.say("event", epoch=1, seq=2, ts=2.0, kind="job", trigger="alarm", step="BUILDING", percent=50)
        eventually(lambda: 'aria-current="step">building' in site.page("/boards/gate"))
        board.say("event", epoch=1, seq=3, ts=2.0, kind="job", trigger="alarm", step="COMMITTED")
        eventually(lambda: "aria-current" not in site.page("/boards/gate"))


def test_a_button_ends_in_the_answer_of_the_board(any_broker: RealBroker) -> None:
    with serving_gate(any_broker.endpoint, *DONE) as (site, board):
        assert site.order("gate", op="recalibrate") == 303
        eventually(lambda: shows(site, "/boards/gate", "recalibrate", "SUCCEEDED"))
        assert [command["op"] for command in board.commands] == ["recalibrate"]
        assert "sig" not in json.dumps(board.commands)
    refusal = {"status": "FAILED", "error": {"code": "store.no_previous", "message": f"nothing to go back to {EVIL}"}}
    with serving_gate(any_broker.endpoint, refusal) as (site, board):
        assert site.order("gate", op="rollback") == 303
        eventually(lambda: shows(site, "/boards/gate", "rollback", "FAILED", "nothing to go back to"))


def test_commands_are_signed_with_the_operators_key(any_broker: RealBroker, tmp_path: Path) -> None:
    private, _, _ = new_key(tmp_path / "ann")
    signer = Signer(private)
    with serving_gate(any_broker.endpoint, *DONE, signer=signer) as (site, board):
        assert site.order("gate", op="switch", regime="0123456789abcdef") == 303
        eventually(lambda: bool(board.commands))
        (command,) = board.commands[:1]
        assert command["args"] == {"regime": "0123456789abcdef"}
        assert command["to"] == "f/gate"
        assert command["signature"]


def test_a_command_of_another_page_is_refused(any_broker: RealBroker) -> None:
    with serving_gate(any_broker.endpoint, *DONE) as (site, board):
        path, token = "/boards/gate/orders", site.token("gate")

        def post(path: str, **fields: str) -> int:
            return site.ask("POST", path, urlencode(fields))[0]

        assert post(path, op="cancel") == 403
        assert post(path, op="cancel", token="x" * 43) == 403
        assert post(path, op="restart", token=token) == 404
        assert post("/boards/other/orders", op="cancel", token=token) == 404
        assert post(path, op="switch", token=token) == 400
        assert post(path, op="cancel", token=token, more="x" * 5000) == 413
        assert site.ask("GET", path)[0] == 405
        assert site.ask("GET", "/", Host="evil.example")[0] == 400
        assert site.ask("GET", "/static/../server.py")[0] == 404
        assert site.ask("GET", "/boards/gate/snapshot.jpg")[0] == 404
        assert site.ask("GET", "/boards/nobody")[0] == 404
        assert board.commands == []
        _, headers, _ = site.ask("GET", "/boards/gate")
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert "unsafe" not in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize(("max_loss", "tone"), [(None, "bad"), (0.25, "good"), (0.15, "warning"), ("x", "bad")])
def test_a_fidelity_is_good_that_the_board_accepts(max_loss: object, tone: str) -> None:
    camera = {"fidelity": {"estimate": 0.84, "low": 0.8, "high": 0.88, "n": 99}}
    documents: dict[str, Any] = {
        "telemetry": {"cameras": {"gate": camera}},
        "reported": {"values": {"recalibration.max_loss": max_loss}},
    }
    tile, *_ = board_page(LiveBoard(documents=documents), 0.0)["cameras"]["gate"]
    assert (tile.name, tile.tone) == ("fidelity", tone)


def test_documents_of_any_shape_cost_no_page(any_broker: RealBroker) -> None:
    with serving(any_broker.endpoint) as site, Board(any_broker.endpoint, "gate") as board:
        for kind in ("status", "birth", "telemetry", "event"):
            board.say(kind, cameras=[1, 2], health=3, engine={"a": 1}, runtimes=[], state=[], kind=7, ts="x", reason=4)
        board.say("telemetry", cameras={"a": None, "b": 3, "c": {"fidelity": [], "drift": "calm", "dropped": 3}})
        board.report(0.5)
        eventually(lambda: shows(site, "/boards/gate", "0.500"))
        assert shows(site, "/", "gate")


def test_a_broker_that_goes_and_comes_back(any_broker: RealBroker) -> None:
    with serving(any_broker.endpoint) as site:
        with Board(any_broker.endpoint, "gate") as board:
            board.report(0.5)
            eventually(lambda: shows(site, "/boards/gate", "0.500"))
        any_broker.stop()
        eventually(lambda: shows(site, "/boards/gate", "No connection to the broker", "0.500"), 30.0)
        any_broker.start()
        with Board(any_broker.endpoint, "gate") as board:
            eventually(lambda: not site.boards.trouble, 30.0)
            board.report(0.25)
            eventually(lambda: shows(site, "/boards/gate", "0.250"))


def test_a_password_is_demanded_of_everybody(any_broker: RealBroker) -> None:
    with serving(any_broker.endpoint, password="correct horse") as site:
        for given in ("", "Basic", "Basic !!!", f"Basic {b64encode(b'a:wrong').decode()}", "Bearer correct horse"):
            for path in ("/", "/live", "/static/style.css"):
                assert site.ask("GET", path, Authorization=given)[0] == 401
        right = f"Basic {b64encode(b'anybody:correct horse').decode()}"
        assert site.ask("GET", "/", Authorization=right)[0] == 200


def test_an_address_that_others_reach_needs_a_password(any_broker: RealBroker, tmp_path: Path) -> None:
    def code_of(listen: str, password: Path | None) -> str:
        with pytest.raises(AgentError) as caught:
            run_web(any_broker.endpoint, "f", Listen.parse(listen), password, None, lambda _: None)
        return caught.value.code

    assert code_of("0.0.0.0:0", None) == "web.password"
    assert code_of("0.0.0.0:0", tmp_path / "none") == "web.password"
    (tmp_path / "short").write_text("secret")
    assert code_of("127.0.0.1:0", tmp_path / "short") == "web.password"
    assert code_of("192.0.2.1:1", None) == "web.password"
    for wrong in ("8470", "127.0.0.1:", "127.0.0.1:70000", ":1", "a:b"):
        with pytest.raises(ConfigError, match="listen"):
            Listen.parse(wrong)
    assert Listen.parse("[::1]:8470").host == "::1"


def test_the_command_says_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["web", "--listen", "nowhere"]) == 2
    assert "web.listen" in capsys.readouterr().err
