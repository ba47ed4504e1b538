"""Send pages what has changed, as long as they are open (server-sent events)."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse

from agent.common.clock import SYSTEM_CLOCK, Clock

_LEAST_S, _ALIVE_S = 0.5, 15.0  # between two changes that a page is sent, and between two signs of life without any
_MOST_STREAMS = 32


class Streams:
    """The streams of the pages that are open. closing: they are to end."""

    def __init__(self, closing: threading.Event, clock: Clock = SYSTEM_CLOCK) -> None:
        self._closing, self._clock = closing, clock
        self._count = 0

    def answer(self, request: Request, changes: Callable[[], Awaitable[str]]) -> Response:
        """Return a stream of events. changes: called again and again; returns the events to send, "" for none."""
        if self._count >= _MOST_STREAMS:
            return PlainTextResponse("too many pages are open\n", 503, {"Retry-After": "10"})
        return StreamingResponse(self._follow(request, changes), media_type="text/event-stream")

    async def _follow(self, request: Request, changes: Callable[[], Awaitable[str]]) -> AsyncIterator[str]:
        self._count += 1
        try:
            sent_s = self._clock.monotonic_s()
            while not (self._closing.is_set() or await request.is_disconnected()):
                if events := await changes():
                    sent_s = self._clock.monotonic_s()
                    yield events
                elif self._clock.monotonic_s() - sent_s > _ALIVE_S:
                    sent_s = self._clock.monotonic_s()
                    yield ": still here\n\n"
                await asyncio.sleep(_LEAST_S)
        finally:
            self._count -= 1


def event(name: str, value: object, identity: str = "") -> str:
    """Return an event; JSON keeps the lines of its value together.

    identity: what the browser names, where the stream broke after it.
    """
    names = f"id: {identity}\n" if identity else ""
    return f"event: {name}\n{names}data: {json.dumps(value)}\n\n"
