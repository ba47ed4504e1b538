"""Where a rollout is, and where each of its boards."""

from __future__ import annotations

from enum import Enum


class State(str, Enum):
    """Of a rollout. UNDOING: nobody is told to change any more, and who has is told to go back."""

    RUNNING = "RUNNING"
    PAUSED = "PAUSED"
    UNDOING = "UNDOING"
    COMPLETED = "COMPLETED"
    ROLLED_BACK = "ROLLED_BACK"
    ABORTED = "ABORTED"

    @property
    def over(self) -> bool:
        return self in (State.COMPLETED, State.ROLLED_BACK, State.ABORTED)


class Target(str, Enum):
    """Of a board. WAITING: nobody has told it anything. SENT: it has been told, and what became of it is not known.
    UNDOING to UNDONE: it goes back to what it had; KEPT: it did not, for a reason."""

    WAITING = "WAITING"
    SENT = "SENT"
    DONE = "DONE"
    FAILED = "FAILED"
    UNREACHED = "UNREACHED"
    UNDOING = "UNDOING"
    UNDONE = "UNDONE"
    KEPT = "KEPT"


class Role(str, Enum):
    """What a command is for."""

    DO = "do"
    CANCEL = "cancel"
    UNDO = "undo"
