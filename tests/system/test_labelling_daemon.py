"""A running daemon draws frames for labelling; their labels become its accuracy, over a real broker."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from brokers import RealBroker, Watcher, eventually
from worlds import World

from agent.config import load_config
from agent.contract.topics import Topics
from agent.labelling.store import LabelStore
from agent.models.model import open_model
from agent.vision.tasks.classify import Classification
from engines.store.artefact import Store

TOPICS = Topics("default", "board")
OFTEN = {"per_week": 1_000_000, "most_waiting": 100_000}
DRAWN = 60


def drawn_frames(world: World) -> LabelStore:
    """The store of a world in which a daemon draws until there are enough frames."""
    spec = load_config(world.folder / "config.yaml").model
    store = LabelStore(world.state_dir, open_model(spec).sha256, spec.task)
    with world.running() as process:
        eventually(lambda: store.exists and len(store.frames()) >= DRAWN, 60.0)
        reading = threading.Thread(target=process.communicate)
        reading.start()
        process.terminate()
        reading.join()
    return store


@pytest.mark.trial
@pytest.mark.broker
def test_labels_of_drawn_frames_come_to_the_accuracy_of_the_engine_in_service(
    tmp_path: Path, any_broker: RealBroker, calibrated_once: World
) -> None:
    """One frame of four is labelled as another class than the served one."""
    world = calibrated_once.copy(
        tmp_path / "world",
        mqtt={"host": any_broker.host, "port": any_broker.port},
        labelling=OFTEN,
        observe={"budget": None, "period_s": 0.1},
    )
    world.arguments()
    store = drawn_frames(world)
    frames = store.frames()
    engine = Store(world.state_dir).read("current")
    assert engine is not None
    assert {frame.regime for frame in frames} == {engine.id}
    assert [sum(frame.seen) for frame in frames] == sorted(sum(frame.seen) for frame in frames)
    assert all(store.picture(frame.id).startswith(b"\xff\xd8") for frame in frames)
    for frame in frames:
        assert isinstance(frame.served, Classification)
        store.label(frame.id, (frame.served.class_id + (frame.id % 4 == 0)) % 5)
    with Watcher(any_broker.endpoint) as watcher, world.running():
        event = watcher.expect(TOPICS.event, kind="labelled")
        while (labelled := watcher.expect(TOPICS.telemetry).get("labelled_accuracy")) is None:
            pass
    assert (event["labels"], labelled["labels"]) == (len(frames), len(frames))
    accuracy = labelled["accuracy"]
    assert event["regimes"][engine.id]["accuracy"] == pytest.approx(accuracy, abs=1e-4)
    assert accuracy["low"] <= 0.75 <= accuracy["high"]
    assert accuracy["n"] == len(frames)
    assert labelled["int8_loss"]["low"] <= labelled["int8_loss"]["estimate"] <= labelled["int8_loss"]["high"]
