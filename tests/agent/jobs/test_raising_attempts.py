"""Raises of precision that were tried in vain: which count, and how they are kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from agent.jobs.limits import PrecisionAttempts
from unexpected import unexpected

from agent.commands.dispatcher import CANCELLED
from agent.common.errors import AgentError
from agent.planning.raising import EXHAUSTED


def ended(code: str) -> AgentError:
    return AgentError(code, "", "", "")


REFUSED = ended("recalibration.refused")


def test_candidates_that_were_refused_are_counted_by_what_served() -> None:
    attempts = PrecisionAttempts(None, "a word", unexpected)
    assert attempts.next_rung("day") == 1
    attempts.note_failure("day", REFUSED)
    attempts.note_failure("day", REFUSED)
    assert (attempts.next_rung("day"), attempts.next_rung("night")) == (3, 1)
    attempts.note_failure("day", ended(EXHAUSTED))
    attempts.note_failure("day", REFUSED)
    assert (attempts.next_rung("day"), attempts.next_rung("night")) == (0, 1)


@pytest.mark.parametrize(
    ("rung", "codes"),
    [
        (2, ["recalibration.deadline", "probation.fidelity"]),
        (0, ["probation.recalled"]),
        (1, [CANCELLED, "recalibration.disk", "probation.stuck"]),
    ],
    ids=["refused", "recalled", "without a verdict"],
)
def test_the_next_rung_follows_from_how_the_attempt_ended(rung: int, codes: list[str]) -> None:
    for code in codes:
        attempts = PrecisionAttempts(None, "a word", unexpected)
        attempts.note_failure("day", ended(code))
        assert (attempts.next_rung("day"), attempts.next_rung("night")) == (rung, 1)


def test_only_the_latest_artefacts_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "attempts.json"
    attempts = PrecisionAttempts(path, "a word", unexpected)
    for number in range(150):
        attempts.note_failure(f"{number:016}", REFUSED)
    assert path.stat().st_size < 5000
    for known in (attempts, PrecisionAttempts(path, "a word", unexpected)):
        assert [known.next_rung(f"{number:016}") for number in (0, 49, 50, 149)] == [1, 1, 2, 2]


ATTEMPTS = {"schema": 1, "origin": "a word", "refused": {"day": 1, "night": None}}


@pytest.mark.parametrize(
    "text",
    ["no JSON", json.dumps({"schema": 1}), json.dumps({**ATTEMPTS, "refused": {"day": -1}}),
     json.dumps({**ATTEMPTS, "refused": {"day": float("inf")}}), json.dumps({**ATTEMPTS, "refused": ["day"]})],
)  # fmt: skip
def test_a_file_of_attempts_that_is_none_is_begun_anew(tmp_path: Path, text: str) -> None:
    path = tmp_path / "attempts.json"
    path.write_text(json.dumps(ATTEMPTS))
    assert PrecisionAttempts(path, "a word", unexpected).next_rung("day") == 2
    path.write_text(text)
    attempts = PrecisionAttempts(path, "a word", unexpected)
    assert (attempts.next_rung("day"), attempts.next_rung("night")) == (1, 1)
    attempts.forbid("day")
    assert PrecisionAttempts(path, "a word", unexpected).next_rung("day") == 0
