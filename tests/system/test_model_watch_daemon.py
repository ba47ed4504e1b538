"""A model that is exchanged under a running daemon: taken up in place, or refused while the one before serves on."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import onnx
import pytest
from brokers import RealBroker, Watcher
from daemon_life import TOPICS, LiveCamera
from job_kills import Case, put_other_model
from onnx import numpy_helper

from agent.core.state import JobState


def put_model_with_nan(path: Path, content: bytes) -> None:
    """The same graph, whose first weights are no numbers: it loads and infers without an error."""
    model = onnx.load_from_string(content)
    weights = model.graph.initializer[0]
    nothing = np.full_like(numpy_helper.to_array(weights), np.nan)
    weights.CopyFrom(numpy_helper.from_array(nothing, weights.name))
    path.write_bytes(model.SerializeToString())


@pytest.mark.trial
@pytest.mark.slow
@pytest.mark.broker
def test_a_new_model_is_taken_up_by_the_same_process(tmp_path: Path, any_broker: RealBroker) -> None:
    camera = LiveCamera(tmp_path, mqtt={"host": any_broker.host, "port": any_broker.port})
    camera.show("day")
    world = camera.world
    path = world.folder / "model.onnx"
    with Watcher(any_broker.endpoint) as watcher, ExitStack() as stack:
        case = Case(world, camera.scene, any_broker, stack)
        with case.living("life") as life:
            life.wait(lambda: life.said("event=swap .*trigger=first-start"))
            served, model = life.status()["engine"], watcher.retained(TOPICS.birth)["model"]
            whole = path.read_bytes()

            path.write_bytes(whole[: len(whole) // 2])
            life.wait(lambda: life.said("code=model.changed"))
            assert life.status()["engine"] == served
            put_model_with_nan(path, whole)
            life.wait(lambda: life.said("code=model.changed .*NaN or infinite values"))
            assert life.status()["engine"] == served
            path.write_bytes(whole)

            put_other_model(world)
            life.wait(lambda: life.said("event=job trigger=model step=COMMITTED"))
            life.wait(lambda: len(life.said("event=swap .*trigger=first-start")) == 2)
            assert life.status()["engine"] != served
            other = watcher.expect(TOPICS.birth, engine=life.status()["engine"])
            assert other["model"] != model
        assert len(life.said("code=model.changed")) == 2
        assert [job.state for job in case.records("model")] == [JobState.FAILED, JobState.FAILED, JobState.COMMITTED]
        states = [
            watcher.seen[place].payload
            for place in range(len(watcher.seen))
            if watcher.seen[place].topic == TOPICS.status
        ]
        assert not any(b'"stopping"' in state or b'"offline"' in state for state in states)
