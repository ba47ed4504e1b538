"""A daemon on a live camera, killed in a warning, or in the middle of an alarm's job: what it had found goes on.

No camera can be opened on every machine that runs this. So in the daemon's process a file stands where OpenCV would
open a stream, played at fifty frames a second without end. All else is the daemon as users start it, to which the
source is a live one.
"""

from __future__ import annotations

import json
import shutil
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from brokers import RealBroker
from daemon_life import TOPICS, Life, living
from unexpected import unexpected
from worlds import World, make_world

from agent.monitoring.estimates import FidelityRecord
from agent.monitoring.evidence_file import EvidenceFile, RecalledEvidence
from agent.mqtt.client import MqttClient
from agent.mqtt.message import Message

NIGHT, DAY = 0.12, 1.0
SELDOM = {"period_s": 3600.0, "alert_period_s": 3600.0}


@dataclass
class Remembered:
    recalled: RecalledEvidence
    n: int


def remembered(world: World, engine: str) -> Remembered:
    """Return the evidence that a next process would go on with; the file stays as it is."""
    copy = world.folder / "copy.jsonl"
    shutil.copy(world.state_dir / "evidence.jsonl", copy)
    record = FidelityRecord()
    memory = EvidenceFile(copy, "rtsp://camera", unexpected)
    recalled = memory.start(engine, 0.0, recall=True, mean=record)
    assert recalled is not None
    return Remembered(recalled, record.since_start.estimate.interval.n)


@dataclass
class Place:
    """Views of a camera, and a daemon that was calibrated there at night."""

    world: World
    clips: dict[float, Path]
    scene: Path
    broker: RealBroker

    def see(self, light: float | None) -> None:
        """None: no frame comes."""
        self.scene.write_text(str(self.clips[light]) if light is not None else "")

    def living(self, name: str, **observe: float) -> AbstractContextManager[Life]:
        self.world.config["observe"].update(observe)
        return living(self.world, self.scene, self.broker, name)


def _light(light: float, _ts: float) -> float:
    return light


@pytest.fixture
def place(tmp_path: Path, any_broker: RealBroker) -> Place:
    worlds = {light: make_world(tmp_path / str(light), partial(_light, light), 20.0) for light in (NIGHT, DAY)}
    world, clips = worlds[NIGHT], {light: each.folder / "clip.avi" for light, each in worlds.items()}
    world.change(
        camera={"source": "rtsp://camera"},
        observe={"period_s": 0.05, "alert_period_s": 0.05},
        drift={"block_s": 0.2, "false_alarms_per_30d": 1000.0},
        regimes={"dwell_s": 1.0, "fidelity": 0.0},
        recalibration={"per_day": 2},  # the first start, and one alarm
        mqtt={"host": any_broker.host, "port": any_broker.port},
    )
    made = Place(world, clips, tmp_path / "scene", any_broker)
    made.see(NIGHT)
    with made.living("first") as first:
        first.wait(lambda: first.said("event=commit .*trigger=first-start"))
    return made


def at_rest(life: Life) -> dict[str, Any]:
    """Return the evidence of a daemon to which no frame comes any more."""
    known, same = dict[str, Any](), 0

    def rests() -> bool:
        nonlocal known, same
        before, known = known, life.status()
        same = same + 1 if known == before else 0
        return same == 3

    life.wait(rests)
    return known


@pytest.mark.trial
@pytest.mark.broker
def test_a_daemon_that_was_killed_in_a_warning_has_lost_no_block_that_was_over(place: Place) -> None:
    place.world.config["drift"]["false_alarms_per_30d"] = 1e-100  # no alarm, in which the evidence would stand still
    place.see(DAY)
    with place.living("second") as second:
        second.wait(lambda: second.status()["drift"]["state"] == "warning")
        place.see(None)
        before = at_rest(second)["drift"]
    place.see(DAY)
    with place.living("third", **SELDOM) as third:
        third.wait(lambda: third.status()["frames"] > 0)
        after = third.status()["drift"]
    assert (before["state"], after["state"]) == ("warning", "warning")
    assert after["e_value"] == before["e_value"] > 0.0


@pytest.mark.trial
@pytest.mark.broker
def test_the_evidence_of_a_killed_daemon_goes_on(place: Place) -> None:
    world = place.world
    world.config["calibration"]["frames"] = 10_000  # from here on no job gets beyond collecting
    with place.living("second") as second, MqttClient(place.broker.endpoint, "labeller") as labeller:
        second.wait(lambda: second.status()["frames"] > 20)
        for frame in range(20):
            label = {"camera": "camera", "frame": frame, "labels": "a"}
            labeller.publish(Message(TOPICS.labels, json.dumps(label).encode()))
        second.wait(lambda: second.said("event=regime "))
        second.wait(lambda: second.status()["accuracy"]["n"] > 3)
        place.see(DAY)
        second.wait(lambda: second.status()["job"])
        second.wait(lambda: second.status()["fidelity"]["n"] > 10)
        before = second.status()
    left = remembered(world, before["engine"])
    assert before["drift"]["state"] == "alarm"
    assert before["job"]["state"] == "COLLECTING"

    with place.living("third", **SELDOM) as third:
        third.wait(lambda: third.status()["frames"] > 0)
        after = third.status()
        third.wait(lambda: third.said("code=recalibration.cap"))
        later = third.status()
    assert after["drift"]["state"] == "alarm"
    assert after["engine"] == before["engine"]
    found = remembered(world, before["engine"])
    assert found.recalled.since == left.recalled.since
    assert left.n >= before["fidelity"]["n"]
    assert left.n <= after["fidelity"]["n"] <= left.n + 3  # a process that looks once an hour adds next to nothing
    assert after["regimes"] == before["regimes"] == 1
    for estimate in ("fidelity_hour", "accuracy"):
        assert after[estimate]["n"] >= before[estimate]["n"] > 3, estimate
    assert (later["job"], third.said("event=job trigger=alarm")) == (None, [])
    assert len(third.said("code=recalibration.cap")) == 1
