"""The fleet's store: the same answers from SQLite and from a real PostgreSQL."""

from __future__ import annotations

import math
import sqlite3
import time
import traceback
from contextlib import closing
from pathlib import Path

import pytest
from collector_bench import STREAM, report
from stored import Reports
from turned_clock import TurnedClock

from agent.common.errors import AgentError, CommandError, ConfigError
from agent.contract.messages import Birth, Status
from fleet.collector.writer import ReportRetention
from fleet.devices.devices import Devices
from fleet.devices.records import Refused, audit_entries, quarantine, quarantined
from fleet.devices.reports import Gap, Report, Stream
from fleet.devices.selection import matches, parse, select
from fleet.rollout.rows import all_rollouts
from fleet.store.opening import open_existing, open_store
from fleet.store.transaction import FleetStore

NAME = "fleet", "board"


def test_a_credential_may_say_which_database_it_is(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the control room's units have it, so that no password is an argument."""
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    for words in (f"{where}\n", f" {where}"):
        (tmp_path / "tared-fleet-db").write_text(words)
        with open_store("credential:tared-fleet-db") as store:
            Reports(store).add([report(1)])
        with open_existing("credential:tared-fleet-db") as store:
            assert [each.seq for each in Reports(store).reports_of(*NAME)] == [1]
    (tmp_path / "tared-fleet-db").write_text("none")
    for name, found in (("tared-fleet-db", "no file behind 'credential:tared-fleet-db'"), ("gone", "No such file")):
        with pytest.raises(ConfigError, match=found):
            open_store(f"credential:{name}")
    monkeypatch.delenv("CREDENTIALS_DIRECTORY")
    with pytest.raises(ConfigError, match=r"config\.credential: no \$CREDENTIALS_DIRECTORY"):
        open_existing("credential:tared-fleet-db")


def status(state: str, session: str, ts: float) -> Status:
    return Status.model_validate({"state": state, "session": session, "boot_id": "b", "ts": ts})


def test_a_number_with_two_documents_is_a_conflict_and_the_first_stays(store: FleetStore) -> None:
    reports = Reports(store)
    other = Report(STREAM, 2, "alarm", 1.5, '{"seq": 2, "of": "a twin"}')
    reports.add([report(1), report(2)])
    with store.transaction() as transaction:
        assert reports.put(transaction, [report(1), other, report(3)], 5.0).conflicts == [other]
    assert [each.document for each in reports.reports_of(*NAME)] == [report(seq).document for seq in (1, 2, 3)]


def test_documents_come_back_as_they_were_whatever_is_in_them(store: FleetStore) -> None:
    reports, words = Reports(store), 'back\\slash "\\u0000" \\n\ttab \r\n\\. ünï \U0001f600 %s ? \\N'
    reports.add([Report(STREAM, seq, kind, -1.5e-300, words) for seq, kind in enumerate(("a\\b", "tab\t", "\\N"), 1)])
    found = list(reports.reports_of(*NAME))
    assert [(each.kind, each.ts, each.document) for each in found] == [
        (kind, -1.5e-300, words) for kind in ("a\\b", "tab\t", "\\N")
    ]


def test_an_error_within_a_transaction_undoes_it_and_its_remembered_ids(store: FleetStore) -> None:
    reports = Reports(store)

    def fail() -> None:
        with store.transaction() as transaction:
            reports.put(transaction, [report(1)], 5.0)
            raise AgentError("test", "a", "b", "c")

    with pytest.raises(AgentError, match="test"):
        fail()
    assert list(reports.reports_of(*NAME)) == []
    assert reports.add([report(1)]) == {STREAM: 1}
    assert [each.seq for each in reports.reports_of(*NAME)] == [1]


def test_a_late_will_does_not_end_the_connection_that_followed(store: FleetStore) -> None:
    devices = Devices(store)
    for answered, state in (
        (status("online", "first", 1.0), "online"),
        (status("online", "second", 2.0), "online"),
        (status("offline", "first", 1.0), "online"),
        (status("offline", "second", 2.0), "offline"),
        (status("offline", "a third, that nobody heard come", 3.0), "offline"),
        (status("degraded", "fourth", 1.0), "degraded"),  # a board whose clock was set back
    ):
        with store.transaction() as transaction:
            devices.apply_statuses(transaction, {NAME: answered}, 10.0)
        assert [each.state for each in devices.all("fleet")] == [state]


def test_a_device_has_its_newest_facts(store: FleetStore) -> None:
    devices, reports = Devices(store), Reports(store)
    birth = Birth(agent_version="1.2\x003", engine="e1")
    with store.transaction() as transaction:
        devices.apply_births(transaction, {NAME: (birth, birth.to_json().decode())}, 10.0)
        newer, older = Stream(*NAME, 8), Stream(*NAME, 7)
        news = [
            Report(newer, 1, "telemetry", 2.0, '{"newest": 1}'),
            Report(newer, 2, "alarm", 2.0, "{}"),
            Report(newer, 3, "regime", 2.0, '{"artefact": "e1"}'),
            Report(older, 8, "regime", 2.5, '{"artefact": "e0"}'),
            Report(older, 9, "telemetry", 3.0, '{"newest": 0}'),
        ]
        reports.put(transaction, news, 20.0)
    (device,) = devices.all("fleet")
    assert (device.agent_version, device.engine, device.model, device.last_seen) == ("1.23", "e1", None, 20.0)
    assert (device.telemetry, device.regime) == ({"newest": 1}, {"artefact": "e1"})
    assert device.birth["engine"] == "e1"
    assert list(devices.all("another")) == []


def test_tags_are_put_on_taken_off_and_on_record(store: FleetStore) -> None:
    devices = Devices(store)
    Reports(store).add([report(1), report(1, Stream("fleet", "twin", 1))])
    devices.tag(devices.all("fleet"), {"site": "berlin", "canary": ""}, [], who="ann")
    devices.tag(list(devices.all("fleet"))[:1], {"site": "paris"}, ["canary", "never put on"], who="ben")
    assert [each.tags for each in devices.all("fleet")] == [{"site": "paris"}, {"canary": "", "site": "berlin"}]
    assert [(each.who, each.what) for each in audit_entries(store)] == [("ann", "tag"), ("ben", "tag")]


def test_quarantine_keeps_the_newest_and_cannot_be_filled(store: FleetStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleet.devices.records._MOST_REFUSED", 5)
    for number in range(4):
        with store.transaction() as transaction:
            bad = [Refused("f\x00", "d", "event", "message.x", f"{number} \x1b[2J", bytes(9000)) for _ in range(3)]
            quarantine(transaction, bad, 1.0)
    found = quarantined(store)
    assert [each.found for each in found] == ["3 [2J"] * 3 + ["2 [2J"] * 2
    assert {(each.fleet, len(each.payload)) for each in found} == {("f", 4096)}


def test_retention_keeps_what_is_young_enough_and_the_newest_start(store: FleetStore) -> None:
    reports, day_s = Reports(store), 86_400.0
    for epoch, received in ((7, 0.0), (8, 0.0), (9, 40.0 * day_s)):
        stream = Stream(*NAME, epoch)
        with store.transaction() as transaction:
            news: list[Report | Gap] = [report(1, stream), Gap(stream, 2, 3, "telemetry", 2)]
            reports.put(transaction, news, received)
            quarantine(transaction, [Refused(*NAME, "event", "c", str(epoch), b"")], received)
    with store.transaction() as transaction:
        reports.put(transaction, [report(1, Stream("fleet", "gone", 7))], 0.0)
    retention = ReportRetention(days=30.0, clock=TurnedClock(wall_s=40.0 * day_s))
    for _ in range(3):
        retention.prune_if_due(store)
    assert [each.stream.epoch for each in reports.reports_of(*NAME)] == [9]
    assert [each.stream.epoch for each in reports.gaps_of(*NAME)] == [9]
    assert reports.position("fleet", "gone") == (7, 1)  # how far it was is known, should it come back
    assert [each.found for each in quarantined(store)] == ["9"]
    assert reports.add([report(1)]) == {STREAM: 1}


def test_a_store_of_tared_0_2_0_opens_unchanged(tmp_path: Path) -> None:
    as_written = Path(__file__).with_name("store_of_0_2_0.sql").read_text()
    with closing(sqlite3.connect(tmp_path / "db")) as db:
        db.executescript(as_written)
    with open_store(tmp_path / "db") as store:
        assert [each.engine for each in Devices(store).all("f")] == ["e0"]
        with store.transaction("read") as transaction:
            rollouts = all_rollouts(transaction, "f")
    assert [each.id for each in rollouts] == ["r1"]
    open_store(tmp_path / "new").close()
    with closing(sqlite3.connect(tmp_path / "db")) as db, closing(sqlite3.connect(tmp_path / "new")) as new:
        assert "\n".join(db.iterdump()) in as_written
        created = [{line for line in each.iterdump() if line.startswith("CREATE")} for each in (db, new)]
        schemas = [each.execute("PRAGMA user_version").fetchone() for each in (db, new)]
    assert created[0] == created[1]
    assert schemas == [(3,), (3,)]


def test_old_rows_are_deleted_a_part_at_a_time(store: FleetStore) -> None:
    Reports(store).add([report(number) for number in range(1, 4)])
    with store.transaction() as transaction:
        deleted = [transaction.prune("reports", "received", math.inf, 2) for _ in range(3)]
    assert deleted == [2, 1, 0]


@pytest.mark.parametrize("where", ["postgres"], indirect=True)
def test_the_writable_one_of_several_hosts_is_used_unless_the_url_says_otherwise(where: str) -> None:
    """libpq tries one after the other until one's session is as target_session_attrs demands."""
    open_store(where.replace("host=", "host=/nowhere,")).close()
    for more, name in (("", "tared fleet"), ("&application_name=gate", "gate")):
        with open_store(f"{where}{more}") as store, store.transaction("read") as transaction:
            assert transaction.execute("SHOW application_name") == [(name,)]
    read_only = f"{where}&options=-c%20default_transaction_read_only%3Don"
    with pytest.raises(AgentError, match=r"fleet\.unreachable: .*session is read-only"):
        open_store(read_only)
    with pytest.raises(AgentError, match=r"fleet\.write: .*read-only transaction"):
        open_store(f"{read_only}&target_session_attrs=any")


@pytest.mark.parametrize("url", ["mysql://host/db", "sqlite:///file"])
def test_another_database_is_refused_by_name(url: str) -> None:
    with pytest.raises(ConfigError, match=r"fleet\.db"):
        open_store(url)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://ann:geheim@127.0.0.1:1/fleet", "postgresql://127.0.0.1:1/fleet"),
        ("postgresql://ann:geheim@127.0.0.1:1,[::1]:2/fleet", "postgresql://127.0.0.1:1,::1:2/fleet"),
        ("postgresql://ann:%2F%40geheim%3A@127.0.0.1:1/fleet", "postgresql://127.0.0.1:1/fleet"),
        ("postgresql:///fleet?host=127.0.0.1,localhost&port=1&password=geheim", "127.0.0.1:1,localhost:1/fleet"),
    ],
)
def test_an_absent_server_is_named_without_the_password(url: str, shown: str) -> None:
    pytest.importorskip("psycopg", reason="pip install '.[fleet]'")
    with pytest.raises(AgentError, match=r"fleet\.unreachable") as raised:
        open_store(url)
    assert shown in str(raised.value)
    assert "geheim" not in str(raised.value)


@pytest.mark.parametrize("password", ["ge/heim", "ge@heim", "ge%heim", "1/heim", "ge/?heim=1"])
def test_a_password_that_breaks_the_url_is_not_printed(password: str) -> None:
    pytest.importorskip("psycopg", reason="pip install '.[fleet]'")
    with pytest.raises(ConfigError, match=r"fleet\.db: .*%40") as raised:
        open_store(f"postgresql://ann:{password}@127.0.0.1:1/fleet")
    assert "heim" not in str(raised.value)
    assert "heim" not in "".join(traceback.format_exception(raised.value))


def reported(store: FleetStore, *names: str) -> None:
    Reports(store).add([report(1, Stream("fleet", name, 1)) for name in names])


def test_devices_are_read_in_pages(store: FleetStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleet.devices.devices._AT_ONCE", 3)
    names = [f"board-{number:02}" for number in range(10)]
    reported(store, *names)
    devices = Devices(store)
    assert [each.name for each in devices.all("fleet")] == names
    assert [each.name for each in select(devices, "fleet", None, most=4, after="board-05")] == names[6:]
    assert [each.name for each in select(devices, "fleet", None, most=4)] == names[:4]
    assert select(devices, "fleet", None, after="board-09") == []
    assert devices.count("fleet") == 10


WHERE = (
    *("name=a", "name=*a", "name!=a", "a", "engine=e1", "engine=e?", "tag.site", "site=x", "tag.site=berlin"),
    *("tag.site=b*", "tag.site!=berlin", "agent=1.2", "agent>=1.2", "model=m,tag.site", "state=silent"),
    f"agent<{'9' * 5000}",
)


@pytest.mark.parametrize("number", range(len(WHERE)))
def test_the_database_selects_as_the_conditions_say(store: FleetStore, number: int) -> None:
    """The query and a look at each device choose the same."""
    reported(store, "a", "b", "c")
    devices = Devices(store)
    with store.transaction() as transaction:
        for name, engine in (("a", "e1"), ("b", "e2")):
            birth = Birth(agent_version="1.2", engine=engine, model="m")
            devices.apply_births(transaction, {("fleet", name): (birth, birth.to_json().decode())}, 1.0)
    devices.tag(list(devices.all("fleet"))[1:], {"site": "berlin"}, [], "ann")
    where = WHERE[number]
    if where == "site=x":  # no fact, and no tag without its prefix
        with pytest.raises(CommandError, match=r"fleet\.where"):
            select(devices, "fleet", where)
        return
    expected = [each.name for each in devices.all("fleet") if matches(each, parse(where), time.time())]
    if expected:
        assert [each.name for each in select(devices, "fleet", where)] == expected
    else:
        with pytest.raises(CommandError, match=r"fleet\.nobody"):
            select(devices, "fleet", where)


def test_a_device_that_is_forgotten_leaves_nothing_and_comes_back_as_a_new_one(store: FleetStore) -> None:
    """Also for a collector that knows its number, and reads of the deed in the audit."""
    reported(store, "a", "b")
    collector, operator = Devices(store), Devices(store)
    with store.transaction() as transaction:
        before = collector.ids(transaction, {("fleet", "a"), ("fleet", "b")}, 1.0)
    operator.tag(operator.all("fleet"), {"site": "berlin"}, [], "ann")
    operator.forget([each for each in operator.all("fleet") if each.name == "a"], "ann")
    assert [each.name for each in operator.all("fleet")] == ["b"]
    with store.transaction("read") as transaction:
        for table in ("reports", "progress", "tags"):
            assert transaction.execute(f"SELECT DISTINCT device FROM {table}", ()) == [(before["fleet", "b"],)]
    with store.transaction() as transaction:
        after = collector.ids(transaction, {("fleet", "a"), ("fleet", "b")}, 2.0)
        known = transaction.execute("SELECT id FROM devices WHERE name = ?", ("a",))
    assert [(after["fleet", "a"],)] == known
    assert after["fleet", "b"] == before["fleet", "b"]
    assert [each.what for each in audit_entries(store)] == ["tag", "forget"]


def test_devices_without_messages_for_long_are_forgotten(store: FleetStore) -> None:
    devices = Devices(store)
    with store.transaction() as transaction:
        devices.ids(transaction, {("fleet", "silent"), ("fleet", "status"), ("fleet", "rows")}, 10.0)
        devices.mark_seen(transaction, {("fleet", "status")}, 100.0)
    with store.transaction() as transaction:
        Reports(store).put(transaction, [report(1, Stream("fleet", "rows", 1))], 100.0)
    ReportRetention(days=1000.0, unseen_days=1.0, clock=TurnedClock(wall_s=86_400.0 + 50.0)).prune_if_due(store)
    assert [each.name for each in devices.all("fleet")] == ["rows", "status"]
    ReportRetention(days=1000.0, clock=TurnedClock(wall_s=1e9)).prune_if_due(store)
    assert [each.name for each in devices.all("fleet")] == ["rows", "status"], "kept, unless it is asked for"


@pytest.mark.parametrize("is_at_start", [True, False])
def test_a_clock_that_jumps_deletes_nothing_for_a_day(store: FleetStore, is_at_start: bool) -> None:
    """A jump of ten years that somebody takes back within a day costs nothing, and what came meanwhile grows old."""
    reports, day_s, year_s = Reports(store), 86_400.0, 365 * 86_400.0
    clock, now = TurnedClock(wall_s=1.8e9), 1.8e9
    retention = ReportRetention(days=30.0, unseen_days=30.0, clock=clock)

    def pass_until(wall_s: float, passed_s: float) -> None:
        clock.turn(passed_s)
        clock.set_wall(wall_s)
        retention.prune_if_due(store)

    def come(seq: int, received: float) -> None:
        with store.transaction() as transaction:
            reports.put(transaction, [report(seq)], received)
            Devices(store).mark_seen(transaction, {NAME}, received)
        pass_until(received, 3600.0)

    with store.transaction() as transaction:
        reports.put(transaction, [report(1)], now)
    pass_until(now + (10 * year_s if is_at_start else 0.0), 0.0)
    come(2, now + 10 * year_s)
    come(3, now + 7200.0)
    assert [each.seq for each in reports.reports_of(*NAME)] == [1, 2, 3]
    pass_until(now + 7200.0 + day_s + 1.0, day_s + 1.0)  # from here on 2 is of this moment
    assert [each.seq for each in reports.reports_of(*NAME)] == [1, 2, 3]
    (device,) = Devices(store).all("fleet")
    assert device.last_seen < now + 2 * day_s
    pass_until(now + 7200.0 + 30.5 * day_s, 29.5 * day_s)
    assert [each.seq for each in reports.reports_of(*NAME)] == [2]
