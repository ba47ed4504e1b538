"""The fleet's pages of `tared web`: what they show of a real store, what their forms write, and what goes wrong."""

from __future__ import annotations

import json
import re
import sqlite3
import threading
import time
from base64 import b64encode
from contextlib import closing
from html import unescape
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from urllib.parse import quote, urlencode

import pytest
from brokers import RealBroker, eventually
from checked_page import Checked
from databases import postgres as postgres
from databases import where as where
from stored import Reports
from turned_clock import TurnedClock
from web_bench import Board, Site, serving

from agent.contract.messages import Birth, Status
from fleet.cli.main import main
from fleet.devices.devices import Devices
from fleet.devices.records import audit_entries
from fleet.devices.reports import Report, Stream
from fleet.rollout import rows
from fleet.rollout.register import RolloutRegister
from fleet.rollout.rows import RolloutState
from fleet.rollout.spec import RolloutSpec
from fleet.store import sqlite
from fleet.store.opening import open_existing, open_store
from fleet.store.transaction import FleetStore
from fleet.web import room as room_module
from fleet.web.room import FleetRoom, Reading

pytestmark = pytest.mark.slow

EVIL = "<script>alert(1)</script>\u202e'\""
PLAN = {"op": "recalibrate", "waves": "1,100%", "gates": "failures<=50%", "soak": "1s", "at_once": "9", "order": "name",
        "timezone": "UTC", "valid": "1h", "deadline": "1h", "silent": "10m"}  # fmt: skip


def stores_boards(store: FleetStore, *names: str, guarded: bool = False, fleet: str = "f") -> None:
    """Each with telemetry of now, of a fidelity that falls from 0.9 by 0.1 for each board."""
    now, reports, devices = time.time(), Reports(store), Devices(store)
    birth = Birth(
        agent_version="0.2.0", engine="0123456789abcdef", commands={"operator_keys": ["k"]} if guarded else {}
    )
    for number, name in enumerate(names):
        estimate = 0.9 - 0.1 * number
        camera = {
            "fidelity": {"estimate": estimate, "low": estimate - 0.05, "high": 1.0, "n": 9},
            "drift": {"state": "calm", "gain_db": 1.5},
        }
        with store.transaction() as transaction:
            entry = Report(Stream(fleet, name, 1), 1, "telemetry", now, json.dumps({"cameras": {"a": camera}}))
            reports.put(transaction, [entry], now)
            devices.apply_births(transaction, {(fleet, name): (birth, birth.to_json().decode())}, now)
            status = Status(state="online", session="s", boot_id="b", ts=now)
            devices.apply_statuses(transaction, {(fleet, name): status}, now)


@pytest.fixture
def gate_db(tmp_path: Path) -> str:
    """Return a store with one board."""
    where = str(tmp_path / "db")
    with open_store(where) as store:
        stores_boards(store, "gate")
    return where


def words(site: Site, path: str) -> str:
    return " ".join(Checked(site.page(path)).words.split())


def token(site: Site) -> str:
    (found, *_) = re.findall(r'name="token" value="([^"]+)"', site.page("/rollouts/new"))
    return str(found)


def post(site: Site, path: str, **fields: str) -> tuple[int, str, str]:
    """Status, where it leads, and the text."""
    status, headers, text = site.ask("POST", path, urlencode({"token": token(site), **fields}))
    return status, headers.get("Location", ""), text


def create(site: Site, **fields: str) -> str:
    """The page of a rollout that is created in the page."""
    status, page, text = post(site, "/rollouts/new", do="create", **{**PLAN, **fields})
    assert status == 303, text
    return page


def test_devices_are_selected_by_conditions_and_tagged(any_broker: RealBroker, where: str) -> None:
    with open_store(where) as store:
        stores_boards(store, "gate", "yard")
    with serving(any_broker.endpoint, db=where) as site:
        assert "2 devices" in words(site, "/devices")
        shown = words(site, "/devices?where=fidelity%3C0.85")
        assert "1 devices" in shown
        assert "yard online calm 0.800 0.750 1.5" in shown
        status, page, _ = post(site, "/devices/tags", where="name=yard", tags="site=new berlin, canary")
        assert (status, page) == (303, "/devices?where=name%3Dyard")
        eventually(lambda: "site=new berlin" in words(site, "/devices?where=canary"))
        assert post(site, "/devices/tags", where="name=yard", remove="canary")[0] == 303
        eventually(lambda: "canary" not in words(site, "/devices"))
        status, _, text = post(site, "/devices/tags", tags="a*b")
        assert (status, "NAME or NAME=VALUE" in text) == (400, True)
        assert "one of name, state" in words(site, "/devices?where=colour%3Dred")
        assert "none of the 2 devices" in words(site, "/devices?where=state%3Doffline")
    with open_store(where) as store:
        assert [(each.what, "by tared web" in each.who) for each in audit_entries(store)] == [("tag", True)] * 2


def test_distributions_and_days_are_charts_of_the_store(any_broker: RealBroker, where: str) -> None:
    with open_store(where) as store:
        stores_boards(store, "gate", "yard")
        with store.transaction() as transaction:
            transaction.execute("UPDATE devices SET last_seen = last_seen - 7200.0 WHERE name = 'yard'")
            transaction.execute("UPDATE progress SET heard = heard - 7200.0 WHERE device = 2")
    with serving(any_broker.endpoint, db=where) as site:
        shown = words(site, "/overview")
        assert "yard silent 2 h ago" in shown
        for chart in ("Devices by state", "Devices by version of tared", "Devices by engine", "Drift by group"):
            assert f'aria-label="{chart}"' in site.page("/overview")
        assert "0.2.0: 1 silent" in shown
        assert 'aria-label="Fidelity by day"' in site.page("/days")
        assert "median: 0.85" in words(site, "/days")


def test_a_rollout_is_shown_before_it_is_created_and_created_once(any_broker: RealBroker, where: str) -> None:
    with open_store(where) as store:
        stores_boards(store, "gate", "pier", "yard", guarded=True)
    with serving(any_broker.endpoint, db=where) as site:
        status, _, text = post(site, "/rollouts/new", do="plan", **{**PLAN, "arguments": "frames=512"})
        shown = " ".join(Checked(text).words.split())
        assert status == 200
        assert "1 1 gate 2 2 pier, yard" in shown
        assert "3 of them have operators' keys" in shown
        assert 'value="frames=512"' in text
        (seed,) = re.findall(r'name="seed" value="([^"]+)"', text)
        for field, wrong, said in (
            ("gates", "happiness>=1", "one of failures"),
            ("waves", "5,1", "waves that grow"),
            ("soak", "soon", "a time such as 90s"),
            ("at_once", "many", "a number of boards"),
            ("arguments", "frames='", "closing quotation"),
            ("select", "name=nobody", "none of the 3 devices"),
            ("op", "reboot", "one of recalibrate"),
        ):
            status, _, text = post(site, "/rollouts/new", do="create", **{**PLAN, field: wrong})
            assert (status, said in " ".join(Checked(text).words.split())) == (400, True), (field, text)
        page = create(site, seed=seed, why="a new season")
        assert create(site, seed=seed, why="a new season") == page
        assert "RUNNING" in words(site, page)
        assert "1 of 2 under way 1 WAITING" in words(site, page)
    with open_store(where) as store:
        (overview,) = RolloutRegister(store, "").all("f")
        (created,) = audit_entries(store, overview.rollout.id)
    assert page == f"/rollouts/{overview.rollout.id}"
    assert (created.what, created.why, created.who.endswith(" by tared web")) == ("created", "a new season", True)


def test_the_page_says_when_no_controller_is_at_work(any_broker: RealBroker, tmp_path: Path) -> None:
    where, clock = str(tmp_path / "db"), TurnedClock(wall_s=time.time())
    with open_store(where) as store, serving(any_broker.endpoint, db=where, clock=clock) as site:
        stores_boards(store, "gate")
        plain, signed = create(site), create(site, signed="1")
        assert "No controller" not in words(site, plain)  # one may be about to find it
        clock.turn(60.0)
        eventually(lambda: "No controller is at work on it: start 'tared fleet rollout run'." in words(site, plain))
        assert "start 'tared fleet rollout run --sign KEY'." in words(site, signed)
        assert "signed commands alone" in words(site, signed)
        assert "no controller" in words(site, "/rollouts")
        with store.transaction() as transaction:
            now = clock.wall_s()
            rows.lease(transaction, rows.free_rollouts(transaction, "owner", now), "owner", now + 60.0)
        clock.turn(10.0)
        eventually(lambda: "No controller" not in words(site, plain))


def test_files_come_from_the_folder_that_the_command_names(
    any_broker: RealBroker, tmp_path: Path, gate_db: str
) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / "m.onnx").write_bytes(b"model")
    (tmp_path / "secret").write_bytes(b"secret")
    with serving(any_broker.endpoint, db=gate_db, files=folder) as site:
        assert "m.onnx" in words(site, "/rollouts/new")
        for path in ("../secret", str(tmp_path / "secret"), "none.onnx"):
            for key in ("file", "release"):
                fields = {**PLAN, "op": "model", "arguments": f"file=m.onnx {key}={path}"}
                status, _, text = post(site, "/rollouts/new", do="create", **fields)
                assert (status, "--files" in text) == (400, True)
        create(site, op="model", arguments="file=m.onnx")
    with open_store(gate_db) as store:
        (overview,) = RolloutRegister(store, "").all("f")
        assert overview.rollout.spec.file == str(folder / "m.onnx")
    with serving(any_broker.endpoint, db=gate_db) as site:
        status, _, text = post(site, "/rollouts/new", do="plan", **{**PLAN, "op": "model", "arguments": "file=m.onnx"})
        assert (status, "start tared web with --files" in text) == (400, True)


def test_forms_of_other_sites_and_wrong_steps_are_refused(any_broker: RealBroker, gate_db: str) -> None:
    with serving(any_broker.endpoint, db=gate_db) as site:
        page = create(site)
        for path in ("/devices/tags", "/rollouts/new", f"{page}/steps"):
            for body in ("do=create&step=abort&tags=a", f"do=create&step=abort&tags=a&token={'x' * 43}"):
                assert site.ask("POST", path, body)[0] == 403
            assert site.ask("POST", path, "token=" + "x" * 5000)[0] == 413
        assert site.ask("GET", f"{page}/steps")[0] == 405
        assert post(site, f"{page}/steps", step="explode")[0] == 404
        assert post(site, f"{page}/steps", step="abort", undo="everything")[0] == 404
        status, _, text = post(site, f"{page}/steps", step="resume")
        assert (status, "is RUNNING; expected PAUSED" in text) == (400, True)
        assert post(site, "/rollouts/ffff/steps", step="pause")[0] == 400
        assert "'ffff'" in words(site, "/rollouts/ffff")
        assert site.ask("GET", "/stored/secrets")[0] == 404
    with open_store(gate_db) as store:
        assert [each.rollout.state for each in RolloutRegister(store, "").all("f")] == [RolloutState.RUNNING]


def test_an_open_page_is_sent_what_has_changed_alone(any_broker: RealBroker, gate_db: str) -> None:
    with serving(any_broker.endpoint, db=gate_db) as site:
        page = create(site)
        (live,) = re.findall(r'data-live="([^"]+)"', site.page(page))
        sent = site.parts(unescape(live))
        assert float(next(sent)) == pytest.approx(time.time(), abs=60.0)  # it was read again, and nothing is new
        assert post(site, f"{page}/steps", step="pause")[0] == 303
        assert any("PAUSED" in part for part in sent)
        sent.close()
        after_a_restart = site.parts(unescape(live).replace("shown=", "shown=0"))
        assert "PAUSED" in next(after_a_restart)
        after_a_restart.close()


def test_conditions_have_a_reading_of_their_own_only_where_devices_are_selected(
    any_broker: RealBroker, gate_db: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: set[str] = set()
    read = FleetRoom.read

    async def noted(room: FleetRoom, key: str, *arguments: Any) -> Reading:
        kept.add(key)
        return await read(room, key, *arguments)

    monkeypatch.setattr(FleetRoom, "read", noted)
    with serving(any_broker.endpoint, db=gate_db) as site:
        for path in ("/rollouts", "/rollouts?where=name%3Da", "/rollouts?where=name%3Db", "/devices?where=name%3Da"):
            site.page(path)
    assert kept == {"rollouts ", "devices name=a"}


def test_a_rollout_of_another_fleet_is_none_of_this_page(any_broker: RealBroker, tmp_path: Path) -> None:
    where = str(tmp_path / "db")
    with open_store(where) as store:
        stores_boards(store, "gate", fleet="other")
        register, spec = RolloutRegister(store, "ann"), RolloutSpec("recalibrate")
        identity = register.create("other", spec, register.plan("other", spec, "seed"), "")
    with serving(any_broker.endpoint, db=where) as site:
        assert "expected the id of a rollout of f" in words(site, f"/rollouts/{identity}")
        assert post(site, f"/rollouts/{identity}/steps", step="abort")[0] == 400
        assert identity not in site.page("/rollouts")
        assert "gate" not in words(site, "/devices")
    with open_store(where) as store:
        assert [each.what for each in audit_entries(store)] == ["created"]


def test_the_record_names_who_gave_the_password(any_broker: RealBroker, gate_db: str) -> None:
    with serving(any_broker.endpoint, password="correct horse", db=gate_db) as site:
        assert site.ask("GET", "/devices")[0] == 401
        assert site.ask("POST", "/rollouts/new", "do=create")[0] == 401
        given = b64encode("ann\u202e\n:correct horse".encode()).decode()
        site.headers = {"Authorization": f"Basic {given}"}
        create(site)
    with open_store(gate_db) as store:
        (created,) = audit_entries(store)
    assert created.who == "ann by tared web"


def test_without_a_store_there_are_no_pages_of_one(any_broker: RealBroker) -> None:
    with serving(any_broker.endpoint) as site:
        assert "Rollouts" not in words(site, "/")
        assert site.ask("GET", "/devices")[0] == site.ask("POST", "/rollouts/new", "do=create")[0] == 404


def test_names_tags_and_words_of_strangers_are_text(any_broker: RealBroker, where: str) -> None:
    names = [f"{EVIL}{number}"[:30] for number in range(3)] + ["n" * 10_000, f"{EVIL}" * 300]
    with open_store(where) as store:
        stores_boards(store, *names)
        devices = Devices(store)
        devices.tag(devices.all("f"), {EVIL: EVIL, "t" * 10_000: "v" * 10_000, "z": EVIL * 300}, [], EVIL)
        spec = RolloutSpec("recalibrate")
        register = RolloutRegister(store, EVIL)
        identity = register.create("f", spec, register.plan("f", spec, "seed"), EVIL * 300)
        with store.transaction() as transaction:
            transaction.execute("UPDATE devices SET agent_version = ?, engine = ?", (EVIL * 9, EVIL * 9))
            transaction.execute("UPDATE rollout_targets SET state = 'FAILED', reason = ?", (EVIL * 300,))
    with serving(any_broker.endpoint, db=where) as site:
        for path in ("/devices", "/overview", "/days", "/rollouts", f"/rollouts/{identity}"):
            page = site.page(path)
            Checked(page)  # no script runs, no address of elsewhere, no mark that turns the text
            assert len(page) < 120_000, path
        assert "<script>alert(1)" in words(site, "/devices")
        for path in (
            f"/devices?where={quote(EVIL)}",
            f"/overview?where={quote(EVIL)}",
            f"/rollouts/{quote(EVIL.replace(chr(47), ''), safe='')}",
        ):
            assert "expected" in words(site, path) or "pattern" in words(site, path)
        status, _, text = post(site, "/rollouts/new", do="create", **{**PLAN, "select": EVIL, "why": EVIL})
        Checked(text)
        assert status == 400


def test_a_store_that_is_away_or_of_a_newer_tared_is_said_and_the_rest_goes_on(
    any_broker: RealBroker, tmp_path: Path
) -> None:
    where, clock = tmp_path / "db", TurnedClock(wall_s=time.time())
    with serving(any_broker.endpoint, db=str(where), clock=clock) as site, Board(any_broker.endpoint, "gate") as board:
        assert "The fleet's store cannot be read: no file" in words(site, "/devices")
        assert post(site, "/rollouts/new", do="create", **PLAN)[0] == 400
        board.report(0.5)
        eventually(lambda: "0.500" in words(site, "/"))
        with open_store(where) as store:
            stores_boards(store, "gate")
        clock.turn(10.0)
        assert "1 devices" in words(site, "/devices")
        with closing(sqlite3.connect(where)) as db:
            db.execute("PRAGMA user_version = 99")
        clock.turn(10.0)
        shown = words(site, "/devices")
        assert "schema 99" in shown
        assert "run the tared that wrote it" in shown
        assert "What is shown is what was read before." in shown
        assert "gate online" in shown


def test_a_store_that_another_holds_stops_its_own_form_alone(
    any_broker: RealBroker, gate_db: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = list[tuple[int, str, str]]()
    with serving(any_broker.endpoint, db=gate_db) as site, closing(sqlite3.connect(gate_db)) as db:
        db.execute("BEGIN IMMEDIATE")
        monkeypatch.setattr(sqlite, "_PATIENCE_S", 0.05)
        status, _, text = post(site, "/rollouts/new", do="create", **PLAN)
        assert (status, "locked" in text) == (400, True)
        monkeypatch.setattr(sqlite, "_PATIENCE_S", 60.0)
        assert "1 devices" in words(site, "/devices")
        opened = Mock(wraps=open_existing)
        monkeypatch.setattr(room_module, "open_existing", opened)
        thread = threading.Thread(target=lambda: answers.append(post(site, "/rollouts/new", do="create", **PLAN)))
        thread.start()
        eventually(lambda: opened.called)
        assert "1 devices" in words(site, "/devices")
        site.page("/")
        assert answers == []
        db.execute("ROLLBACK")
        thread.join()
    assert answers[0][0] == 303


@pytest.mark.parametrize("where", ["postgres"], indirect=True)
def test_pages_say_that_a_postgresql_is_read_only(any_broker: RealBroker, where: str) -> None:
    with open_store(where) as store:
        stores_boards(store, "gate")
    with serving(any_broker.endpoint, db=f"{where}&options=-c%20default_transaction_read_only%3Don") as site:
        shown = words(site, "/devices")
    assert "The fleet's store cannot be read" in shown
    assert "read-only" in shown
    assert "its permissions" in shown


def test_the_command_refuses_a_folder_that_is_none(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    command = ["web", "--db", str(tmp_path / "db"), "--files", str(tmp_path / "none"), "--listen", "127.0.0.1:0"]
    assert main(command) == 2
    assert "web.files" in capsys.readouterr().err
