"""The page of a rollout while a controller carries it out: it follows by its stream, and steers by its forms."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import closing
from urllib.parse import urlencode

import pytest
from brokers import RealBroker
from checked_page import Checked
from databases import store as store
from databases import where as where
from rollout_room import Room, done, spec
from turned_clock import TurnedClock
from web_bench import Site, serving

from fleet.rollout.register import RolloutRegister
from fleet.rollout.rows import BoardStage, CommandRole
from fleet.store.transaction import FleetStore
from fleet.web import room_pages

pytestmark = pytest.mark.broker


@pytest.fixture
def site(mosquitto: RealBroker, where: str, store: FleetStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """Serve pages that read the store again at each turn of their streams."""
    del store  # it exists
    values, _ = room_pages._PARTS["rollout"]
    monkeypatch.setitem(room_pages._PARTS, "rollout", (values, 0.0))
    with serving(mosquitto.endpoint, db=where) as served:
        yield served


def steer(site: Site, room: Room, step: str, **fields: str) -> None:
    (token, *_) = re.findall(r'name="token" value="([^"]+)"', site.page("/rollouts/new"))
    body = urlencode({"token": token, "step": step, **fields})
    status, _, text = site.ask("POST", f"/rollouts/{room.id}/steps", body)
    assert status == 303, text


def until_shown(site: Site, room: Room, last: str) -> str:
    """Return the first part of the page's stream that has these words."""
    with closing(site.parts(f"/stored/rollouts/{room.id}")) as parts:
        return next(text for each in parts if last in (text := " ".join(Checked(each).words.split())))


def test_waves_and_gates_pass_on_the_page_paused_and_resumed_there(store: FleetStore, site: Site) -> None:
    clock = TurnedClock(wall_s=time.time())
    room = Room(store, spec(waves="1,100%", gates="failures<=5%", soak_s=30.0), boards=3, clock=clock)
    room.carry_out()
    room.step()
    assert "1 of 2 soaking 1 DONE" in until_shown(site, room, "soaking")
    clock.turn(31.0)
    room.step()
    assert "passed failures<=5% 0 of 1, 0.0%" in until_shown(site, room, "passed")
    steer(site, room, "pause", why="lunch")
    room.step()
    assert "by tared web lunch" in until_shown(site, room, "PAUSED")
    assert room.open() == {}
    steer(site, room, "resume", why="eaten")
    room.carry_out()
    room.step()
    clock.turn(31.0)
    room.step()
    shown = until_shown(site, room, "COMPLETED")
    assert "2 of 2 passed 2 DONE" in shown
    assert "No controller" not in shown
    steps = [each.what for each in RolloutRegister(store, "").show(room.id)[0].records]
    wave = ["soaking", "gate passed"]
    assert steps == ["created", *wave, "paused", "resumed", *wave, "COMPLETED"]


def test_an_abort_in_the_page_takes_back_finished_boards(store: FleetStore, site: Site) -> None:
    room = Room(store, spec(waves="1,100%"), boards=3, clock=TurnedClock(wall_s=time.time()))
    room.carry_out()
    steer(site, room, "abort", undo="all", why="no")
    room.step()
    room.step(done(room.open(CommandRole.UNDO)["b0"], artefact="e0"))
    room.step()
    assert "1 UNDONE" in until_shown(site, room, "ABORTED")
    assert room.states() == [BoardStage.UNDONE, BoardStage.WAITING, BoardStage.WAITING]
