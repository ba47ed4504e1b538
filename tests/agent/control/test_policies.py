"""The owner's policies: set, kept, taken over and reported; switched with the engine, on the very frame."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from device import carry_out
from exchange_bench import Bench as SwapBench
from exchange_bench import bench
from executor_bench import Desk, desk
from kept import kept_in, refusing
from results_bench import CONFIG, SPEC, detections, served

from agent.camera.config import CameraConfig
from agent.common.errors import AgentError, CommandError
from agent.contract.commands import PolicyArgs
from agent.control.policies import Policies
from agent.daemon.handlers import EngineHandlers
from agent.results.writer import ResultLine
from agent.vision.detections import Detections
from agent.vision.tasks.classify import Classification

__all__ = ["bench", "desk"]  # fixtures
MASK = [[0.0, 0.0], [0.5, 0.0], [0.5, 1.0]]


class Kept:
    """Policies in a folder, and what went wrong."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        self.config = CONFIG.model_copy(update={"state_dir": folder, **changes})
        self.errors: list[AgentError] = []
        self.folder = folder
        self.open()

    def open(self) -> Policies:
        self.state = kept_in(self.folder, self.errors.append)
        self.policies = Policies(self.config, self.state)
        return self.policies

    def set(self, **arguments: Any) -> None:
        self.policies.set(PolicyArgs.model_validate({"artefact": "night", **arguments}))

    def refusal(self, **arguments: Any) -> str:
        with pytest.raises(CommandError) as caught:
            self.set(**arguments)
        assert caught.value.code == "command.policy"
        return str(caught.value)


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    return Kept(tmp_path)


def test_a_policy_is_kept_over_restarts_taken_over_and_removed(kept: Kept) -> None:
    kept.set(score_threshold="0.4", classes="B,0", masks=json.dumps([MASK]))
    whole = {"score_threshold": 0.4, "classes": ["a", "b"], "masks": {"street": [MASK]}}
    assert kept.policies.document("night") == whole
    assert kept.open().document("night") == whole
    assert kept.policies.summary("night") == {**whole, "masks": 1}
    kept.set(artefact="day", like="night")
    kept.set(score_threshold=0.5)
    assert kept.policies.summaries == {"night": {"score_threshold": 0.5}, "day": {**whole, "masks": 1}}
    kept.set(clear=True)
    assert [*kept.open().summaries] == ["day"]
    assert kept.policies.keep_only({"night"})
    assert (kept.open().summaries, kept.policies.keep_only(set()), kept.errors) == ({}, False, [])


@pytest.mark.parametrize("policy", ["{", "[]", '{"score_threshold": 7}', '{"classes": ["person"]}'])
def test_a_damaged_policy_is_reported_and_costs_no_more_than_the_policies(kept: Kept, policy: str) -> None:
    kept.state.replace({"policies": [("night", policy)]})
    assert kept.open().summaries == {}
    assert [error.code for error in kept.errors] == ["state.damaged"]
    assert "set them again with the command policy" in str(kept.errors[0])
    kept.set(score_threshold=0.4)
    assert [*kept.open().summaries] == ["night"]


def test_an_engine_built_in_place_of_another_has_its_policy(kept: Kept) -> None:
    kept.set(score_threshold=0.4)
    kept.policies.hand_on("night", "rebuilt")
    kept.policies.hand_on("never", "other")
    assert kept.open().document("rebuilt") == kept.policies.document("night")
    kept.set(artefact="rebuilt", score_threshold=0.5)
    kept.policies.hand_on("night", "rebuilt")
    assert kept.policies.summary("rebuilt") == {"score_threshold": 0.5}


def test_a_policy_that_the_model_or_the_cameras_do_not_allow_is_refused(kept: Kept, tmp_path: Path) -> None:
    assert "expected 0.3 or more, from which on the model spec decodes answers" in kept.refusal(score_threshold=0.2)
    assert "class 'owl'" in kept.refusal(classes="a,owl")
    assert "class 2; expected a number from 0 to 1" in kept.refusal(classes=[2])
    assert "masks of camera 'yard'" in kept.refusal(masks={"yard": [MASK]})
    assert "no policy of 'day'; expected no artefact has one yet" in kept.refusal(like="day")
    two = [CameraConfig(name=name, source="clip.avi") for name in ("gate", "yard")]
    several = Kept(tmp_path, camera=None, cameras=two)
    assert "expected masks by camera: 'gate' or 'yard'" in several.refusal(masks=[MASK])
    classifier = Kept(tmp_path, model=SPEC.model_copy(update={"task": "classify", "decoder": None}))
    assert "masks of a model of task classify" in classifier.refusal(masks=[MASK])
    classifier.set(score_threshold=0.1)
    assert "task raw" in Kept(tmp_path, model=SPEC.model_copy(update={"task": "raw"})).refusal(score_threshold=0.5)


@pytest.mark.parametrize(
    "arguments",
    [{"score_threshold": 1.5}, {"classes": []}, {"masks": [[[0, 0], [1, 1]]]}, {"masks": [[[0, 0], [1, 1], [2, 0]]]},
     {"masks": "[" * 60_000}, {"clear": True, "score_threshold": 0.5}, {"like": "day", "clear": True}],
)  # fmt: skip
def test_arguments_that_no_board_takes(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="PolicyArgs"):
        PolicyArgs.model_validate({"artefact": "night", **arguments})


def test_a_disk_that_refuses_leaves_the_policies_as_they_were(kept: Kept) -> None:
    kept.set(score_threshold=0.4)
    with refusing(kept.state), pytest.raises(AgentError, match=r"state\.write: .*the policies"):
        kept.set(score_threshold=0.5)
    assert kept.policies.summary("night") == {"score_threshold": 0.4}


def test_only_what_is_shown_changes_and_only_of_this_engine(kept: Kept) -> None:
    kept.set(artefact="f00d", score_threshold=0.6)
    answer = served(7, detections(0.9, 0.5))
    line = ResultLine(answer, SPEC, kept.policies.show).document
    assert [each["score"] for each in line["detections"]] == [0.9]
    assert line["policy_left_out"] == 1
    assert isinstance(answer.result, Detections)
    assert len(answer.result) == 2, "fidelity is measured by all of them"
    other = replace(answer, engine_id="beef")
    assert kept.policies.show(other) is other
    assert "policy_left_out" not in ResultLine(other, SPEC, kept.policies.show).document
    withheld = ResultLine(served(7, Classification(1, 0.5)), SPEC, kept.policies.show).document
    assert [withheld[key] for key in ("class", "label", "score", "policy_left_out")] == [None, None, 0.5, 1]


def test_events_name_the_policy_that_takes_over_and_one_that_a_new_engine_does_not_inherit(bench: SwapBench) -> None:
    policies, device = bench.executor.watch.policies, bench.executor.config.mqtt.device
    policies.set(PolicyArgs(artefact=bench.old, score_threshold=0.4))
    bench.live()
    bench.answer(19)
    bench.tick()
    swap, commit = (detail for kind, detail in bench.events if kind in ("swap", "commit"))
    assert "policy" not in swap
    assert commit["policy_before"] == {"score_threshold": 0.4}
    assert commit["policy_command"] == f"tared send {device} policy artefact={bench.new} like={bench.old}"
    assert policies.summary(bench.new) is None
    policies.set(PolicyArgs(artefact=bench.new, like=bench.old))
    bench.executor.service.serving = bench.executor.service.store.find(bench.old)
    bench.events.clear()
    bench.live("switch")
    swap, commit = (detail for kind, detail in bench.events if kind in ("swap", "commit"))
    assert swap["policy"] == {"score_threshold": 0.4}
    assert "policy_command" not in commit


def test_the_command_sets_and_reports_and_a_policy_goes_with_its_artefact(desk: Callable[..., Desk]) -> None:
    at = desk(raised_serves=True)

    def order(**arguments: Any) -> dict[str, Any]:
        args = PolicyArgs.model_validate({"artefact": at.raised.id, **arguments})
        carry_out(EngineHandlers(at.executor), "policy", args, at.results.append)
        assert at.results[-1].result is not None
        return at.results[-1].result

    assert order() == {"artefact": at.raised.id, "policy": None}
    assert order(score_threshold=0.5)["policy"] == {"score_threshold": 0.5}
    assert f"policy {{'artefact': '{at.raised.id}', 'policy': {{'score_threshold': 0.5}}}}" in at.events
    with pytest.raises(CommandError, match=r"command\.policy.*no regime 'dusk', and it does not serve"):
        order(artefact="dusk", score_threshold=0.5)
    policies = at.executor.watch.policies
    policies.set(PolicyArgs(artefact="0" * 16, score_threshold=0.5))
    at.executor.state = replace(at.executor.state, is_untidy=True)
    at.tick()
    assert [*policies.summaries] == [at.raised.id]
