"""Serve the pages: HTML made here, a stream of changes (server-sent events), and commands as forms.

A page has no script or style of its own: its policy allows the two files of this server alone. A changed part comes as
HTML over the stream, and takes the place of the one with its id. Commands need the page's token, which no other site
can read; a name that leads to this port from elsewhere is refused (DNS rebinding).
"""

from __future__ import annotations

import hmac
import secrets
import socket
import threading
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agent.common.clock import SYSTEM_CLOCK, Clock
from agent.common.errors import AgentError
from agent.common.html.pages import environment, resource
from agent.contract.topics import Topics
from calibrate.errors import TaredError
from fleet.web.boards import LiveBoard, LiveBoards
from fleet.web.forms import basic_credentials, read_form
from fleet.web.orders import BUTTONS, Orders
from fleet.web.pictures import camera_choices, fetch_picture, no_picture
from fleet.web.room import FleetRoom
from fleet.web.room_pages import room_routes
from fleet.web.streams import Streams, event
from fleet.web.table import PACKAGE, FleetTable
from fleet.web.views import board_page

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_MOST_VIEWERS = 8  # that wait for a live picture at the same time
_SCRIPTS = {"page.js": "text/javascript", "style.css": "text/css"}


@dataclass(frozen=True)
class WebOptions:
    """Options of serving the pages.

    hosts: the names under which this port may be called, without the port. password: demanded of everybody, with any
    user name; empty: of nobody. token: that of the pages' forms. closing: the streams of open pages are to end.
    """

    hosts: tuple[str, ...] = ("127.0.0.1", "localhost", "[::1]")
    password: str = ""
    token: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    closing: threading.Event = field(default_factory=threading.Event)


def create_app(
    boards: LiveBoards, orders: Orders, options: WebOptions, room: FleetRoom | None = None, clock: Clock = SYSTEM_CLOCK
) -> Starlette:
    """Return the application. room: the fleet's store, where there is one."""
    streams = Streams(options.closing, clock)
    pages = _Pages(boards, orders, options, streams, room is not None, clock)
    routes = [
        Route("/", pages.fleet),
        Route("/boards/{name}", pages.board),
        Route("/boards/{name}/orders", pages.order, methods=["POST"]),
        Route("/boards/{name}/snapshot.jpg", pages.picture),
        Route("/boards/{name}/live.jpg", pages.live_picture),
        Route("/live", pages.live),
        Route("/live/{name}", pages.live),
        Route("/static/{name}", pages.static),
        *(room_routes(room, streams, options.token) if room is not None else ()),
    ]
    middleware = [
        Middleware(TrustedHostMiddleware, allowed_hosts=[*options.hosts], www_redirect=False),
        Middleware(_Guard, password=options.password),
    ]
    return Starlette(routes=routes, middleware=middleware)


class PageServer(uvicorn.Server):
    """Ends the streams of open pages first, for whose connections it would wait otherwise."""

    def __init__(self, config: uvicorn.Config, options: WebOptions) -> None:
        super().__init__(config)
        self._closing = options.closing

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._closing.set()
        await super().shutdown(sockets)


class _Guard:
    """Adds the headers of every response, and demands the password where there is one."""

    def __init__(self, app: ASGIApp, password: str) -> None:
        self._app = app
        self._password = password.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = [(name.lower().encode(), value.encode()) for name, value in _HEADERS.items()]
                message["headers"] = [*message["headers"], *added]
            await send(message)

        _, given = basic_credentials(Headers(scope=scope).get("authorization", ""))
        if self._password and not hmac.compare_digest(given, self._password):
            demand = {"WWW-Authenticate": 'Basic realm="tared", charset="UTF-8"'}
            await PlainTextResponse("the password of tared web, please\n", 401, demand)(scope, receive, send_guarded)
            return
        await self._app(scope, receive, send_guarded)


class _Pages:
    """The handlers. Whatever reads the boards is quick; nothing here waits for a broker or a board."""

    def __init__(
        self, boards: LiveBoards, orders: Orders, options: WebOptions, streams: Streams, has_room: bool, clock: Clock
    ) -> None:
        self._boards = boards
        self._orders, self._clock = orders, clock
        self._options = options
        self._table = FleetTable(boards, clock)
        self._streams = streams
        self._has_room = has_room
        self._viewers = 0

    async def fleet(self, _request: Request) -> Response:
        rows = self._table.rows_since()
        return self._page("fleet.html", rows=rows, mark=self._table.mark, **self._fleet_values())

    async def board(self, request: Request) -> Response:
        name = request.path_params["name"]
        if (board := self._boards.get(name)) is None:
            return self._page("missing.html", status=404, name=name)
        return self._page("board.html", ops=BUTTONS, **self._board_values(name, board))

    async def picture(self, request: Request) -> Response:
        picture = self._orders.picture_of(request.path_params["name"])
        return PlainTextResponse("no picture\n", 404) if picture is None else Response(picture, media_type="image/jpeg")

    async def live_picture(self, request: Request) -> Response:
        """Return the newest annotated frame of a board on this machine, or the reason why there is none."""
        name = request.path_params["name"]
        board = self._boards.get(name)
        if board is None:
            return PlainTextResponse("no such board\n", 404)
        if self._viewers >= _MOST_VIEWERS:
            return PlainTextResponse(f"{_MOST_VIEWERS} viewers look already\n", 503, {"Retry-After": "5"})
        self._viewers += 1
        try:
            topics = Topics(self._boards.fleet, name)
            picture = await fetch_picture(board, topics, request.query_params.get("camera", ""))
        except AgentError as error:
            return PlainTextResponse(f"{error.found}\n", 502)
        finally:
            self._viewers -= 1
        return Response(picture, media_type="image/jpeg")

    async def order(self, request: Request) -> Response:
        """Send a command: the fields `token`, `op`, and the arguments of the op."""
        form = await read_form(request, self._options.token)
        name, op = request.path_params["name"], form.pop("op", "")
        if self._boards.get(name) is None or op not in BUTTONS:
            return PlainTextResponse("no such board, or no such command\n", 404)
        try:
            self._orders.give(name, op, {key: value for key, value in form.items() if value})
        except TaredError as error:
            return PlainTextResponse(f"{error}\n", 400)
        if request.headers.get("x-requested-with") == "page":
            return Response(status_code=204)
        return RedirectResponse(f"/boards/{name}", 303)

    async def static(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name == "live.js":
            script = files(PACKAGE) / "templates" / name
            return Response(script.read_bytes(), media_type="text/javascript")
        if name not in _SCRIPTS:
            return PlainTextResponse("no such file\n", 404)
        return Response(resource(name), media_type=_SCRIPTS[name])

    async def live(self, request: Request) -> Response:
        """Send the changing part of a page whenever it changes."""
        name, mark = request.path_params.get("name"), request.query_params.get("since", "")
        shown: tuple[int, int, str] | None = None

        async def changes() -> str:
            nonlocal shown, mark
            now = self._version(name), self._orders.version, self._boards.trouble
            if now == shown:
                return ""
            shown = now
            events = event("part", self._part(name))
            if name is None and (rows := self._table.rows_since(mark)):
                mark = self._table.mark
                events += event("rows", rows)
            return events

        return self._streams.answer(request, changes)

    def _version(self, name: str | None) -> int:
        """Return a number that rises with whatever the page of this board, or of the fleet, shows."""
        if name is None:
            return self._boards.version
        board = self._boards.get(name)
        return board.version if board is not None else 0

    def _part(self, name: str | None) -> str:
        """Return the changing part of a page; empty as long as its board has not reported."""
        token = self._options.token  # that of an open page is an earlier one, if this server has been started again
        if name is None:
            return self._render("fleet_part.html", token=token, **self._fleet_values())
        if (board := self._boards.get(name)) is None:
            return ""
        return self._render("board_part.html", token=token, **self._board_values(name, board))

    def _fleet_values(self) -> dict[str, Any]:
        return {"fleet": self._boards.fleet, "count": len(self._boards.names()), "trouble": self._boards.trouble}

    def _board_values(self, name: str, board: LiveBoard) -> dict[str, Any]:
        orders = self._orders.of_board(name)
        return {
            "name": name,
            "board": board_page(board, self._clock.wall_s()),
            "orders": orders,
            "picture": next((order.sent_at for order in orders if order.picture is not None), None),
            "trouble": self._boards.trouble,
            "signs": self._orders.signs,
            "no_picture": no_picture(board),
            "cameras": camera_choices(board),
        }

    def _page(self, template: str, status: int = 200, **values: Any) -> Response:
        values = {"token": self._options.token, "has_room": self._has_room, **values}
        return HTMLResponse(self._render(template, **values), status)

    def _render(self, template: str, **values: Any) -> str:
        return environment(PACKAGE).get_template(template).render(now=self._clock.wall_s(), **values)
