"""Requests of strangers to the port of metrics, read as any port of a board: halves, floods of headers, noise."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from random import Random

from prometheus_client.core import GaugeMetricFamily
from promtool import Fixed, metrics_server

from agent.common.http.request import RefusedRequest, parse_head
from agent.common.metrics import MetricsServer
from attack.case import Case, Outcome, damaged

_METHODS = ("GET", "HEAD", "POST", "get", "TRACE", "CONNECT", "G" * 5000, "\x00", "")
_TARGETS = (
    *(
        "/metrics",
        "/",
        "http://[::1",
        "http://evil/metrics",
        "/metrics?" + "a=b&" * 500,
        "/../../etc/passwd",
        "*",
        "//x/metrics",
    ),
    *("/" + "a" * 70_000, "/%00", "/\xff", "/metrics#x", "\x1b[2J", "/metrics?a=%zz"),
)
_VERSIONS = ("HTTP/1.1", "HTTP/1.0", "HTTP/2", "HTTP/1.", "http/1.1", "", "HTTP/9.9")
_HOSTS = (
    "127.0.0.1",
    "localhost",
    "evil.example",
    "[::1",
    "127.0.0.1:99999999",
    "",
    "\x00",
    "a" * 5000,
    "127.0.0.1\r\nHost: b",
)
_MORE = (
    "X: " + "y" * 20_000,
    "X" * 20_000,
    "Content-Length: 99999999",
    "Transfer-Encoding: chunked",
    "a:b\r\n" * 300,
    " folded",
    ":",
)
_QUIET_S = 0.05  # between the parts of a request that is sent in two
_ANSWERED_S = 15.0


def request(rng: Random) -> bytes:
    lines = [
        f"{rng.choice(_METHODS[:2] * 4 + _METHODS)} {rng.choice(_TARGETS)} {rng.choice(_VERSIONS[:1] * 4 + _VERSIONS)}"
    ]
    lines += [f"Host: {rng.choice(_HOSTS)}" for _ in range(rng.choice((0, 1, 1, 1, 2)))]
    lines += [rng.choice(_MORE) for _ in range(rng.choice((0, 0, 1, 3)))]
    whole = rng.choice(("\r\n", "\r\n", "\n")).join(lines).encode("utf-8", "replace") + b"\r\n\r\n"
    return damaged(rng, whole)[1] if rng.random() < 0.3 else whole


@cache
def _server() -> MetricsServer:
    """One for the whole process: what outlives a thousand requests serves the next."""
    server = metrics_server(Fixed(GaugeMetricFamily("tared_things", "Things.", value=1.0)))
    server.__enter__()
    return server


def _sent(content: bytes, cut: int | None) -> Outcome:
    """The stranger is answered, or hung up on, and somebody who knows how is answered after."""
    port = _server()._address.port
    status = _status(port, content, cut)
    assert _status(port, b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", None) == 200
    assert status in (None, 200, 400, 403, 404, 405, 408, 413, 414, 431), status
    return None if status == 200 else "refused cleanly"


def _status(port: int, content: bytes, cut: int | None) -> int | None:
    with socket.create_connection(("127.0.0.1", port), _ANSWERED_S) as stranger:
        try:
            stranger.sendall(content[:cut])
            if cut is not None:
                stranger.settimeout(_QUIET_S)
                with_nothing = stranger.recv(1) if cut % 2 else b""
                stranger.settimeout(_ANSWERED_S)
                assert not with_nothing or with_nothing == b"H"
                stranger.sendall(content[cut:])
            stranger.shutdown(socket.SHUT_WR)
            answer = stranger.recv(4096)
        except OSError:  # it was hung up on
            return None
    return int(answer.split()[1]) if answer.startswith(b"HTTP/1.1 ") else None


def _parsed(content: bytes) -> Outcome:
    try:
        asked = parse_head(content)
    except RefusedRequest:
        return "refused cleanly"
    assert asked.host is None or "\r" not in asked.host
    return None


def cases(rng: Random, _folder: Path) -> Iterator[Case]:
    """Requests to the parser, and to a server that goes on."""
    for _ in range(20):
        yield Case("to the parser", partial(_parsed, request(rng)))
    for _ in range(10):
        content = request(rng)
        cut = rng.randrange(len(content) + 1) if rng.random() < 0.3 else None
        yield Case("to the server", partial(_sent, content, cut))
