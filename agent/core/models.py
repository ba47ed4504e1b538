"""New models: the model's file has changed, or a model was delivered. At most one waits for its trial, or is tried."""

from __future__ import annotations

from agent.common.errors import AgentError
from agent.core import actions as act
from agent.core import ending
from agent.core import facts as fact
from agent.core.causes import CANCELLED
from agent.core.kinds import NewModel
from agent.core.state import ModelToTry
from agent.core.turn import Turn

_SUPERSEDED = "superseded by a newer model"


def model_delivered(turn: Turn, event: fact.ModelDelivered) -> None:
    ending.abandon(turn, _SUPERSEDED)
    expect_model(turn, event.content, event.command)


def model_changed(turn: Turn, content: str) -> None:
    model, job = turn.state.model, turn.state.job
    if turn.state.needs_new_run and model is not None and content == model.content:  # a delivered one, in its place
        return
    if not content and model is not None and model.command:  # the delivered one is to be tried all the same
        return
    if content or (job is not None and isinstance(job.kind, NewModel)):
        ending.abandon(turn, _SUPERSEDED)
    expect_model(turn, content)


def expect_model(turn: Turn, content: str, command: str = "") -> None:
    if not drop_model(turn, _SUPERSEDED):
        withdraw_model(turn, _SUPERSEDED)
    turn.set(model=ModelToTry(content, command) if content else None, needs_new_run=False)


def drop_model(turn: Turn, reason: str) -> bool:
    """Cancel a delivered model that waits for its trial, or is on trial; False where there is none."""
    model = turn.state.model
    if model is None or not model.command or turn.state.needs_new_run:
        return False
    withdraw_model(turn, reason)
    turn.set(model=None)
    turn.do(act.DropModel(model.command))
    error = AgentError(CANCELLED, reason, "a delivery that may run to its end", "send the command again")
    turn.do(act.AnswerCommand(model.command, error))
    return True


def withdraw_model(turn: Turn, reason: str) -> None:
    """Take back a model that answers live frames already, so that nothing is committed."""
    job = turn.state.job
    if job is not None and isinstance(job.kind, NewModel) and turn.state.trial is not None:
        remedy = "send the command again"
        turn.go_back(job, AgentError(CANCELLED, reason, "a probation that runs to its end", remedy))
