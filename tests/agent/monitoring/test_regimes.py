"""Regimes on disk: kept, ordered by when they served, of one model and runtime; damage costs no start."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path

import pytest
from attack.spoilt import ANYTHING, ONE_FILE, spoilt
from hypothesis import given, settings
from hypothesis import strategies as st
from kept import kept_in, refusing

from agent.common.errors import AgentError
from agent.monitoring.drift import Regime
from agent.monitoring.regimes import RegimeStore
from agent.state.store import StateStore


def regime(name: str) -> Regime:
    return Regime(name, {"x": 0.5, "y": 2.0**-9}, {"x": 3.0, "y": 0.1}, {"x": (0.25, 0.125), "y": (1e-5, 1e-6)})


def names(store: RegimeStore) -> list[str]:
    return [known.artefact for known in store.known]


def test_the_one_that_has_not_served_for_longest_makes_room(tmp_path: Path) -> None:
    store = RegimeStore(kept_in(tmp_path), "one model", 3)
    for name in ("dawn", "day", "dusk", "dawn", "night"):
        store.learn(regime(name))
    assert names(store) == ["dusk", "dawn", "night"]
    assert RegimeStore(kept_in(tmp_path), "one model", 3).known == store.known
    assert names(RegimeStore(kept_in(tmp_path), "one model", 2)) == ["dawn", "night"]


def test_a_regime_that_cannot_serve_is_forgotten(tmp_path: Path) -> None:
    store = RegimeStore(kept_in(tmp_path), "one model", 5)
    store.learn(regime("day"))
    store.forget("day")
    store.forget("never known")
    assert names(RegimeStore(kept_in(tmp_path), "one model", 5)) == []


def test_regimes_of_another_model_or_runtime_are_not_taken_over(tmp_path: Path) -> None:
    RegimeStore(kept_in(tmp_path), "one model", 5).learn(regime("day"))
    assert names(RegimeStore(kept_in(tmp_path), "another", 5)) == []


@settings(ONE_FILE)
@given(content=(spoilt(asdict(regime("a"))) | ANYTHING).map(json.dumps) | st.text(st.characters(codec="utf-8")))
def test_whatever_is_kept_the_daemon_starts_and_learns(tmp_path: Path, content: str) -> None:
    state = StateStore(tmp_path)
    state.replace({"regimes": [("a", "one model", content)]})
    store = RegimeStore(state, "one model", 5)
    for known in store.known:
        figures = [
            *known.scales.values(),
            *known.weights.values(),
            *(each for pair in known.own.values() for each in pair),
        ]
        assert all(0.0 <= figure < math.inf for figure in figures)
        assert math.isfinite(known.baseline_db(known.weights))
    store.learn(regime("day"))
    assert names(RegimeStore(kept_in(tmp_path), "one model", 5))[-1] == "day"


def test_a_disk_that_refuses_is_reported_and_the_regime_known_all_the_same(tmp_path: Path) -> None:
    state = kept_in(tmp_path)
    store = RegimeStore(state, "one model", 5)
    with refusing(state), pytest.raises(AgentError, match=r"state\.write: .*the regimes"):
        store.learn(regime("day"))
    assert names(store) == ["day"]
