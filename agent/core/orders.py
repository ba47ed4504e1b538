"""The operator's commands: what each may begin, and why it may not."""

from __future__ import annotations

from agent.common.errors import CommandError
from agent.core import actions as act
from agent.core import ending, models, trials
from agent.core import facts as fact
from agent.core.kinds import OperatorRollback, Recall, Requested, Switch
from agent.core.state import JOINABLE
from agent.core.turn import Turn

_OPERATOR = "the operator cancels it"


def recalibrate(turn: Turn, event: fact.Asked) -> None:
    job, command = turn.state.job, event.command
    if isinstance(event.kind, Requested):
        outage = next(iter(turn.facts.cameras.values())).outage
        if outage:
            found, remedy = f"nothing is observed now: {outage}", "see the events, then send the command again"
            turn.refuse(command, "command.observer", found, "observed frames to collect", remedy)
            return
        if job is not None and job.kind.request == event.kind.request and job.state in JOINABLE:
            turn.change_job(job.id, commands=(*job.commands, command))
            turn.do(act.Join(turn.job))
            return
    if turn.is_idle:
        turn.begin(event.kind, (command,))
    elif not refuses_stuck(turn, command):
        found = f"a job at {job.description}" if job is not None else "a swap under way"
        expected, remedy = "one job at a time", "wait for its end, then send the command again"
        turn.refuse(command, "command.busy", found, expected, remedy)


def cancel(turn: Turn, event: fact.AskedToCancel) -> None:
    if turn.is_working:
        ending.abandon(turn, _OPERATOR)
        turn.pause_jobs()  # its trigger may still hold
    elif not (models.drop_model(turn, _OPERATOR) or event.delivered):
        if trials.can_recall(turn):
            turn.begin(Recall(turn.facts.serving), (event.command,))
        elif not refuses_swap(turn, event.command):
            expected = "a job, a delivery or a probation"
            turn.refuse(event.command, "command.nothing", "no running job", expected, "ask for the status first")
        return
    turn.do(act.AnswerCommand(event.command))


def go_back(turn: Turn, event: fact.AskedToGoBack) -> None:
    command = event.command
    if trials.can_recall(turn):
        turn.begin(Recall(turn.facts.serving), (command,))
    elif not refuses_swap(turn, command) and not refuses_stuck(turn, command):
        if event.previous:
            turn.load(OperatorRollback(event.previous), (command,))
            return
        expected = "an engine that served before the present one"
        turn.refuse(command, "command.rollback", "no previous engine", expected, "recalibrate instead")


def switch(turn: Turn, event: fact.AskedToSwitch) -> None:
    if refuses_swap(turn, event.command) or refuses_stuck(turn, event.command):
        return
    try:
        event.args.check(turn.facts.serving, turn.facts.known)
    except CommandError as error:
        turn.do(act.AnswerCommand(event.command, error))
        return
    turn.load(Switch(event.args.regime, by_command=True), (event.command,))


def refuses_swap(turn: Turn, command: str) -> bool:
    if not turn.is_swapping:
        return False
    remedy = "send the command again in a moment"
    turn.refuse(command, "command.busy", "a swap under way", "one swap at a time", remedy)
    return True


def refuses_stuck(turn: Turn, command: str) -> bool:
    if not turn.facts.is_stuck:
        return False
    found, remedy = "a candidate that still hangs and holds its memory", "wait for its end, or restart the daemon"
    turn.refuse(command, "command.busy", found, "one candidate at a time", remedy)
    return True
