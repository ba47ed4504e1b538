"""Raises of precision that were tried in vain: which count, and how they are kept."""

from __future__ import annotations

from pathlib import Path

import pytest
from kept import kept_in

from agent.commands.dispatcher import CANCELLED
from agent.common.errors import AgentError
from agent.jobs.limits import PrecisionAttempts
from agent.planning.raising import EXHAUSTED
from agent.state.store import StateStore


def ended(code: str) -> AgentError:
    return AgentError(code, "", "", "")


REFUSED = ended("recalibration.refused")


def test_candidates_that_were_refused_are_counted_by_what_served() -> None:
    attempts = PrecisionAttempts(StateStore(None), "a word")
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
        attempts = PrecisionAttempts(StateStore(None), "a word")
        attempts.note_failure("day", ended(code))
        assert (attempts.next_rung("day"), attempts.next_rung("night")) == (rung, 1)


def test_only_the_latest_artefacts_are_kept(tmp_path: Path) -> None:
    attempts = PrecisionAttempts(kept_in(tmp_path), "a word")
    for number in range(150):
        attempts.note_failure(f"{number:016}", REFUSED)
    for known in (attempts, PrecisionAttempts(kept_in(tmp_path), "a word")):
        assert [known.next_rung(f"{number:016}") for number in (0, 49, 50, 149)] == [1, 1, 2, 2]


def test_attempts_under_other_rules_do_not_count(tmp_path: Path) -> None:
    PrecisionAttempts(kept_in(tmp_path), "a word").forbid("day")
    assert PrecisionAttempts(kept_in(tmp_path), "a word").next_rung("day") == 0
    assert PrecisionAttempts(kept_in(tmp_path), "another").next_rung("day") == 1
