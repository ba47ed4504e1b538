"""Commands on their way: each is sent until its board answers, ever more seldom, at once when it comes back."""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

from agent.contract.topics import Topics
from agent.mqtt.message import Message
from fleet.operator import REPEAT_S, command_message
from fleet.rollout.command_rows import CommandRow

_MOST_REPEAT_S = 60.0


@dataclass
class _Flight:
    """repeat_s: how long after the next time it is sent again. due_s: when that is; monotonic. is_heard: its board has
    it, and does not let it expire any more. may_be_out: somebody has sent it, or may have."""

    topics: Topics
    order: CommandRow
    repeat_s: float = REPEAT_S
    due_s: float = 0.0
    is_heard: bool = False
    is_withheld: bool = False
    may_be_out: bool = False


class CommandSender:
    """A Source, thread-safe. Who is said to be away is sent nothing: a broker would keep each repetition for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._flights: dict[str, _Flight] = {}
        self._heap: list[tuple[float, str]] = []
        self._away: set[tuple[str, str]] = set()
        self._by_board: dict[tuple[str, str], set[str]] = {}

    def __len__(self) -> int:
        with self._lock:
            return sum(flight.due_s <= time.monotonic() for flight in self._flights.values())

    def put(self, fleet: str, orders: Iterable[CommandRow], may_be_out: bool = False) -> None:
        """From now on, until `drop`. The same one once more is the same one. may_be_out: another may have sent them."""
        with self._lock:
            for order in orders:
                if order.id not in self._flights:
                    self._flights[order.id] = flight = _Flight(Topics(fleet, order.name), order)
                    flight.is_heard, flight.may_be_out = order.accepted is not None, may_be_out
                    self._by_board.setdefault((fleet, order.name), set()).add(order.id)
                    self._plan(flight, time.monotonic())

    def withhold(self, ids: Iterable[str]) -> set[str]:
        """They are sent no more. Those that never were: to all others an answer may still come."""
        unsent = set()
        with self._lock:
            for identity in ids:
                if (flight := self._flights.get(identity)) is not None:
                    flight.due_s, flight.is_withheld = inf, True
                    if not flight.may_be_out:
                        unsent.add(identity)
        return unsent

    def is_away(self, fleet: str, device: str) -> bool:
        """Whether the board, or its will, has said so last."""
        with self._lock:
            return (fleet, device) in self._away

    def drop(self, ids: Iterable[str]) -> None:
        """They are answered, or nobody's any more."""
        with self._lock:
            for identity in ids:
                flight = self._flights.pop(identity, None)
                if flight is not None:
                    board = flight.topics.fleet, flight.topics.device
                    self._by_board[board].discard(identity)
                    if not self._by_board[board]:
                        del self._by_board[board]

    def find(self, fleet: str, device: str, identity: str) -> CommandRow | None:
        """The command of this id to this board, while it is on its way."""
        with self._lock:
            flight = self._flights.get(identity)
        if flight is None or (flight.topics.fleet, flight.topics.device) != (fleet, device):
            return None
        return flight.order

    def note_answer(self, identity: str) -> None:
        """Its board is at it: whether it still is, is asked in a while."""
        with self._lock:
            flight = self._flights.get(identity)
            if flight is not None and not flight.is_withheld:
                flight.repeat_s, flight.is_heard = _MOST_REPEAT_S, True
                self._plan(flight, time.monotonic() + _MOST_REPEAT_S)

    def report_presence(self, fleet: str, device: str, is_there: bool) -> None:
        """What the board, or its will, has said of it; who comes back is told at once."""
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
                    self._plan(flight, time.monotonic())

    def pop(self) -> Message | None:
        now_s = time.monotonic()
        with self._lock:
            while self._heap and self._heap[0][0] <= now_s:
                due_s, identity = heapq.heappop(self._heap)
                flight = self._flights.get(identity)
                if flight is None or flight.due_s != due_s:  # it is answered, or was planned anew
                    continue
                is_over = flight.order.expires < time.time() and not flight.is_heard
                if is_over or (flight.topics.fleet, flight.topics.device) in self._away:
                    flight.due_s = inf  # until it comes back
                    continue
                flight.may_be_out = True
                self._plan(flight, now_s + flight.repeat_s)
                flight.repeat_s = min(2.0 * flight.repeat_s, _MOST_REPEAT_S)
                return command_message(flight.topics, flight.order.payload.encode(), flight.order.expires)
        return None

    def connection_started(self) -> None:
        """A connection begins: what was under way may be lost, and comes again as all does."""

    def delivered(self, message: Message) -> None:
        """The broker has it; whether the board does, only its answer tells."""

    def refused(self, message: Message, for_good: bool) -> None:
        """It comes again."""

    def put_back(self, messages: Sequence[Message]) -> None:
        """They come again."""

    def _plan(self, flight: _Flight, at_s: float) -> None:
        flight.due_s = at_s
        heapq.heappush(self._heap, (at_s, flight.order.id))
