"""What was tried in vain to raise precision: what counts as tried, and what is kept of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agent.commands.dispatcher import CANCELLED
from agent.common.errors import AgentError
from agent.jobs.limits import PrecisionAttempts
from agent.planning.raising import EXHAUSTED


def told(error: AgentError) -> None:
    raise AssertionError(f"nothing was to be told: {error}")


def ended(code: str) -> AgentError:
    return AgentError(code, "", "", "")


REFUSED = ended("recalibration.refused")


def test_candidates_that_were_refused_are_counted_by_what_served() -> None:
    attempts = PrecisionAttempts(None, "a word", told)
    assert attempts.next_rung("day") == 1
    attempts.note_failure("day", REFUSED)
    attempts.note_failure("day", REFUSED)
    assert (attempts.next_rung("day"), attempts.next_rung("night")) == (3, 1)
    attempts.note_failure("day", ended(EXHAUSTED))
    attempts.note_failure("day", REFUSED)
    assert (attempts.next_rung("day"), attempts.next_rung("night")) == (0, 1)


@pytest.mark.parametrize(
    "code",
    ["recalibration.deadline", "recalibration.crash", "probation.fidelity", "probation.latency", "probation.output",
     "probation.error", "probation.hang"],
)  # fmt: skip
def test_what_a_candidate_did_is_as_good_as_a_refusal(code: str) -> None:
    attempts = PrecisionAttempts(None, "a word", told)
    attempts.note_failure("day", ended(code))
    assert (attempts.next_rung("day"), attempts.next_rung("night")) == (2, 1)


def test_what_the_operator_took_back_on_probation_is_not_tried_again() -> None:
    attempts = PrecisionAttempts(None, "a word", told)
    attempts.note_failure("day", ended("probation.recalled"))
    attempts.note_failure("day", ended("probation.fidelity"))
    assert attempts.next_rung("day") == 0


@pytest.mark.parametrize(
    "code",
    [CANCELLED, "recalibration.disk", "recalibration.timeout", "recalibration.memory", "recalibration.child",
     "recalibration.interrupted", "probation.stuck", "swap.stopped", "artefact.write"],
)  # fmt: skip
def test_what_never_came_to_a_verdict_is_no_attempt(code: str) -> None:
    attempts = PrecisionAttempts(None, "a word", told)
    attempts.note_failure("day", ended(code))
    assert attempts.next_rung("day") == 1


def test_attempts_are_kept_as_long_as_the_owners_word_is_the_same(tmp_path: Path) -> None:
    path = tmp_path / "attempts.json"
    first = PrecisionAttempts(path, "a word", told)
    first.note_failure("day", REFUSED)
    first.note_failure("night", ended(EXHAUSTED))
    first.forbid("dusk")
    engines = ("day", "night", "dusk", "dawn")
    again = PrecisionAttempts(path, "a word", told)
    assert [again.next_rung(engine) for engine in engines] == [2, 0, 0, 1]
    other = PrecisionAttempts(path, "another", told)
    assert [other.next_rung(engine) for engine in engines] == [1, 1, 1, 1]
    other.note_failure("dawn", REFUSED)
    assert [PrecisionAttempts(path, "another", told).next_rung(engine) for engine in engines] == [1, 1, 1, 2]
    assert [PrecisionAttempts(path, "a word", told).next_rung(engine) for engine in engines] == [1, 1, 1, 1]


def test_only_the_latest_artefacts_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "attempts.json"
    attempts = PrecisionAttempts(path, "a word", told)
    for number in range(150):
        attempts.note_failure(f"{number:016}", REFUSED)
    assert path.stat().st_size < 5000
    for known in (attempts, PrecisionAttempts(path, "a word", told)):
        assert [known.next_rung(f"{number:016}") for number in (0, 49, 50, 149)] == [1, 1, 2, 2]


ATTEMPTS = {"schema": 1, "origin": "a word", "refused": {"day": 1, "night": None}}


@pytest.mark.parametrize(
    "text",
    ["", "no JSON", "[]", "[" * 100_000, json.dumps({**ATTEMPTS, "schema": 0}), json.dumps({"schema": 1}),
     json.dumps({**ATTEMPTS, "refused": {"day": -1}}), json.dumps({**ATTEMPTS, "refused": {"day": float("inf")}}),
     json.dumps({**ATTEMPTS, "refused": {"day": "x"}}), json.dumps({**ATTEMPTS, "refused": ["day"]})],
)  # fmt: skip
def test_a_file_of_attempts_that_is_none_is_begun_anew(tmp_path: Path, text: str) -> None:
    path = tmp_path / "attempts.json"
    path.write_text(json.dumps(ATTEMPTS))
    assert PrecisionAttempts(path, "a word", told).next_rung("day") == 2
    path.write_text(text)
    attempts = PrecisionAttempts(path, "a word", told)
    assert (attempts.next_rung("day"), attempts.next_rung("night")) == (1, 1)
    attempts.forbid("day")
    assert PrecisionAttempts(path, "a word", told).next_rung("day") == 0


def test_a_file_of_attempts_of_a_newer_tared_is_refused_and_left_alone(tmp_path: Path) -> None:
    path, text = tmp_path / "attempts.json", json.dumps({**ATTEMPTS, "schema": 2})
    path.write_text(text)
    with pytest.raises(AgentError, match=r"attempts\.schema: .*attempts\.json of schema 2; expected schema 1"):
        PrecisionAttempts(path, "a word", told)
    assert path.read_text() == text


def test_a_disk_that_refuses_is_told_of_once_and_the_process_remembers(tmp_path: Path) -> None:
    errors: list[AgentError] = []
    attempts = PrecisionAttempts(tmp_path / "no folder" / "attempts.json", "a word", errors.append)
    attempts.note_failure("day", REFUSED)
    attempts.forbid("night")
    assert (attempts.next_rung("day"), attempts.next_rung("night")) == (2, 0)
    assert [error.code for error in errors] == ["attempts.write"]
