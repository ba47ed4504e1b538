"""Send commands for people who look at a page, and keep what the boards answered."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from agent.common.clock import SYSTEM_CLOCK, Clock
from agent.common.errors import AgentError
from agent.contract.commands import OPS, Command
from agent.contract.signing import Signer
from agent.contract.topics import Topics
from agent.mqtt.client import Endpoint
from calibrate.errors import TaredError
from fleet.operator import new_command, receive_snapshots, send

BUTTONS = {op: each for op, each in OPS.items() if each.button is not None}
_MOST_KEPT, _MOST_AT_ONCE = 20, 8
_VALID_S, _SILENCE_S = 60.0, 20.0


@dataclass
class Order:
    """A command that somebody gave on a page.

    Attributes:
        sent_at: Unix time in s.
        status: Of its newest result; `SENT` before the first, `NO ANSWER` where there was none.
        detail: The step, or the reason of a failure, in words.
        percent: Of a command that runs; None if it is not known.
        is_over: No other result follows.
        picture: The JPEG that a snapshot brought.
    """

    board: str
    op: str
    sent_at: float
    status: str = "SENT"
    detail: str = ""
    percent: float | None = None
    is_over: bool = False
    picture: bytes | None = None


class Orders:
    """Sends commands, each in a thread of its own, a few at a time.

    Attributes:
        version: Rises with each change of an order.
    """

    def __init__(self, endpoint: Endpoint, fleet: str, signer: Signer | None, clock: Clock = SYSTEM_CLOCK) -> None:
        """signer: signs the commands, where the boards demand it."""
        self.version = 0
        self._endpoint, self._fleet, self._signer, self._clock = endpoint, fleet, signer, clock
        self._orders: deque[Order] = deque(maxlen=_MOST_KEPT)
        self._lock = threading.Lock()

    @property
    def signs(self) -> bool:
        return self._signer is not None

    def of_board(self, board: str) -> list[Order]:
        """Return the orders to a board, the newest first."""
        with self._lock:
            return [order for order in self._orders if order.board == board]

    def picture_of(self, board: str) -> bytes | None:
        """Return the newest snapshot of a board; None without one."""
        return next((order.picture for order in self.of_board(board) if order.picture is not None), None)

    def give(self, board: str, op: str, arguments: Mapping[str, str]) -> None:
        """Send a command to a board.

        Raises AgentError: `web.busy` while too many are under way; and as `new_command` and `Topics` do.
        """
        topics = Topics(self._fleet, board)
        command = new_command(op, arguments, self._clock.wall_s(), _VALID_S, topics if self.signs else None)
        order = Order(board, op, self._clock.wall_s())
        with self._lock:
            if sum(not each.is_over for each in self._orders) >= _MOST_AT_ONCE:
                found, remedy = f"{_MOST_AT_ONCE} commands under way", "wait for the answers of the boards"
                raise AgentError("web.busy", found, f"fewer than {_MOST_AT_ONCE} at a time", remedy)
            self._orders.appendleft(order)
            self.version += 1
        threading.Thread(target=self._follow, args=(order, topics, command), name=f"order-{op}", daemon=True).start()

    def _follow(self, order: Order, topics: Topics, command: Command) -> None:
        pictures = (
            receive_snapshots(self._endpoint, topics, _SILENCE_S, self._clock)
            if order.op == "snapshot"
            else nullcontext()
        )
        try:
            with pictures as receive:
                for result in send(self._endpoint, topics, command, _SILENCE_S, self._signer, clock=self._clock):
                    detail = result.error.message if result.error is not None else result.step or ""
                    self._note(order, status=str(result.status), detail=detail, percent=result.percent)
                    if receive is not None and result.status == "SUCCEEDED":
                        self._note(order, picture=receive(result))
        except TaredError as error:
            self._note(order, status="NO ANSWER", detail=error.found)
        self._note(order, is_over=True)

    def _note(self, order: Order, **changes: Any) -> None:
        with self._lock:
            for name, value in changes.items():
                setattr(order, name, value)
            self.version += 1
