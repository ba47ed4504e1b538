"""The daemon over a night, a day and the next night: known light is switched to, and nothing is calibrated for it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from worlds import ALARM_COMMIT, World, make_world

from agent.monitoring.regimes import regime_artefacts
from agent.state.store import StateStore
from engines.store.artefact import Store

# What is darker still counts as a covered lens. In brighter light some pictures lie between two classes, and one such
# among the held-out frames of an alarm may speak against the candidate.
NIGHT, DAY = 0.12, 0.5
LEARNT = "event=regime "


def in_light(folder: Path, light: float) -> World:
    """The same model and state, whatever light it was before."""
    return make_world(folder, lambda _: light, 1800.0, regimes={"dwell_s": 15.0})


def known(world: World) -> Sequence[str]:
    return regime_artefacts(StateStore.copy_of(world.state_dir, ["regimes"]))


@pytest.mark.trial
def test_the_second_night_is_no_news_and_a_damaged_regime_no_end(tmp_path: Path) -> None:
    first, _ = in_light(tmp_path, NIGHT).run(until=LEARNT)
    (night,) = (swap["artefact"] for swap in first["swaps"])
    second, _ = in_light(tmp_path, DAY).run(until=LEARNT)
    ((trigger, day),) = ((swap["trigger"], swap["artefact"]) for swap in second["swaps"])
    assert trigger == "alarm"
    world = in_light(tmp_path, NIGHT)
    assert known(world) == [night, day]

    third, _ = world.run(until="event=commit .*trigger=switch")
    assert [(swap["trigger"], swap["artefact"]) for swap in third["swaps"]] == [("switch", night)]
    assert (third["alarms"], third["dropped"]) == ([], {})
    assert known(world) == [day, night]  # the last served last
    current, previous = Store(world.state_dir).read("current"), Store(world.state_dir).read("previous")
    assert current is not None
    assert previous is not None
    assert (current.id, previous.id) == (night, day)

    engine = world.state_dir / "artefacts" / day / "engine.onnx"
    engine.write_bytes(engine.read_bytes()[:-1])
    fourth, said = in_light(tmp_path, DAY).run(until=ALARM_COMMIT)
    assert "code=artefact.damaged" in said
    assert [swap["trigger"] for swap in fourth["swaps"]] == ["alarm"]
    assert fourth["swaps"][0]["fidelity"] >= fourth["swaps"][0]["fidelity_before"]
