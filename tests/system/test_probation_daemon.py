"""Candidates that passed their verdict and are wrong all the same, in a daemon as a process: the video goes on.

In the daemon's process a case makes every engine wrong that it loads from the store, in the order of the first
argument. The child's verdict has seen the engine without it.
"""

from __future__ import annotations

import json
import re
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from daemon_life import LIMIT_S, LiveCamera
from warm_start import TARED, TalkingProcess
from worlds import World, make_world, run_until

LONG = {"frames": 100_000, "seconds": 0.0}

CASES = """
import os, signal, sys, threading, time
from dataclasses import replace

import numpy as np

import agent.jobs.refusal
from agent.models.engine_service import EngineService

faults = iter(sys.argv.pop(1).split(","))
load = EngineService.load


class Case:
    def __init__(self, engine, fault):
        self.engine, self.fault, self.count = engine, fault, 0
        self.inputs, self.outputs = engine.inputs, engine.outputs

    def infer(self, batch):
        self.count += 1
        outputs = self.engine.infer(batch)
        if self.fault == "unfaithful":
            outputs = {name: -output for name, output in outputs.items()}
        elif self.fault == "late" and self.count == 1:
            time.sleep(3.0)
        elif self.fault == "stillborn":
            raise RuntimeError("no kernel for this")
        elif self.count == 5:  # after its rehearsal and three frames
            if self.fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.fault == "crash":
                raise RuntimeError("out of luck")
            if self.fault == "nan":
                outputs = {name: output * np.float32("nan") for name, output in outputs.items()}
            if self.fault == "shape":
                outputs = {name: output[:, :-1] for name, output in outputs.items()}
            if self.fault == "hang":
                threading.Event().wait()
        return outputs

    def close(self):
        self.engine.close()


def load_case(self, artefact):
    loaded = load(self, artefact)
    return replace(loaded, engine=Case(loaded.engine, next(faults)))


EngineService.load = load_case
agent.jobs.refusal.REFUSED = ()  # the next fault is tried in the same scene, too
"""


def driven(world: World, faults: str) -> TalkingProcess:
    """The daemon of this world; faults: of the engines that it loads, one after the other."""
    return TalkingProcess([faults, *world.arguments()], CASES + TARED)


def world_of(folder: Path, **probation: Any) -> World:
    """At fifty frames a second, of a video that does not end before a test does."""
    return make_world(
        folder,
        lambda _: 0.5,
        900.0,
        camera={"source": "clip.avi", "speed": 5},
        recalibration={"max_loss": 0.5, "cooldown_s": 0.0},
        probation=probation,
    )


@pytest.mark.trial
def test_whatever_a_candidate_does_every_frame_is_answered(tmp_path: Path) -> None:
    faults = ["stillborn", "crash", "nan", "shape", "unfaithful", "hang"]
    world = world_of(tmp_path, **LONG, deadline_s=1.0, rollbacks_per_day=len(faults))
    summary, said = run_until(driven(world, ",".join([*faults, "none"])), "recalibration.rollback_loop")
    rollbacks = summary["rollbacks"]
    reasons = ["error", "error", "output", "output", "fidelity", "hang"]
    assert [rollback["reason"] for rollback in rollbacks] == [f"probation.{reason}" for reason in reasons], said
    suffered = dict(zip(faults, rollbacks, strict=True))
    for fault in ("crash", "nan", "shape", "hang"):
        assert suffered[fault]["frames"] == 3
        assert suffered[fault]["suffered"] == 1
    assert (suffered["stillborn"]["frames"], suffered["stillborn"]["suffered"]) == (0, 0)
    assert suffered["unfaithful"]["frames"] == suffered["unfaithful"]["suffered"] > 3
    assert all(rollback["missed"] == 0 for rollback in rollbacks)
    assert summary["dropped"] == {}
    assert summary["swaps"] == []
    assert [path.name for path in (world.state_dir / "artefacts").iterdir()] == [Path(summary["artefact"]).name]
    assert len(list((world.state_dir / "refused").iterdir())) == len(faults)
    assert not (world.state_dir / "current").exists()
    assert said.count("step=ROLLED_BACK") == len(faults)
    assert said.count("code=recalibration.rollback_loop") == 1


class Camera(LiveCamera):
    """A live camera, a night of which serves well, and a store that shows what became of each candidate."""

    def __init__(self, folder: Path, **probation: Any) -> None:
        super().__init__(
            folder,
            night=0.12,
            recalibration={"cooldown_s": 0.0},
            probation={"max_slowdown": 50.0, **probation},  # a busy machine is no matter here
        )

    def driven(self, faults: str, *arguments: str) -> TalkingProcess:
        """As `driven`, on this camera."""
        return self.process(*arguments, driver=CASES, first=faults)

    @property
    def artefacts(self) -> set[str]:
        return {path.name for path in (self.world.state_dir / "artefacts").iterdir()}

    def refusal(self, artefact: str) -> Any:
        return json.loads((self.world.state_dir / "refused" / f"{artefact}.json").read_text())


def ids(said: str, event: str) -> list[str]:
    return re.findall(f"event={event} .*?artefact=([0-9a-f]{{16}})", said)


@pytest.mark.trial
def test_a_slow_first_inference_is_forgiven_and_what_a_signal_ends_leaves_the_store(tmp_path: Path) -> None:
    camera = Camera(tmp_path, **LONG, deadline_s=1.0)
    summary, said = run_until(camera.driven("late"), "event=swap")
    assert "step=CANCELLED" in said
    assert (summary["swaps"], summary["rollbacks"]) == ([], [])
    assert sum(summary["dropped"].values()) < 100, said  # of 150 that came while it rehearsed
    (candidate,) = ids(said, "swap")
    assert camera.artefacts == {Path(summary["artefact"]).name}
    refusal = camera.refusal(candidate)
    assert refusal["rollback"]["reason"] == "recalibration.cancelled"
    assert refusal["verdict"]["accepted"]
    assert not (camera.world.state_dir / "current").exists()


@pytest.mark.trial
def test_a_start_after_a_power_cut_serves_the_engine_before_and_counts_the_rollback(tmp_path: Path) -> None:
    camera = Camera(tmp_path, frames=40, seconds=1.0)
    said = []
    with camera.driven("none,kill") as process:
        limit = threading.Timer(LIMIT_S, process.terminate)
        limit.start()
        for line in process.stderr:
            said.append(line)
            if "event=commit" in said[-1]:
                camera.show("day")
        limit.cancel()
    log = "".join(said)
    assert process.returncode == -signal.SIGKILL, log
    # The cut may come before anybody says that the candidate serves, but not before its probation is written down.
    committed, candidate = ids(log, "job trigger=[a-z-]+ step=PROBATION")
    assert ids(log, "commit") == [committed]
    assert candidate in camera.artefacts
    again, told = run_until(camera.driven("none", "--frames", "10"))
    assert Path(again["artefact"]).name == committed
    assert (camera.world.state_dir / "current").readlink().name == committed
    assert "step=ROLLED_BACK" in told
    assert candidate not in camera.artefacts
    assert camera.refusal(candidate)["rollback"]["reason"] == "recalibration.interrupted"
    assert len(json.loads((camera.world.state_dir / "restraint.json").read_text())["rollbacks"]) == 1


@pytest.mark.trial
def test_a_sound_candidate_is_kept_and_a_wrong_one_after_it_costs_no_frame(tmp_path: Path) -> None:
    """From one calibrated engine to another, as after an alarm; the first one serves on, and after a restart too."""
    camera = Camera(tmp_path, frames=40, seconds=2.0)
    world = camera.world
    world.config["camera"]["policy"] = "every-frame"

    def follow(line: str) -> None:
        if "event=commit" in line:
            camera.show("day")

    summary, said = run_until(camera.driven("none,crash"), "event=rollback .*probation.error", follow=follow)
    (swap,), (rollback,) = summary["swaps"], summary["rollbacks"]
    assert (swap["trigger"], rollback["trigger"]) == ("first-start", "alarm")
    assert (swap["skipped"], rollback["missed"], rollback["suffered"] >= 1) == (0, 0, True)
    assert summary["dropped"] == {}
    assert "event=commit" in said
    current = (world.state_dir / "current").resolve()
    assert str(current) == summary["artefact"]
    assert json.loads((current / "manifest.json").read_text())["id"] == swap["artefact"] != rollback["artefact"]
    again, _ = run_until(camera.process("--frames", "10"))
    assert again["artefact"] == summary["artefact"]
