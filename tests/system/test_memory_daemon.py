"""A daemon on a live camera, killed in the middle of an alarm's job: what it had found goes on.

No camera can be opened on every machine that runs this. So in the daemon's process a file stands where OpenCV would
open a stream, played at fifty frames a second without end. All else is the daemon as users start it, to which the
source is a live one.
"""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
from brokers import RealBroker
from daemon_life import TOPICS, LiveCamera, living
from unexpected import unexpected
from worlds import World

from agent.monitoring.estimates import FidelityRecord
from agent.monitoring.evidence_file import EvidenceFile, RecalledEvidence
from agent.mqtt.client import MqttClient
from agent.mqtt.message import Message


def remembered(world: World, engine: str) -> tuple[RecalledEvidence, int]:
    """Return the evidence that a next process would go on with, and the frames in it; the file stays as it is."""
    copy = world.folder / "copy.jsonl"
    shutil.copy(world.state_dir / "evidence.jsonl", copy)
    record = FidelityRecord()
    recalled = EvidenceFile(copy, "rtsp://camera", unexpected).start(engine, 0.0, recall=True, mean=record)
    assert recalled is not None
    return recalled, record.since_start.estimate.interval.n


@pytest.mark.trial
@pytest.mark.broker
def test_the_evidence_of_a_killed_daemon_goes_on(tmp_path: Path, any_broker: RealBroker) -> None:
    camera = LiveCamera(
        tmp_path,
        night=0.12,
        observe={"period_s": 0.05, "alert_period_s": 0.05},
        drift={"block_s": 0.2, "false_alarms_per_30d": 1000.0},
        regimes={"dwell_s": 1.0},
        recalibration={"per_day": 2, "max_loss": 1.0},  # the first start, and one alarm
        mqtt={"host": any_broker.host, "port": any_broker.port},
    )
    world, life = camera.world, partial(living, camera.world, camera.scene, any_broker)
    with life("first") as first:
        first.wait(lambda: first.said("event=commit .*trigger=first-start"))
    world.config["calibration"]["frames"] = 10_000  # from here on no job gets beyond collecting
    with life("second") as second, MqttClient(any_broker.endpoint, "labeller") as labeller:
        second.wait(lambda: second.status()["frames"] > 20)
        for frame in range(20):
            label = {"camera": "camera", "frame": frame, "labels": "a"}
            labeller.publish(Message(TOPICS.labels, json.dumps(label).encode()))
        second.wait(lambda: second.said("event=regime "))
        second.wait(lambda: second.status()["accuracy"]["n"] > 3)
        camera.show("day")
        second.wait(lambda: second.status()["job"])
        second.wait(lambda: second.status()["fidelity"]["n"] > 10)
        before = second.status()
    left, known = remembered(world, before["engine"])
    assert before["drift"]["state"] == "alarm"
    assert before["job"]["state"] == "COLLECTING"

    with life("third", period_s=3600.0, alert_period_s=3600.0) as third:
        third.wait(lambda: third.status()["frames"] > 0)
        after = third.status()
        third.wait(lambda: third.said("code=recalibration.cap"))
        later = third.status()
    assert after["drift"]["state"] == "alarm"
    assert after["engine"] == before["engine"]
    found, _ = remembered(world, before["engine"])
    assert found.since == left.since
    assert known >= before["fidelity"]["n"]
    assert known <= after["fidelity"]["n"] <= known + 3  # a process that looks once an hour adds next to nothing
    assert after["regimes"] == before["regimes"] == 1
    for estimate in ("fidelity_hour", "accuracy"):
        assert after[estimate]["n"] >= before[estimate]["n"] > 3, estimate
    assert (later["job"], third.said("event=job trigger=alarm")) == (None, [])
    assert len(third.said("code=recalibration.cap")) == 1
