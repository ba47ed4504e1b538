"""Rollouts that are created and steered in the page, and carried out by a controller at simulated boards."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import urlencode

import pytest
from brokers import RealBroker, eventually
from checked_page import Checked
from databases import postgres as postgres
from databases import where as where
from rollout_bench import a_fleet, boards, controlling, names_of, overview
from simulator_bench import FLEET
from web_bench import Site, serving

from agent.contract.signing import Signer, new_key
from fleet.rollout.rows import BoardStage

pytestmark = [pytest.mark.broker, pytest.mark.slow]

PLAN = {
    "op": "recalibrate", "waves": "1,4,100%", "gates": "fidelity>=0.2,failures<=5%", "soak": "1s", "at_once": "9",
    "order": "name", "timezone": "UTC", "valid": "1h", "deadline": "1h", "silent": "10m", "do": "create",
}  # fmt: skip


def post(site: Site, path: str, **fields: str) -> str:
    """Where it leads."""
    (token, *_) = re.findall(r'name="token" value="([^"]+)"', site.page("/rollouts/new"))
    status, headers, text = site.ask("POST", path, urlencode({"token": token, **fields}))
    assert status == 303, text
    return str(headers["Location"])


def words(html: str) -> str:
    return " ".join(Checked(html).words.split())


def follow(site: Site, page: str, last: str) -> list[str]:
    """The parts of a rollout's page, as its stream sends them, to the first that has these words."""
    seen, parts = [], site.parts(f"/stored{page}")
    for part in parts:
        seen.append(words(part))
        if last in seen[-1]:
            break
    parts.close()
    return seen


IN_EACH = pytest.mark.parametrize("where", ["sqlite", pytest.param("postgres", marks=pytest.mark.trial)], indirect=True)


@IN_EACH
def test_waves_and_gates_pass_on_the_page_paused_and_resumed_there(mosquitto: RealBroker, where: str) -> None:
    with (
        a_fleet(mosquitto, where, 6),
        serving(mosquitto.endpoint, fleet=FLEET, db=where) as site,
        controlling(mosquitto, where),
    ):
        page = post(site, "/rollouts/new", **{**PLAN, "soak": "3s"}, why="a new season")
        identity = page.rpartition("/")[2]
        seen = follow(site, page, "1 of 3 passed 1 DONE")
        assert post(site, f"{page}/steps", step="pause", why="lunch") == page
        seen += follow(site, page, "PAUSED")
        told = boards(where, identity, BoardStage.SENT, BoardStage.DONE)
        assert names_of(5).isdisjoint(told)
        assert post(site, f"{page}/steps", step="resume", why="eaten") == page
        seen += follow(site, page, "COMPLETED")
        assert "No controller" not in " ".join(seen)
        last = seen[-1]
        for expected in ("2 of 3 passed 3 DONE", "3 of 3 passed 2 DONE", "passed failures<=5%", "0 of 2, 0.0%"):
            assert expected in last
        assert "by tared web lunch" in last
        assert "soaking" in " ".join(seen)  # between the waves
        assert "COMPLETED" in words(site.page("/rollouts"))
    steps = [each.what for each in overview(where, identity).records]
    assert (steps[0], steps[-1]) == ("created", "COMPLETED")
    assert {"paused", "resumed", "gate passed"} <= {*steps}


def test_an_abort_in_the_page_takes_back_what_is_done(mosquitto: RealBroker, tmp_path: Path) -> None:
    where = str(tmp_path / "db")
    with (
        a_fleet(mosquitto, where, 4, job_s=0.5),
        serving(mosquitto.endpoint, fleet=FLEET, db=where) as site,
        controlling(mosquitto, where),
    ):
        page = post(site, "/rollouts/new", **{**PLAN, "waves": "1,100%", "soak": "20s"})
        identity = page.rpartition("/")[2]
        follow(site, page, "soaking")
        assert post(site, f"{page}/steps", step="abort", undo="all", why="no") == page
        eventually(lambda: "1 UNDONE" in words(site.page(page)), 30.0)
        follow(site, page, "ABORTED")
        assert boards(where, identity, BoardStage.UNDONE) == names_of(0)
        assert boards(where, identity, BoardStage.WAITING) == names_of(1, 2, 3)


def test_a_signed_rollout_waits_for_a_controller_with_a_key(mosquitto: RealBroker, tmp_path: Path) -> None:
    where = str(tmp_path / "db")
    private, public, _ = new_key(tmp_path / "ann")
    with (
        a_fleet(mosquitto, where, 2, operator_keys=[public]),
        serving(mosquitto.endpoint, fleet=FLEET, db=where) as site,
    ):
        page = post(site, "/rollouts/new", **{**PLAN, "waves": "100%"}, signed="1")
        with controlling(mosquitto, where):
            assert "run a controller with --sign KEY" in follow(site, page, "left to another controller")[-1]
        with controlling(mosquitto, where, Signer(private)):
            assert "2 DONE" in follow(site, page, "COMPLETED")[-1]
