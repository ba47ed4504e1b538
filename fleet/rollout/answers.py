"""What an answer to a command, or none, makes of its board."""

from __future__ import annotations

from agent.requests import CommandResult, Failure
from fleet.rollout.orders import Order
from fleet.rollout.states import Role, Target
from fleet.rollout.tables import Change, TargetRow

MOST_ATTEMPTS = 8
UNREACHED, UNFINISHED = "rollout.unreached", "rollout.unfinished"

_PAUSE_S = 5.0  # doubled each time
_PASSING = ("command.busy", "command.interrupted")  # refusals after which it is worth to ask again
_LATE_S = 5.0  # for an answer that was under way when its command expired


def overdue(order: Order, now: float, deadline_s: float) -> CommandResult | None:
    """What is taken for the result of a command that nobody has answered in time, once it is so."""
    if order.accepted is None and now > order.expires + _LATE_S:
        waited_s = order.expires - order.sent
        return _none(order, UNREACHED, f"no answer in {waited_s:.0f} s; expected one; see whether the board is online")
    if order.accepted is not None and now > max(order.sent + deadline_s, order.expires):
        message = f"no end in {deadline_s:.0f} s; expected one; look at the board, or give it a longer --deadline"
        return _none(order, UNFINISHED, message)
    return None


def settle(target: TargetRow, order: Order, result: CommandResult, may_retry: bool, now: float) -> Change | None:
    """result: a final one. may_retry: a board that is busy is asked again. None: nothing is known by this."""
    if order.role is Role.CANCEL:
        return None  # what becomes of the command that it cancels, that one's own answer tells
    if result.status == "SUCCEEDED":
        made = (result.result or {}).get("artefact")
        artefact = made if isinstance(made, str) and order.role is Role.DO else None
        state = Target.DONE if order.role is Role.DO else Target.UNDONE
        return Change(target.device, state, artefact=artefact, attempts=0)
    reason = _reason(result)
    if result.error is not None and result.error.code in _PASSING and may_retry and target.attempts < MOST_ATTEMPTS:
        before = Target.WAITING if order.role is Role.DO else Target.DONE
        return Change(target.device, before, reason, due=now + pause_s(target.attempts))
    if order.role is Role.UNDO:
        return Change(target.device, Target.KEPT, reason)
    unreached = result.status == "EXPIRED"
    return Change(target.device, Target.UNREACHED if unreached else Target.FAILED, reason)


def pause_s(attempts: int) -> float:
    """Until the next attempt."""
    return float(_PAUSE_S * 2 ** min(attempts, MOST_ATTEMPTS))


def _reason(result: CommandResult) -> str:
    return f"{result.error.code}: {result.error.message}" if result.error is not None else result.status


def _none(order: Order, code: str, message: str) -> CommandResult:
    error = Failure(code=code, message=message)
    return CommandResult(id=order.id, status="EXPIRED" if code == UNREACHED else "FAILED", error=error)
