"""The parts of simulated boards: the loop that waits for all of them, their scenes, and their faults."""

from __future__ import annotations

import random
import re
import threading
from pathlib import Path
from typing import Any

import pytest
from device import carry_out
from places import ROOT
from unexpected import unexpected

from agent.commands.settings import Settings
from agent.common.errors import AgentError
from agent.contract.board_status import BoardStatus
from agent.contract.commands import CommandResult, StatusArgs
from agent.contract.topics import Topics
from agent.mqtt.endpoint import Endpoint
from agent.state.store import StateStore
from fleet.cli.fleet import pairs
from fleet.collector.batch import gap_for_unreadable, parse_numbered
from fleet.simulator.board import BoardClock
from fleet.simulator.context import BoardContext
from fleet.simulator.daemon import Daemon
from fleet.simulator.event_loop import Loop
from fleet.simulator.handlers import SimulatedHandlers
from fleet.simulator.options import BadEngines, BoardOptions, Faults, SimulationOptions, board_config, rubbish
from fleet.simulator.scene import Drift, SimulatedEngine, SimulatedScene, drift_state

FAST = Drift(db=6.0, after_s=10.0, spread_s=70.0, ramp_s=10.0, groups=8, day_s=100.0)


def test_an_error_in_the_loop_ends_it_and_is_raised() -> None:
    with Loop() as loop:
        loop.call_soon({}.popitem)
        with pytest.raises(KeyError):
            loop.run_until(lambda: False)


def test_an_error_of_a_dial_reaches_the_loop() -> None:
    outcomes: list[tuple[str, bool]] = []
    own = threading.get_ident()

    def refuse() -> None:
        raise ConnectionRefusedError("no server")

    with Loop() as loop:
        loop.dial(refuse, lambda error: outcomes.append((str(error), threading.get_ident() == own)))
        loop.dial(lambda: None, lambda error: outcomes.append((str(error), threading.get_ident() == own)))
        loop.run_until(lambda: len(outcomes) == 2)
    assert sorted(outcomes) == [("None", True), ("no server", True)]


def test_a_scene_drifts_group_by_group_and_a_new_engine_fits_it() -> None:
    scenes = [SimulatedScene(FAST, group, random.Random(group)) for group in range(8)]
    old = SimulatedEngine("old", "day")
    begun = [next(t for t in range(200) if scene.gain_db(old, t) > 0.0) for scene in scenes]
    assert begun == sorted(begun)
    assert 10 <= begun[0] < 15
    assert begun[-1] >= 80
    assert drift_state(scenes[0].gain_db(old, 150.0)) == "alarm"
    new = SimulatedEngine("new", "day", db=scenes[0].moved_db(150.0))
    assert drift_state(scenes[0].gain_db(new, 150.0)) == "calm"
    assert {scenes[0].light(t) for t in range(100)} == {"day", "night"}


def test_a_bad_engine_is_slower_and_less_faithful() -> None:
    scene = SimulatedScene(Drift(), 0, random.Random(1))
    engines = [SimulatedEngine("a", "day", bad=bad) for bad in (False, True)]
    good, bad = (scene.fidelity(engine, 0.0, 36_000.0).estimate for engine in engines)
    assert good - bad == pytest.approx(0.35, abs=0.02)
    fast, slow = (scene.sample(engine, 0.0, 36_000.0).latency_ms for engine in engines)
    assert slow.p99 / fast.p99 == pytest.approx(1.4, abs=0.1)


def context(number: int, folder: Path, loop: Loop, **wishes: Any) -> BoardContext:
    """Return the context of the board of this number, of two."""
    options = SimulationOptions(2, **wishes)
    of_all = BoardOptions(Endpoint("127.0.0.1", 1), options, board_config(options), folder, 0.0, loop, [], [])
    return BoardContext(number, of_all)


def test_clocks_of_boards_differ_and_without_a_battery_start_in_1970(tmp_path: Path) -> None:
    with Loop() as loop:
        skewed = [BoardClock(context(number, tmp_path, loop, clock_skew_s=1e6)).wall_s() for number in (0, 1)]
        usual = [BoardClock(context(number, tmp_path, loop)).wall_s() for number in (0, 1)]
        reset = BoardClock(context(0, tmp_path, loop, faults=Faults(no_clock=1.0))).wall_s()
    assert abs(skewed[0] - skewed[1]) > 1e4 > abs(usual[0] - usual[1])
    assert reset < 1e4


@pytest.mark.parametrize("faults", [Faults(delay=1.0), Faults(duplicate=1.0)])
def test_a_daemon_sends_its_messages_late_or_twice(tmp_path: Path, faults: Faults) -> None:
    with Loop() as loop:
        board = context(0, tmp_path, loop, faults=faults)
        daemon = Daemon(board, BoardClock(board), lambda: None)
        assert daemon.client.draw_delivery is not None
        times, late_s = daemon.client.draw_delivery()
        daemon.close()
    assert (times == 2, late_s > 0.0) == (faults.duplicate == 1.0, faults.delay == 1.0)


@pytest.mark.parametrize("in_a_job", [False, True])
def test_the_answer_to_status_has_every_key_of_the_reference(tmp_path: Path, in_a_job: bool) -> None:
    answers: list[CommandResult] = []
    with Loop() as loop:
        board = context(0, tmp_path, loop)
        settings = Settings(board.options.config, StateStore(None), lambda _: True, unexpected)
        if in_a_job:
            board.engines.start_job("alarm", bad=False)
        carry_out(SimulatedHandlers(board, settings, lambda: None), "status", StatusArgs(), answers.append)
    status = answers[-1].result
    assert status is not None
    assert BoardStatus.model_validate(status).as_result() == status
    shown: dict[str, Any] = {"boardstatus": status, "camerastatus": status, "driftstatus": status["drift"]}
    for name, document in {**shown, **({"jobstatus": status["job"]} if in_a_job else {})}.items():
        page = (ROOT / "docs" / "reference" / "mqtt.md").read_text().split(f'<a id="{name}"></a>')[1].split("###")[0]
        always = re.findall(r"^\| `(\w+)` \|.*?\|.*?\| always \|", page, re.MULTILINE)
        assert always
        assert {*always} <= document.keys()


@pytest.mark.parametrize(
    ("bad", "number", "asked", "hit"),
    [
        (BadEngines(), 0, None, False),
        (BadEngines(named="max"), 5, "max", True),
        (BadEngines(named="max"), 5, "mse", False),
        (BadEngines(first=2, last=4), 5, None, False),
        (BadEngines("max", 2, 4), 3, "max", True),
        (BadEngines("max", 2, 4), 5, "max", False),
    ],
)
def test_which_engines_turn_out_bad(bad: BadEngines, number: int, asked: str | None, hit: bool) -> None:
    assert bad.includes(number, asked) == hit


def test_rubbish_is_refused_or_a_lie_and_never_raises_anything_else() -> None:
    rng, own, victim = random.Random(0), Topics("fleet", "hostile"), Topics("fleet", "victim")
    seen, refused = 0, 0
    for _ in range(200):
        for message in rubbish(own, victim, 1_700_000_000, rng):
            _, _, fleet, device, kind = message.topic.split("/")
            if kind not in ("telemetry", "event"):
                continue
            seen += 1
            try:
                parse_numbered(fleet, device, kind, message.payload)
            except AgentError:
                refused += 1
                gap_for_unreadable(fleet, device, message.payload)
    assert 0 < refused < seen


def test_messages_come_twice_or_late_as_often_as_was_asked_for() -> None:
    rng, faults = random.Random(0), Faults(duplicate=0.2, delay=0.1)
    drawn = [faults.draw_delivery(rng) for _ in range(10_000)]
    assert sum(times == 2 for times, _ in drawn) == pytest.approx(2000, rel=0.1)
    assert sum(late_s > 0.0 for _, late_s in drawn) == pytest.approx(1000, rel=0.1)
    assert Faults().draw_delivery(rng) == (1, 0.0)


def test_pairs_change_what_is_named_and_nothing_else() -> None:
    assert pairs(Faults(), "") == Faults()
    assert pairs(Drift(), "db=6,groups=3") == Drift(db=6.0, groups=3)
    with pytest.raises(AgentError, match=r"cli\.arguments"):
        pairs(Drift(), "groups=half")


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        *((Drift(), text) for text in ("groups=0", "day_s=0", "db=nan", "ramp_s=-1", "spread_s=inf", "colour=1")),
        *((Faults(), text) for text in ("crash=7", "every_s=0", "delay=-0.1", "hostile=many")),
    ],
)
def test_impossible_options_are_refused(kind: Drift | Faults, text: str) -> None:
    with pytest.raises(AgentError) as caught:
        pairs(kind, text)
    assert caught.value.code == "cli.arguments"
