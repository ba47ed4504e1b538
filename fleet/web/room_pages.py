"""Serve the fleet's pages: devices, how they are distributed, rollouts; and carry out what their forms order."""

from __future__ import annotations

import asyncio
import getpass
import shlex
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

from agent.common.errors import CommandError
from agent.common.html.pages import environment
from calibrate.errors import TaredError
from fleet.devices.devices import Devices
from fleet.devices.selection import parse_tag, select
from fleet.operator import FILES
from fleet.rollout.register import ALL, WAVE, RolloutRegister
from fleet.rollout.spec import OPS, RolloutSpec, parse_duration, typed_spec
from fleet.store.transaction import FleetStore
from fleet.untrusted import printable
from fleet.web import room_views
from fleet.web.forms import basic_credentials, read_form
from fleet.web.room import FleetRoom, Reading
from fleet.web.streams import Streams, event
from fleet.web.table import PACKAGE

_DEVICES_S, _ROLLOUT_S, _DAYS_S = 10.0, 1.0, 600.0  # between two readings
_MOST_WHERE = 1000
_MOST_REMEMBERED = 100
_SELECTING = ("devices", "overview", "days")  # pages with a selection of devices
_STEPS = ("pause", "resume", "abort")
# The fields of the form of a new rollout, with what they hold at first; as the options of `tared fleet rollout create`.
_FIELDS = {
    "op": "recalibrate",
    "arguments": "",
    "select": "",
    "why": "",
    "waves": "1,5%,25%,100%",
    "gates": "failures<=2%",
    "soak": "30m",
    "at_once": "500",
    "windows": "",
    "timezone": "UTC",
    "order": "random",
    "valid": "1h",
    "deadline": "2h",
    "silent": "10m",
    "signed": "",
}


def room_routes(room: FleetRoom, streams: Streams, token: str) -> list[Route]:
    """Return the routes of the fleet's pages. token: of their forms."""
    pages = _RoomPages(room, streams, token)
    return [
        *(Route(f"/{page}", pages.page) for page in ("devices", "overview", "days", "rollouts")),
        Route("/devices/tags", pages.tag, methods=["POST"]),
        Route("/rollouts/new", pages.new_rollout),
        Route("/rollouts/new", pages.create, methods=["POST"]),
        Route("/rollouts/{id}", pages.rollout),
        Route("/rollouts/{id}/steps", pages.steer, methods=["POST"]),
        Route("/stored/{page}", pages.stored),
        Route("/stored/rollouts/{id}", pages.stored),
    ]


class _RoomPages:
    """The handlers. What reads or writes the store awaits a thread."""

    def __init__(self, room: FleetRoom, streams: Streams, token: str) -> None:
        self._room, self._streams, self._token = room, streams, token
        self._start = uuid.uuid4().hex[:8]  # a page that is older than this process gets today's token
        self._creating = asyncio.Lock()
        self._created: OrderedDict[str, str] = OrderedDict()  # ids by the seed of the form

    async def page(self, request: Request) -> Response:
        """Show the page that the path names."""
        page = request.url.path.removeprefix("/")
        return await self._show(page, _selection(page, request))

    async def rollout(self, request: Request, error: str = "", status: int = 200) -> Response:
        return await self._show("rollout", request.path_params["id"], error, status)

    async def tag(self, request: Request) -> Response:
        """Put tags on the selected devices, and take others off: the fields `where`, `tags` and `remove`."""
        form = await read_form(request, self._token)
        where = form.get("where", "")[:_MOST_WHERE]
        try:
            tags = dict(parse_tag(each) for each in _listed(form.get("tags", "")))
            removed = [parse_tag(each)[0] for each in _listed(form.get("remove", ""))]
            await self._room.write(partial(self._tag, where, tags, removed, _who(request)))
        except TaredError as error:
            return await self._show("devices", where, _words(error), 400)
        return RedirectResponse(f"/devices?{urlencode({'where': where})}", 303)

    def _tag(self, where: str, tags: Mapping[str, str], removed: Sequence[str], who: str, store: FleetStore) -> None:
        devices = Devices(store)
        selected = select(devices, self._room.fleet, where, clock=self._room.clock)
        devices.tag(selected, tags, removed, who)

    async def new_rollout(self, request: Request) -> Response:
        fields = {**_FIELDS, "select": _where(request), "seed": uuid.uuid4().hex}
        return self._form(fields)

    async def create(self, request: Request) -> Response:
        """Show the waves of a rollout, or create it: the field `do` is `plan` or `create`."""
        form = await read_form(request, self._token)
        seed = form.get("seed", "")[:64] or uuid.uuid4().hex
        fields = {**dict.fromkeys(_FIELDS, ""), **{key: form[key] for key in _FIELDS if key in form}, "seed": seed}
        is_plan = form.get("do") != "create"
        async with self._creating:  # pressed twice, a button creates one
            if not is_plan and (identity := self._created.get(seed)) is not None:
                return RedirectResponse(f"/rollouts/{identity}", 303)
            try:
                created = await self._room.write(partial(self._create, fields, is_plan, _who(request)))
            except TaredError as error:
                return self._form(fields, error=_words(error), status=400)
            if not isinstance(created, str):
                return self._form(fields, plan=created)
            self._created[seed] = created
            if len(self._created) > _MOST_REMEMBERED:
                self._created.popitem(last=False)
        return RedirectResponse(f"/rollouts/{created}", 303)

    def _create(self, fields: Mapping[str, str], is_plan: bool, who: str, store: FleetStore) -> str | dict[str, Any]:
        """Return the id of the new rollout, or what the form shows of the plan."""
        spec, register = _spec(fields, self._room.files), RolloutRegister(store, who, self._room.clock)
        waves = register.plan(self._room.fleet, spec, fields["seed"])
        if is_plan:
            return room_views.plan_values(spec, waves)
        return register.create(self._room.fleet, spec, waves, fields["why"])

    async def steer(self, request: Request) -> Response:
        """Pause, resume or abort a rollout: the fields `step`, `why`, and `undo` of an abort."""
        form = await read_form(request, self._token)
        identity, step, undo = request.path_params["id"], form.get("step", ""), form.get("undo")
        if step not in _STEPS or undo not in (None, WAVE, ALL):
            return PlainTextResponse("no such step\n", 404)
        try:
            act = partial(_steer, self._room.fleet, identity, step, undo, form.get("why", ""), _who(request))
            await self._room.write(act)
        except TaredError as error:
            return await self.rollout(request, _words(error), 400)
        return RedirectResponse(f"/rollouts/{quote(identity, safe='')}", 303)

    async def stored(self, request: Request) -> Response:
        """Send the part of a page that changes, whenever it does; when it was read, whenever it is read again."""
        identity = request.path_params.get("id")
        page = "rollout" if identity is not None else request.path_params["page"]
        if page not in _PARTS:
            return PlainTextResponse("no such page\n", 404)
        subject = _selection(page, request) if identity is None else identity
        # The browser names what it shows: of a stream that broke, or of the page before its first stream.
        shown = request.headers.get("last-event-id") or request.query_params.get("shown", "")
        read_at: float | None = None

        async def changes() -> str:
            nonlocal shown, read_at
            reading = await self._read(page, subject)
            label = self._label(reading)
            if label != shown:
                shown, read_at = label, reading.at
                return event("part", self._part(reading), label)
            if reading.at is not None and reading.at != read_at:
                read_at = reading.at
                return event("read", read_at)
            return ""

        return self._streams.answer(request, changes)

    async def _read(self, page: str, subject: str) -> Reading:
        values, every_s = _PARTS[page]

        def make(store: FleetStore) -> str:
            return self._render(f"{page}_part.html", **values(store, self._room, subject))

        return await self._room.read(f"{page} {subject}", make, every_s)

    def _part(self, reading: Reading) -> str:
        return self._render("room_part.html", reading=reading, html=Markup(reading.html), token=self._token)

    def _label(self, reading: Reading) -> str:
        """Return what distinguishes a part from another one, as far as people see."""
        return f"{self._start}-{reading.digest}{'-away' if reading.trouble else ''}"

    async def _show(self, page: str, subject: str, error: str = "", status: int = 200) -> Response:
        reading = await self._read(page, subject)
        query = {"shown": self._label(reading)}
        if page == "rollout":
            live = f"/stored/rollouts/{quote(subject, safe='')}"
        else:
            live, query = f"/stored/{page}", {**query, "where": subject}
        return self._page(
            f"{page}.html",
            status,
            live=f"{live}?{urlencode(query)}",
            page=page,
            subject=subject,
            part=Markup(self._part(reading)),
            error=error,
        )

    def _form(self, fields: Mapping[str, str], plan: Any = None, error: str = "", status: int = 200) -> Response:
        files = self._room.files
        names = sorted(each.name for each in files.iterdir() if each.is_file())[:100] if files is not None else None
        return self._page(
            "new_rollout.html", status, form=fields, ops=[*OPS], plan=plan, files=names, error=error, live=""
        )

    def _page(self, template: str, status: int, **values: Any) -> Response:
        shared = {"token": self._token, "has_room": True, "fleet": self._room.fleet}
        return HTMLResponse(self._render(template, **shared, **values), status)

    def _render(self, template: str, **values: Any) -> str:
        return environment(PACKAGE).get_template(template).render(now=self._room.clock.wall_s(), **values)


# What each page shows of the store, and how often it is read.
_PARTS: dict[str, tuple[Callable[[FleetStore, FleetRoom, str], dict[str, Any]], float]] = {
    "devices": (room_views.devices_values, _DEVICES_S),
    "overview": (room_views.overview_values, _DEVICES_S),
    "days": (room_views.days_values, _DAYS_S),
    "rollouts": (room_views.rollouts_values, _ROLLOUT_S),
    "rollout": (room_views.rollout_values, _ROLLOUT_S),
}


def _selection(page: str, request: Request) -> str:
    """Return the conditions of a page that has a selection; else none, for each text would be read by itself."""
    return _where(request) if page in _SELECTING else ""


def _where(request: Request) -> str:
    return request.query_params.get("where", "")[:_MOST_WHERE]


def _who(request: Request) -> str:
    """Return who acts, for the record: by the name that the browser gave with the password, if it gave one."""
    name, _ = basic_credentials(request.headers.get("authorization", ""))
    return f"{printable(name.decode('utf-8', 'replace'), 64) or getpass.getuser()} by tared web"


def _words(error: TaredError) -> str:
    return f"{error.found}; expected {error.expected}; {error.remedy}."


def _listed(text: str) -> list[str]:
    return [each.strip() for each in text.split(",") if each.strip()]


def _steer(fleet: str, begin: str, step: str, undo: str | None, why: str, who: str, store: FleetStore) -> None:
    register, identity = RolloutRegister(store, who), room_views.own_rollout(store, fleet, begin)
    if step == "abort":
        register.abort(identity, undo, why)
    elif step == "pause":
        register.pause(identity, why)
    else:
        register.resume(identity, why)


def _spec(fields: Mapping[str, str], files: Path | None) -> RolloutSpec:
    """Return the specification that the form's fields say. Raises CommandError as RolloutSpec."""
    try:
        arguments, at_once = shlex.split(fields["arguments"]), int(fields["at_once"])
    except ValueError as error:
        expected = "arguments such as frames=512, and a number of boards"
        raise CommandError("command.args", str(error), expected, "correct them") from None
    if fields["op"] in FILES:
        arguments = [_with_folder(each, files) for each in arguments]
    texts = {name: fields[name] for name in ("select", "waves", "gates", "timezone", "order")}
    times = {f"{name}_s": parse_duration(fields[name]) for name in ("soak", "valid", "deadline", "silent")}
    windows, signed = tuple(fields["windows"].split()), bool(fields["signed"])
    return typed_spec(fields["op"], arguments, at_once=at_once, windows=windows, signed=signed, **texts, **times)


def _with_folder(argument: str, files: Path | None) -> str:
    """Return an argument with the path of the file that it names; the page reads no other folder than this one."""
    key, _, name = argument.partition("=")
    if key not in ("file", "release"):
        return argument
    if files is None or name not in {each.name for each in files.iterdir() if each.is_file()}:
        expected = "the name of a file in the folder of --files"
        remedy = "start tared web with --files FOLDER, and put the file there; or use 'tared fleet rollout create'"
        raise CommandError("command.args", argument, expected, remedy)
    return f"{key}={files / name}"
