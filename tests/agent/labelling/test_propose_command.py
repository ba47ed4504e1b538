"""`tared label --propose`: the proposal, and the command that confirms it; nothing is changed by it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from kept import kept_in
from label_bench import LabelBench

from agent.config import load_config
from agent.contract.commands import PolicyArgs
from agent.control.policies import Policies
from fleet.cli.main import main


def test_the_command_that_is_shown_confirms_what_the_labels_speak_for(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of two objects that are served in each frame, the less sure one is never there."""
    bench = LabelBench(tmp_path, "detect", 160)
    (tmp_path / "state" / "artefacts" / "a1b2").mkdir(parents=True)
    config = load_config(bench.config)
    frames = bench.store.frames()
    bench.store.label_all({frame.id: frame.served[:1] for frame in frames})  # type: ignore[index]  # of a detector
    policies = Policies(config, kept_in(config.state_dir))
    policies.set(PolicyArgs(artefact="a1b2", classes=["dog", "bus", "owl"]))
    command = ["label", "--propose", "-c", str(bench.config)]
    assert main([*command, "--json"]) == 0
    (proposal,) = json.loads(capfd.readouterr().out)["proposals"]
    assert (proposal["artefact"], proposal["score_threshold"], proposal["labels"]) == ("a1b2", 0.75, 160)
    assert (proposal["classes"], [*proposal["never_right"]]) == (["dog", "owl"], ["bus"])
    assert proposal["gain"]["low"] > 0.0
    assert main(command) == 0
    shown = capfd.readouterr().out
    assert f"to confirm: {proposal['command']}" in shown
    assert "score_threshold 0.75 instead of 0.3" in shown

    kept = Policies(config, kept_in(config.state_dir))
    assert kept.document("a1b2") == {"classes": ["dog", "bus", "owl"]}, "nothing is changed by it"
    words = shlex.split(proposal["command"])
    assert words[:4] == ["tared", "send", config.mqtt.device, "policy"]
    policies.set(PolicyArgs.model_validate(dict(word.split("=", 1) for word in words[4:])))
    assert policies.document("a1b2") == {"score_threshold": 0.75, "classes": ["dog", "owl"]}
    assert main([*command, "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["proposals"] == []
