"""Two boards as users start them, and their fleet: histograms out, one calibration back, judged on their own frames."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from brokers import RealBroker, eventually
from collector_bench import collecting
from worlds import OUTLASTS_S, SPEC, World, make_world

from agent.contract.signing import new_key
from calibrate.histogram import AbsHistogram, merge
from calibrate.plan import PrecisionPlan
from engines.calibration import Calibration, load_calibration
from engines.store.artefact import Store
from fleet.cli.main import main
from fleet.devices.devices import Devices
from fleet.merge.calibration import bundle
from fleet.store.opening import open_store

pytestmark = [pytest.mark.trial, pytest.mark.broker]


def make_board(folder: Path, light: float, broker: RealBroker, key: Path) -> World:
    world = make_world(
        folder,
        lambda _: light,
        OUTLASTS_S,
        camera={"source": "clip.avi", "speed": 5},
        mqtt={"host": broker.host, "port": broker.port, "device": folder.name},
        commands={"operator_keys": [str(key)], "clock": "trusted"},  # this machine may follow no time server
        privacy={"histograms": True},
    )
    raw = {**SPEC, "task": "raw", "min_sqnr_db": 10.0}  # a class is soon the same, whatever the scales
    (folder / "model.yaml").write_text(yaml.safe_dump({key: raw[key] for key in raw.keys() - {"labels"}}))
    plain = PrecisionPlan(evidence={"by": "the owner"})  # without repairs, whose ranges are of the board's own frames
    (folder / "plan.json").write_text(plain.to_json())
    world.config["plan"] = "plan.json"
    return world


class Operator:
    """With a key, at the command line."""

    def __init__(self, broker: RealBroker, key: Path) -> None:
        self._options = ["--port", str(broker.port), "--sign", str(key), "--json"]

    def tared(self, *words: object) -> dict[str, Any]:
        command = [sys.executable, "-m", "fleet.cli", *map(str, words), *self._options]
        told = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(os.environ))
        assert told.stdout, told.stderr
        result: dict[str, Any] = json.loads(told.stdout)
        return result

    def code(self, *words: object) -> str:
        return str(self.tared(*words)["error"]["code"])


def serving(world: World) -> Calibration | None:
    """Return the calibration that has stood its probation there."""
    if not (world.state_dir / "current").exists():
        return None
    current = Store(world.state_dir).read("current")
    assert current is not None
    return load_calibration(current.path / "calibration.json")


def dimmed(histograms: Mapping[str, AbsHistogram], octaves: int) -> dict[str, AbsHistogram]:
    """Return the histograms of an input that is so much smaller."""
    return {
        tensor: AbsHistogram(h.counts, h.range_exp - octaves, h.amax * 2.0**-octaves, h.zeros, h.nonfinite)
        for tensor, h in histograms.items()
    }


def test_merged_histograms_become_a_candidate_that_each_board_judges(tmp_path: Path, mosquitto: RealBroker) -> None:
    private, public, _ = new_key(tmp_path / "ann")
    operator = Operator(mosquitto, private)
    worlds = [make_board(tmp_path / name, light, mosquitto, public) for name, light in (("b0", 0.5), ("b1", 0.6))]
    with ExitStack() as stack:
        for world in worlds:
            stack.enter_context(world.running())
        eventually(lambda: all(serving(world) is not None for world in worlds), 90.0)
        own = [calibration for world in worlds if (calibration := serving(world)) is not None]
        output = tmp_path / "merged.json"
        told = operator.tared("fleet", "merge", "b0", "b1", "-o", output)
        assert (told["board_count"], told["excluded"], told["silent"]) == (2, {}, {})
        merged = load_calibration(output)
        assert dict(merged.histograms) == {
            tensor: merge(seen, own[1].histograms[tensor]) for tensor, seen in own[0].histograms.items()
        }
        dark = tmp_path / "dark.bundle"
        dark.write_bytes(bundle(replace(merged, histograms=dimmed(merged.histograms, 8))))
        assert operator.code("send", "b0", "calibration", f"file={dark}") == "recalibration.refused"
        assert serving(worlds[0]) == own[0], "what a board refuses never serves"
        sent = operator.tared("send", "b0", "calibration", f"file={told['bundle']}")
        assert sent["status"] == "SUCCEEDED", sent
        found = serving(worlds[0])
        assert found is not None
        assert found.amax == merged.amax
        assert found.merged["boards"] == 2
        assert found.source == "merged of 2 boards"
        assert operator.code("send", "b0", "histograms") == "command.histograms", "they are not its own any more"
        assert operator.tared("send", "b1", "histograms")["status"] == "SUCCEEDED"
        assert operator.tared("send", "b0", "rollback")["status"] == "SUCCEEDED"
        assert serving(worlds[0]) == own[0]
        stack.enter_context(collecting(mosquitto, tmp_path / "db"))
        assert rolled_out(operator, tmp_path / "db", str(told["bundle"])) == ["COMPLETED"]
        assert [found.amax for world in worlds if (found := serving(world)) is not None] == [merged.amax] * 2


def rolled_out(operator: Operator, where: Path, file: str) -> list[str]:
    """To one board, and once it has shown itself to the other: the ends that rollouts came to."""
    with open_store(where) as store:
        eventually(lambda: len([each for each in Devices(store).all("default") if each.telemetry]) == 2, 60.0)
    wishes = ["--waves", "1,100%", "--soak", "1s", "--gate", "fps>=1,fidelity>=0.5", "--why", "a merged calibration"]
    assert main(["fleet", "rollout", "create", "--op", "calibration", f"file={file}", "--db", str(where), *wishes]) == 0
    run = ["fleet", "rollout", "run", "--until-done", "--db", where]
    ended: dict[str, str] = operator.tared(*run)["ended"]
    for identity in ended:
        main(["fleet", "rollout", "show", identity, "--db", str(where)])  # shown where the test fails
    return list(ended.values())
