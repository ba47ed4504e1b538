"""What the observer remembers: over a restart, over a kill in the middle of a line, and never of another engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_drift import monitor_of, regime, scene

from agent import memory as memory_module
from agent.config import DriftConfig
from agent.drift import DriftMonitor
from agent.errors import AgentError
from agent.memory import Memory, Recalled
from calibrate.errors import CalibrationError


def told(_error: AgentError) -> None:
    raise AssertionError("nothing was to be told")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "evidence.jsonl"


def test_blocks_and_frames_are_recalled_by_the_next_process(path: Path) -> None:
    memory = Memory(path, "rtsp://camera", told)
    assert memory.begin("day", recall=True) == Recalled()
    memory.frame(1.0, 0.5)
    memory.frame(2.0, None)
    memory.block({"e": 1})
    memory.frame(3.0, 1.0)
    memory.block({"e": 2})
    again = Memory(path, "rtsp://camera", told)
    assert again.begin("day", recall=True) == Recalled({"e": 2}, None, ((1.0, 0.5), (2.0, None), (3.0, 1.0)))
    again.frame(4.0, 0.25)
    assert Memory(path, "rtsp://camera", told).begin("day", recall=True).fidelity[-2:] == ((3.0, 1.0), (4.0, 0.25))


def test_another_engine_and_one_that_serves_anew_begin_with_nothing(path: Path) -> None:
    for identity, recall in (("night", True), ("day", False)):
        memory = Memory(path, "rtsp://camera", told)
        memory.begin("day", recall=True)
        memory.block({"e": 1})
        assert Memory(path, "rtsp://camera", told).begin(identity, recall) == Recalled()


def test_a_kill_in_the_middle_of_a_line_costs_that_line(path: Path) -> None:
    memory = Memory(path, "rtsp://camera", told)
    memory.begin("day", recall=True)
    memory.block({"e": 1})
    memory.block({"e": 2})
    path.write_bytes(path.read_bytes()[:-3])
    assert Memory(path, "rtsp://camera", told).begin("day", recall=True).drift == {"e": 1}


def test_what_was_seen_of_another_scene_is_forgotten(path: Path) -> None:
    memory = Memory(path, "rtsp://camera", told)
    memory.begin("day", recall=True)
    memory.frame(1.0, 0.5)
    memory.fidelity_starts(1.5)
    memory.frame(2.0, 1.0)
    recalled = Memory(path, "rtsp://camera", told).begin("day", recall=True)
    assert (recalled.since, recalled.fidelity) == (1.5, ((2.0, 1.0),))


def test_the_file_stays_small_however_long_it_lasts(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_module, "_FRAMES", 50)
    monkeypatch.setattr(memory_module, "_LINES", 300)
    memory = Memory(path, "rtsp://camera", told)
    memory.begin("day", recall=True)
    longest = 0
    for number in range(1000):
        memory.frame(float(number), 1.0)
        memory.block({"e": number})
        longest = max(longest, path.read_bytes().count(b"\n"))
    assert longest <= 302
    recalled = Memory(path, "rtsp://camera", told).begin("day", recall=True)
    assert recalled.drift == {"e": 999}
    assert 50 <= len(recalled.fidelity) <= 100
    assert recalled.fidelity[-1] == (999.0, 1.0)


def test_a_disk_that_refuses_is_told_of_once(tmp_path: Path) -> None:
    errors: list[AgentError] = []
    memory = Memory(tmp_path / "no folder" / "evidence.jsonl", "rtsp://camera", errors.append)
    assert memory.begin("day", recall=True) == Recalled()
    for number in range(5):
        memory.frame(float(number), 1.0)
        memory.block({})
    assert [error.code for error in errors] == ["memory.write"]


def test_a_monitor_goes_on_where_its_last_block_ended() -> None:
    """Killed during a block, it loses that block: the alarm comes as it would have, one block later."""
    alarms = []
    for killed_at in (None, 9.5):
        monitor, second = monitor_of(regime()), 0
        while monitor.state.state != "alarm":
            if killed_at is not None and second > killed_at:
                killed_at, kept = None, monitor.memory()
                monitor = monitor_of(regime())
                monitor.recall(kept)
            monitor.update(float(second), scene(1 / 16, second))
            second += 1
        alarms.append(second)
    assert alarms[0] < alarms[1] <= alarms[0] + 3 + 1


@pytest.mark.parametrize("memory", [{}, {"detector": 3}, {"onset_ts": "x"}, {"gains_db": None}])
def test_a_memory_that_is_none_is_refused_and_changes_nothing(memory: dict[str, object]) -> None:
    monitor = monitor_of(regime())
    kept = monitor.memory()
    with pytest.raises(CalibrationError) as refused:
        monitor.recall({**kept, **memory} if memory else memory)
    assert refused.value.code == "evidence.state"
    assert monitor.memory() == kept


def test_evidence_weighed_under_other_settings_is_refused() -> None:
    other = DriftMonitor(DriftConfig(tolerance_db=6.0), 1.5, regime())
    with pytest.raises(CalibrationError):
        other.recall(monitor_of(regime()).memory())


def test_a_file_that_cannot_be_removed_ends_nothing(path: Path) -> None:
    path.mkdir()
    errors: list[AgentError] = []
    memory = Memory(path, "rtsp://camera", errors.append)
    assert memory.begin("day", recall=False) == Recalled()
    memory.frame(1.0, 1.0)
    assert [error.code for error in errors] == ["memory.write"]


def test_what_was_seen_by_another_camera_says_nothing(path: Path) -> None:
    memory = Memory(path, "rtsp://camera", told)
    memory.begin("day", recall=True)
    memory.block({"e": 1})
    assert "camera" not in path.read_text()
    assert Memory(path, "rtsp://elsewhere", told).begin("day", recall=True) == Recalled()
