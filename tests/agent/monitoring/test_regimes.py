"""Regimes on disk: kept, ordered by when they served, of one model and runtime; a spoilt file counts as empty."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from attack.spoilt import ANYTHING, ONE_FILE, as_bytes, spoilt
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.common.errors import AgentError
from agent.monitoring.drift import Regime
from agent.monitoring.regimes import RegimeStore


def regime(name: str) -> Regime:
    return Regime(name, {"x": 0.5, "y": 2.0**-9}, {"x": 3.0, "y": 0.1}, {"x": (0.25, 0.125), "y": (1e-5, 1e-6)})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "regimes.json"


def names(store: RegimeStore) -> list[str]:
    return [known.artefact for known in store.known]


def test_the_one_that_has_not_served_for_longest_makes_room(path: Path) -> None:
    store = RegimeStore(path, "one model", 3)
    for name in ("dawn", "day", "dusk", "dawn", "night"):
        store.learn(regime(name))
    assert names(store) == ["dusk", "dawn", "night"]
    assert RegimeStore(path, "one model", 3).known == store.known
    assert names(RegimeStore(path, "one model", 2)) == ["dawn", "night"]


def test_a_regime_that_cannot_serve_is_forgotten(path: Path) -> None:
    store = RegimeStore(path, "one model", 5)
    store.learn(regime("day"))
    store.forget("day")
    store.forget("never known")
    assert names(RegimeStore(path, "one model", 5)) == []


def test_regimes_of_another_model_or_runtime_are_not_taken_over(path: Path) -> None:
    RegimeStore(path, "one model", 5).learn(regime("day"))
    assert names(RegimeStore(path, "another", 5)) == []


ROW = {"artefact": "a", "scales": {"x": 0.5}, "weights": {"x": 1.0}, "own": {"x": [0.25, 0.125]}}


def file_of(**changed: object) -> str:
    return json.dumps({"schema": 2, "identity": "one model", "regimes": [{**ROW, **changed}]})


def test_the_row_that_is_spoilt_below_is_one_that_is_read(path: Path) -> None:
    path.write_text(file_of())
    assert names(RegimeStore(path, "one model", 5)) == ["a"]


@pytest.mark.parametrize(
    "text",
    ["", "no JSON", "[]", "{}", '{"schema": 2}', '{"schema": 2, "identity": "one model", "regimes": [{}]}',
     file_of().replace(": 2,", ": 1,"), file_of(scales=3), file_of(scales={"x": float("nan")}),
     file_of(weights={"x": -1.0}), file_of(own={"x": [0.25]}), file_of(own={"x": [0.25, float("inf")]}),
     file_of(scales={"x": 10**400}), file_of(scales=["x"]), file_of(own={"x": [0.0, 0.125]}), "[" * 100_000,
     file_of(weights={"x": 1e308}, own={"x": [1e308, 1e308]}), file_of(artefact=3), file_of(artefact="../current"),
     file_of(artefact="a\0"), "\udcff"],
)  # fmt: skip
def test_a_spoilt_file_counts_as_empty(path: Path, text: str) -> None:
    path.write_bytes(text.encode(errors="surrogateescape"))
    store = RegimeStore(path, "one model", 5)
    assert names(store) == []
    store.learn(regime("day"))
    assert names(RegimeStore(path, "one model", 5)) == ["day"]


@settings(ONE_FILE)
@given(content=spoilt(json.loads(file_of())).map(as_bytes) | ANYTHING.map(as_bytes) | st.binary())
def test_whatever_is_in_the_file_the_daemon_starts_and_learns(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    try:
        store = RegimeStore(path, "one model", 5)
    except AgentError as refused:
        assert refused.code == "regimes.schema"  # noqa: PT017  # the one outcome of two that raises
        return
    for known in store.known:
        figures = [
            *known.scales.values(),
            *known.weights.values(),
            *(each for pair in known.own.values() for each in pair),
        ]
        assert all(0.0 <= figure < math.inf for figure in figures)
        assert math.isfinite(known.baseline_db(known.weights))
    store.learn(regime("day"))
    assert names(RegimeStore(path, "one model", 5))[-1] == "day"


def test_a_file_of_a_newer_tared_is_refused(path: Path) -> None:
    path.write_text(json.dumps({"schema": 3}))
    with pytest.raises(AgentError) as refused:
        RegimeStore(path, "one model", 5)
    assert refused.value.code == "regimes.schema"
    assert json.loads(path.read_text()) == {"schema": 3}


def test_a_disk_that_refuses_is_reported_and_the_regime_known_all_the_same(path: Path) -> None:
    store = RegimeStore(path / "no folder" / "regimes.json", "one model", 5)
    with pytest.raises(AgentError) as refused:
        store.learn(regime("day"))
    assert refused.value.code == "regimes.write"
    assert names(store) == ["day"]
