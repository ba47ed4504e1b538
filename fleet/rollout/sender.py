"""Send the commands of rollouts until their boards answer.

A command is repeated at growing intervals, and at once when its board comes back. A board that is away is sent nothing,
because a broker would keep each repetition for it.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from agent.common.clock import SYSTEM_CLOCK, Clock
from agent.contract.topics import Topics
from agent.mqtt.message import Message, MessageSource
from fleet.operator import REPEAT_S, command_message
from fleet.rollout.rows import CommandRow

_MOST_REPEAT_S = 60.0


@dataclass
class _Flight:
    """A command on its way.

    repeat_s: the interval after the next repetition. due_s: when it is sent next; monotonic. is_answered: its board
    has it, and does not let it expire any more. is_withheld: it is not sent any more. may_be_out: somebody has sent
    it, or may have.
    """

    topics: Topics
    command: CommandRow
    repeat_s: float = REPEAT_S
    due_s: float = 0.0
    is_answered: bool = False
    is_withheld: bool = False
    may_be_out: bool = False

    @property
    def board(self) -> tuple[str, str]:
        return self.topics.fleet, self.topics.device


class CommandSender(MessageSource):
    """The commands that are on their way; thread-safe. Only a board's answer ends the repetition of one."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._flights: dict[str, _Flight] = {}
        self._heap: list[tuple[float, str]] = []
        self._away: set[tuple[str, str]] = set()
        self._by_board: dict[tuple[str, str], set[str]] = {}

    def __len__(self) -> int:
        with self._lock:
            return sum(flight.due_s <= self._clock.monotonic_s() for flight in self._flights.values())

    def put(self, fleet: str, commands: Iterable[CommandRow], may_be_out: bool = False) -> None:
        """Send these commands until `drop`. A command that is on its way already is ignored.

        may_be_out: another controller may have sent them.
        """
        with self._lock:
            for command in commands:
                if command.id not in self._flights:
                    flight = _Flight(Topics(fleet, command.name), command)
                    flight.is_answered, flight.may_be_out = command.accepted is not None, may_be_out
                    self._flights[command.id] = flight
                    self._by_board.setdefault(flight.board, set()).add(command.id)
                    self._schedule(flight, self._clock.monotonic_s())

    def withhold(self, ids: Iterable[str]) -> set[str]:
        """Stop sending these; return those that were never sent. The others may still be answered."""
        unsent = set()
        with self._lock:
            for identity in ids:
                if (flight := self._flights.get(identity)) is not None:
                    flight.due_s, flight.is_withheld = inf, True
                    if not flight.may_be_out:
                        unsent.add(identity)
        return unsent

    def is_away(self, fleet: str, device: str) -> bool:
        """Return True if the board's newest status, or its will, says that it is away."""
        with self._lock:
            return (fleet, device) in self._away

    def drop(self, ids: Iterable[str]) -> None:
        """Forget these commands: they have results, or belong to another controller."""
        with self._lock:
            for identity in ids:
                flight = self._flights.pop(identity, None)
                if flight is not None:
                    self._by_board[flight.board].discard(identity)
                    if not self._by_board[flight.board]:
                        del self._by_board[flight.board]

    def has(self, fleet: str, device: str, identity: str) -> bool:
        """Return True if the command of this id to this board is on its way."""
        with self._lock:
            flight = self._flights.get(identity)
        return flight is not None and flight.board == (fleet, device)

    def note_answer(self, identity: str) -> None:
        """Note that the board works on the command; it is repeated after a minute, to learn whether it still does."""
        with self._lock:
            flight = self._flights.get(identity)
            if flight is not None and not flight.is_withheld:
                flight.repeat_s, flight.is_answered = _MOST_REPEAT_S, True
                self._schedule(flight, self._clock.monotonic_s() + _MOST_REPEAT_S)

    def report_presence(self, fleet: str, device: str, is_there: bool) -> None:
        """Note what the board's status, or its will, says. A board that comes back is sent its commands at once."""
        board = fleet, device
        with self._lock:
            if not is_there:
                self._away.add(board)
                return
            if board not in self._away:
                return
            self._away.discard(board)
            for identity in self._by_board.get(board, ()):
                flight = self._flights[identity]
                if not flight.is_withheld:
                    flight.repeat_s = REPEAT_S
                    self._schedule(flight, self._clock.monotonic_s())

    def pop(self) -> Message | None:
        now_s = self._clock.monotonic_s()
        with self._lock:
            while self._heap and self._heap[0][0] <= now_s:
                due_s, identity = heapq.heappop(self._heap)
                flight = self._flights.get(identity)
                if flight is None or flight.due_s != due_s:  # it was dropped or rescheduled
                    continue
                is_expired = flight.command.expires < self._clock.wall_s() and not flight.is_answered
                if is_expired or flight.board in self._away:
                    flight.due_s = inf  # until the board comes back
                    continue
                flight.may_be_out = True
                self._schedule(flight, now_s + flight.repeat_s)
                flight.repeat_s = min(2.0 * flight.repeat_s, _MOST_REPEAT_S)
                return command_message(
                    flight.topics, flight.command.payload.encode(), flight.command.expires, self._clock
                )
        return None

    def _schedule(self, flight: _Flight, at_s: float) -> None:
        flight.due_s = at_s
        heapq.heappush(self._heap, (at_s, flight.command.id))
