"""What the error of a job says: of its candidate, of the model, or of nothing that would be the same another time.

Errors come from a child process or the frame path with a code for the wire. Here alone a code decides something.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from agent.planning.raising import EXHAUSTED
from agent.validation.model_change import ANSWERS

if TYPE_CHECKING:
    from calibrate.errors import TaredError

CANCELLED = "recalibration.cancelled"
RECALLED = "probation.recalled"
UNSERVABLE = "model.changed"
INTERRUPTED = "recalibration.interrupted"
# The errors that judge a candidate: by its verdict, as its child compared it, or on probation.
REFUSED = (
    *(f"recalibration.{reason}" for reason in ("refused", "deadline", "crash")),
    *(f"probation.{reason}" for reason in ("fidelity", "latency", "output", "error", "hang")),
)
_OF_THE_BOARD = ("recalibration.memory", "store.room", "store.write")


class Cause(Enum):
    """Why a job has ended without a new engine.

    CANCELLED: Somebody ended it, or something newer did.
    RECALLED: The operator took the candidate back.
    REFUSED: The candidate was judged, and not good enough.
    EXHAUSTED: No plan helps.
    ANSWERS: A new model answers otherwise than the one in service, by more than is accepted.
    UNSERVABLE: A new model cannot be served.
    BOARD: The board had no room for it.
    OTHER: It may pass.
    """

    CANCELLED = "cancelled"
    RECALLED = "recalled"
    REFUSED = "refused"
    EXHAUSTED = "exhausted"
    ANSWERS = "answers"
    UNSERVABLE = "unservable"
    BOARD = "board"
    OTHER = "other"


_BY_CODE = {
    CANCELLED: Cause.CANCELLED,
    RECALLED: Cause.RECALLED,
    **dict.fromkeys(REFUSED, Cause.REFUSED),
    EXHAUSTED: Cause.EXHAUSTED,
    ANSWERS: Cause.ANSWERS,
    UNSERVABLE: Cause.UNSERVABLE,
    **dict.fromkeys(_OF_THE_BOARD, Cause.BOARD),
}


def cause_of(error: TaredError) -> Cause:
    """Return what an error says.

    >>> from agent.common.errors import AgentError
    >>> cause_of(AgentError("probation.hang", "no answer within 2 s", "an answer to every frame", "check the runtime"))
    <Cause.REFUSED: 'refused'>
    """
    return _BY_CODE.get(error.code, Cause.OTHER)
