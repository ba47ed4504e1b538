"""Recognise the commands of known senders among everything that arrives, before it is queued for the supervisor."""

from __future__ import annotations

import time

from agent.commands.authority import Authority
from agent.commands.dispatcher import CommandRefused, parse_command
from agent.common.clock import SYSTEM_CLOCK, Clock

_SHARE = 0.25  # most of a core that a flood may take
_AGAIN_S = 1.0  # a sender repeats its command later than that
_REMEMBERED = 100  # as many as there are places
_BURST_S = 0.1  # CPU time: some three hundred signatures on a slow core


class CommandRecognition:
    """Return for each message whether it is a command that this board admits; the MQTT thread alone calls it.

    A forged signature takes as long to check as a true one, 0.3 ms. Beyond a quarter of a core nothing is recognised:
    such messages share the common inbox, and a sender that repeats its command has another chance. A command that comes
    again within a second goes there too: anybody may replay one that he has seen, and it needs no second place.
    """

    def __init__(self, authority: Authority | None, clock: Clock = SYSTEM_CLOCK) -> None:
        """authority: None admits everybody."""
        self._authority = authority
        self._clock = clock
        self._must_be_signed = authority is not None and not authority.allows_unsigned
        self._admitted: dict[str, float] = {}  # monotonic time by digest, the oldest first
        self._left_s = _BURST_S
        self._at_s = self._clock.monotonic_s()

    def __call__(self, payload: bytes) -> bool:
        if self._must_be_signed and b'"signature"' not in payload:
            return False
        now_s = self._clock.monotonic_s()
        self._left_s = min(_BURST_S, self._left_s + _SHARE * (now_s - self._at_s))
        self._at_s = now_s
        if self._left_s <= 0.0:
            return False
        begun_s = time.thread_time()
        try:
            digest = parse_command(payload, self._clock.wall_s(), self._authority).digest
        except CommandRefused:
            return False
        finally:
            self._left_s -= time.thread_time() - begun_s
        if now_s < self._admitted.get(digest, -_AGAIN_S) + _AGAIN_S:
            return False
        self._admitted.pop(digest, None)
        self._admitted[digest] = now_s
        if len(self._admitted) > _REMEMBERED:
            del self._admitted[next(iter(self._admitted))]
        return True
