"""`tared run --backend tensorrt` as a process, with its child, on the fakes: the main job on a GPU that is none."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path

import pytest
from places import FAKE_MACHINE_PATH
from worlds import ALARM_COMMIT, FIRST_COMMIT, OUTLASTS_S, World, make_world

from engines.store.artefact import Store


@pytest.fixture
def mistakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which the processes of this test record broken rules."""
    folder = tmp_path / "mistakes"
    folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", FAKE_MACHINE_PATH)
    monkeypatch.setenv("FAKE_MISTAKES", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


def board(folder: Path, light: float = 0.06, seconds: float = OUTLASTS_S) -> World:
    world = make_world(folder, lambda _: light, seconds)
    world.config["backend"] = "tensorrt"
    return world


def check(mistakes: Path, processes: int) -> None:
    """No process broke a rule, and each freed what it made."""
    reports = [path.read_text().splitlines() for path in mistakes.iterdir()]
    assert len(reports) == processes
    for told, *broken in reports:
        assert broken == []
        assert re.fullmatch(r"(\d+) made, \1 freed", told)


@pytest.mark.trial
def test_night_calibration_morning_alarm_recalibration_and_swap(tmp_path: Path, mistakes: Path) -> None:
    night, _ = board(tmp_path / "world").run(until=FIRST_COMMIT)
    world = board(tmp_path / "world", light=1.0)
    morning, _ = world.run(until=ALARM_COMMIT)
    assert [night["dropped"], morning["dropped"]] == [{}, {}]
    assert [swap["trigger"] for swap in (*night["swaps"], *morning["swaps"])] == ["first-start", "alarm"]
    assert morning["swaps"][0]["fidelity"] > morning["swaps"][0]["fidelity_before"]
    check(mistakes, 4)  # two daemons, and a child for every candidate
    current = Store(world.state_dir).read("current")
    assert current is not None
    assert current.manifest["inputs"]["backend"]["runtime"] == "tensorrt"
    assert current.manifest["inputs"]["backend"]["gpu"]
    assert {"engine.plan", "layers.json", "calibration.json"} <= set(current.manifest["files"])


@pytest.mark.trial
def test_another_release_builds_its_engine_anew_from_the_same_calibration(
    tmp_path: Path, mistakes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = board(tmp_path / "world")
    first, _ = world.run(until=FIRST_COMMIT)
    (swap,) = first["swaps"]
    again, _ = world.run("--frames", "20")
    assert again["swaps"] == []
    assert again["artefact"] == first["artefact"]
    monkeypatch.setenv("FAKE_VERSION", "10.13.3.9")
    updated, said = world.run("--frames", "20")
    assert updated["swaps"] == []
    assert updated["artefact"] != first["artefact"]
    assert "artefact.runtime" in said
    assert "was built for version 10.3.0" in said
    old, new = (json.loads(Path(run["artefact"], "manifest.json").read_text()) for run in (first, updated))
    assert old["inputs"]["calibration"] == new["inputs"]["calibration"]
    assert swap["artefact"] == old["id"]
    check(mistakes, 4)


@pytest.mark.trial
def test_a_recording_waits_for_the_reference_that_has_to_be_built(
    tmp_path: Path, mistakes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a board the builder takes minutes. The fake here takes longer than the clip plays."""
    monkeypatch.setenv("FAKE_BUILD_S", "10.0")
    world = board(tmp_path / "world", seconds=10.0)
    world.config["calibration"]["frames"] = 8
    _, said = world.run(until="trigger=first-start step=COLLECTING")
    assert "engine=reference" in said
    check(mistakes, 1)


@pytest.mark.trial
def test_a_reference_that_is_wrong_now_and_then_is_replaced_and_a_job_makes_up_for_it(
    tmp_path: Path, mistakes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is right when it is opened, and while the first calibration is made; no call of TensorRT reports an error."""
    wrong = tmp_path / "wrong"
    monkeypatch.setenv("FAKE_WRONG_FROM", str(wrong))
    world = board(tmp_path / "world")
    world.change(observe={**world.config.get("observe", {}), "audit_period_s": 1.0})

    def break_later() -> None:
        world.wait_for_first_commit()
        wrong.touch()

    fault = threading.Thread(target=break_later)
    fault.start()
    summary, said = world.run(until="event=commit .*trigger=reference")
    fault.join()
    (event,) = [line for line in said.splitlines() if "event=reference" in line]
    assert "state=wrong" in event
    found = re.search(r"sqnr_db=(\S+) allowed_db=(\S+)", event)
    assert found is not None
    assert float(found[1]) < 0.0 < float(found[2]), "the sign of every value is wrong"
    assert [swap["trigger"] for swap in summary["swaps"]] == ["first-start", "reference"]
    assert summary["dropped"] == {}
    check(mistakes, 3)
