"""Fetch the live picture of a board on this machine for whoever may open its page.

The daemon's `preview` shows annotated frames on a loopback port or a Unix socket, which nobody else can reach. The page
asks for one picture after the other while it can be seen, so nothing runs for a page that is closed or hidden. A board
on another machine has no live picture here; `no_picture` says so, in words for the page.

The address comes by MQTT, as a stranger may have written it. So it is used only if the board reports the boot of this
machine, if it leads to a loopback address or a Unix socket, and if what answers says that it is this board's preview.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from itertools import islice
from pathlib import Path
from urllib.parse import quote, urlsplit

from agent.common.errors import AgentError
from agent.common.html.text import visible
from agent.common.http.addresses import is_loopback
from agent.contract.topics import Topics
from fleet.devices.facts import cameras_of, value_at
from fleet.web.boards import LiveBoard

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_ANSWER_S = 5.0
_MOST_HEAD_BYTES = 1 << 14
_MOST_JPEG_BYTES = 1 << 22  # the preview makes none of more than half of this
_MOST_CAMERAS, _MOST_NAME = 16, 64


def no_picture(board: LiveBoard) -> str:
    """Return in a sentence why there is no live picture of a board, and the remedy; empty where there is one."""
    status, telemetry = (board.documents.get(kind, {}) for kind in ("status", "telemetry"))
    if status.get("state") not in ("online", "degraded"):
        return "No live picture: the board is not online."
    if not telemetry:
        return "No live picture yet: the board's next telemetry says whether it has one."
    snapshot = "Snapshot shows one picture, where the board's owner allows it (privacy.snapshot)."
    preview = value_at(telemetry, "health", "preview")
    if not isinstance(preview, Mapping):
        return f"No live picture: preview.address is not set in the board's config.yaml. {snapshot}"
    if preview.get("error") == "preview.privacy":
        return "No live picture: the board's owner does not allow it (privacy.preview)."
    if not isinstance(address := preview.get("address"), str):
        return f"No live picture: the board cannot show one ({visible(preview.get('error') or 'no address', 60)})."
    if status.get("boot_id") != _boot_id():
        return f"No live picture: the board is another machine than this page's server. {snapshot}"
    if _place(address) is None:
        return f"No live picture: {visible(address, 60)} is no address of this machine."
    return ""


def camera_choices(board: LiveBoard) -> list[tuple[str, str]]:
    """Return the cameras of a board: the name of each, and how it is shown."""
    cameras = cameras_of(board.documents.get("telemetry", {}))
    return [(name, visible(name, _MOST_NAME)) for name in islice(cameras, _MOST_CAMERAS)]


async def fetch_picture(board: LiveBoard, topics: Topics, camera: str) -> bytes:
    """Return the newest annotated frame of a camera as a JPEG; of the first one, if `camera` is empty.

    Raises AgentError (`web.preview`) with the reason why there is none.
    """
    if reason := no_picture(board):
        raise AgentError("web.preview", reason, "the live picture of this board", "see docs/guides/results.md, Preview")
    address = str(value_at(board.documents.get("telemetry"), "health", "preview", "address"))
    try:
        return await asyncio.wait_for(_fetch(address, topics, camera), _ANSWER_S)
    except (OSError, EOFError, ValueError, asyncio.TimeoutError, asyncio.LimitOverrunError) as error:
        reason = getattr(error, "strerror", None) or str(error) or f"no answer within {_ANSWER_S:.0f} s"
        remedy = "see the board's log; a Unix socket is open to the daemon's own user alone"
        raise AgentError(
            "web.preview", visible(f"{address}: {reason}", 300), "an answer of the board's preview", remedy
        ) from error


async def _fetch(address: str, topics: Topics, camera: str) -> bytes:
    """Speak HTTP/1.1 with a preview. Raises ValueError, saying what came, unless it is a picture of this board."""
    async with _connected(address) as (reader, writer):
        target = f"/frame.jpg?camera={quote(camera, safe='')}" if camera else "/frame.jpg"
        host = urlsplit(address).netloc or "localhost"
        writer.write(f"GET {target} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        if topics.board_header not in lines:
            raise ValueError("the program that answers is not this board's preview")
        headers = dict(line.partition(": ")[::2] for line in lines)
        size = int(headers.get("Content-Length", ""))
        if not 0 <= size <= _MOST_JPEG_BYTES:
            raise ValueError(f"an answer of {size} bytes")
        content = await reader.readexactly(size)
        if " 200 " not in first or headers.get("Content-Type") != "image/jpeg":
            raise ValueError(content[:300].decode("utf-8", "replace").strip())
        return content


@asynccontextmanager
async def _connected(address: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    place = _place(address)
    if isinstance(place, Path):
        reader, writer = await asyncio.open_unix_connection(place, limit=_MOST_HEAD_BYTES)
    elif place is not None:
        reader, writer = await asyncio.open_connection(*place, limit=_MOST_HEAD_BYTES)
    else:
        raise ValueError("no address of this machine")
    try:
        yield reader, writer
    finally:
        writer.close()


def _place(address: str) -> Path | tuple[str, int] | None:
    """Return the Unix socket, or the loopback host and port, that a preview's address names; None for any other."""
    if address.startswith("unix:/"):
        return Path(address.removeprefix("unix:"))
    try:
        url = urlsplit(address)
        host, port = url.hostname, url.port
    except ValueError:
        return None
    return (host, port) if url.scheme == "http" and host and port and is_loopback(host) else None


def _boot_id() -> str:
    return _BOOT_ID.read_text(encoding="ascii").strip() if _BOOT_ID.exists() else ""
