"""Candidates that passed their verdict and are wrong all the same, in a daemon as a process: the video goes on.

In the daemon's process a case makes every engine wrong that it loads from the store, in the order of the first
argument. The child's verdict has seen the engine without it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from warm_start import TARED, TalkingProcess
from worlds import make_world, run_until

CASES = """
import sys, threading
from dataclasses import replace

import numpy as np

import agent.core.state
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
        elif self.fault == "stillborn":
            raise RuntimeError("no kernel for this")
        elif self.count == 5:  # after its rehearsal and three frames
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
agent.core.state.State.refusal = lambda *_: None  # the next fault is tried in the same scene, too
"""


@pytest.mark.trial
def test_whatever_a_candidate_does_every_frame_is_answered(tmp_path: Path) -> None:
    faults = ["stillborn", "crash", "nan", "shape", "unfaithful", "hang"]
    world = make_world(
        tmp_path,
        lambda _: 0.5,
        900.0,
        camera={"source": "clip.avi", "speed": 5},
        recalibration={"max_loss": 0.5, "cooldown_s": 0.0},
        probation={"frames": 100_000, "seconds": 0.0, "deadline_s": 1.0, "rollbacks_per_day": len(faults)},
    )
    process = TalkingProcess([",".join([*faults, "none"]), *world.arguments()], CASES + TARED)
    summary, said = run_until(process, "recalibration.rollback_loop")
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
