"""Plans for several scenes: each is searched on and bounded, the worst decides, and no scene judges its own repairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plan_bench import Place
from plan_world import LOUD, MACS, QUIET, journal, planner
from worlds import write_clip

import agent.planning.ladder as ladder
from agent.common.errors import AgentError
from agent.planning.certificate import ERROR, TrialResult, worst_of
from agent.planning.search import PlanSearch, split_by_time
from agent.planning.what_if import WhatIf, WhatIfResult, choose_repairs
from agent.reports.plan import Evidence
from calibrate.plan import PrecisionPlan
from engines.interface import Array

SCENES = ("clip.avi", "dusk.avi")


@pytest.fixture
def scenes(search_world: Path) -> Path:
    """The clip that calibrated, one a little darker, and one of twice the light, whose values the scales clip."""
    write_clip(search_world / "dusk.avi", lambda _: 0.4, 160)
    write_clip(search_world / "glare.avi", lambda _: 1.0, 160)
    return search_world


def searched(world: Path, *sources: str, max_loss: float = MACS.max_loss) -> tuple[PlanSearch, Evidence]:
    found = planner(world, replace(MACS, max_loss=max_loss), sources=sources)
    found.run(journal(world))
    return found, found.plan().evidence


# ---- the frames


def numbered(*indices: int) -> list[tuple[int, Array]]:
    return [(index, np.array([index])) for index in indices]


def values(frames: Sequence[Array]) -> list[int]:
    return [int(frame[0]) for frame in frames]


def test_repairs_are_proposed_on_some_stretches_of_time_and_tried_on_others() -> None:
    proposing, trying = split_by_time(numbered(50, 1, 22, 40, 12, 61, 30, 3))
    assert values(proposing) == [1, 30, 3, 40]  # the first and third quarter, one of each in turn
    assert values(trying) == [12, 50, 22, 61]


def test_the_search_tries_repairs_on_frames_that_did_not_propose_them(
    scenes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[set[bytes], set[bytes]]] = []
    choose = choose_repairs

    def watched(what_if: WhatIf, frames: Sequence[Array], *more: Any) -> Any:
        tried = {frame.tobytes() for known in what_if._scenes for frame, *_ in known}
        given.append(({frame.tobytes() for frame in frames}, tried))
        return choose(what_if, frames, *more)

    monkeypatch.setattr(ladder, "choose_repairs", watched)
    searched(scenes, *SCENES)
    (scenes / "plan.json.journal").unlink()
    searched(scenes, "clip.avi")
    for proposing, tried in given:
        assert len(proposing) == len(tried) > 12
        assert not proposing & tried


def test_every_source_gives_search_frames_and_takes_its_share_of_the_error(scenes: Path) -> None:
    found = planner(scenes, sources=SCENES)
    assert [(share.search, share.certificate) for share in found.shares] == [(16, 104), (16, 144)]
    assert found.terms.error(1) == pytest.approx(0.5 * ERROR / 2)
    assert f"16 frames to search with, 144 others to certify on in {scenes / 'dusk.avi'}: a plan" in found.description
    assert f"after {found.terms.fewest_frames} with something on them in each source" in found.description
    write_clip(scenes / "short.avi", lambda _: 0.5, 20)
    with pytest.raises(AgentError, match=rf"plan\.frames: \d+ frames to measure on in {scenes / 'short.avi'}, beside"):
        _ = planner(scenes, sources=("clip.avi", "short.avi")).shares


# ---- the worst of them


def test_a_plan_that_one_scene_does_not_bear_is_left_out(scenes: Path) -> None:
    _, alone = searched(scenes, "clip.avi")
    assert alone["chosen"] is not None
    (scenes / "plan.json.journal").unlink()
    _, both = searched(scenes, "clip.avi", "glare.avi")
    assert both["chosen"] is None
    quietest = min(both["candidates"], key=lambda candidate: candidate["predicted_loss"])
    assert quietest["predicted_loss"] > 0.2
    assert [candidate for candidate in both["candidates"] if candidate["trial"]] == [quietest]  # by chance it might do


def test_the_certificate_is_of_every_scene(scenes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where the search frames have shown no loss in any."""

    def promising(_: WhatIf, plan: PrecisionPlan, _frames: int | None = None) -> WhatIfResult:
        return WhatIfResult(100.0 * (LOUD not in plan.floats) + (QUIET not in plan.floats), 0.0, 8)

    monkeypatch.setattr(WhatIf, "evaluate", promising)
    _, evidence = searched(scenes, "clip.avi", "glare.avi")
    assert evidence["chosen"] is None
    trials = [one["trial"] for one in evidence["candidates"] if one["trial"]]
    in_both = [trial for trial in trials if len(trial["by_source"]) == 2]
    assert in_both
    for trial in in_both:
        first, second = trial["by_source"].values()
        assert (first["accepted"], second["accepted"], trial["accepted"]) == (True, False, False)
        assert trial["reason"] == f"{scenes / 'glare.avi'}: {second['reason']}"


def outcome(upper: float, accepted: bool = True, latency_ms: float = 1.0) -> TrialResult:
    return TrialResult(0.0, upper, 0.0, 100, 0, latency_ms, 2.0, (), accepted, "why")


def test_the_worst_trial_refuses_before_it_bounds() -> None:
    assert worst_of({"a": outcome(0.1)}) == outcome(0.1)
    worst = worst_of({"a": outcome(0.02), "b": outcome(0.05, latency_ms=3.0)})
    assert (worst.upper, worst.latency_ms, worst.reason) == (0.05, 2.0, "b: why")
    assert worst_of({"a": outcome(0.02, accepted=False), "b": outcome(0.05)}).reason == "a: why"


# ---- the command


def test_several_sources_are_named_where_people_look(plan_bench: Place) -> None:
    write_clip(plan_bench / "dusk.avi", lambda _: 0.4, 160)
    frames = [word for name in SCENES for word in ("--frames", plan_bench / name)]
    printed = plan_bench.plan(*frames)
    evidence = plan_bench.evidence()
    assert printed["measured_loss_upper"] == evidence["candidates"][evidence["chosen"]]["trial"]["upper"]
    assert evidence["sources"] == [
        {"source": str(plan_bench / "clip.avi"), "held_out": False},
        {"source": str(plan_bench / "dusk.avi"), "held_out": True},
    ]
    assert not evidence["held_out"]
    shown, _ = plan_bench.says("plan", plan_bench / "plan.json", "--show", "--chart", plan_bench / "chart.png")
    assert f"loss in {plan_bench / 'clip.avi'}" in shown
    assert f"loss in {plan_bench / 'dusk.avi'}" in shown
    assert LOUD in shown


def test_sources_that_cannot_be_planned_on_together_are_refused(plan_bench: Place) -> None:
    clip = ("--frames", plan_bench / "clip.avi")
    camera = plan_bench.refuses(*plan_bench.arguments(*clip, "--frames", "rtsp://10.0.0.1/stream"))
    assert camera.startswith("plan.sources: 2 sources with a live camera among them: ")
    assert plan_bench.refuses(*plan_bench.arguments(*clip, *clip)).startswith("plan.sources: --frames ")
