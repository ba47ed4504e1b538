"""Parse the head of an HTTP request; make whole answers, after which the connection ends."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPException, HTTPMessage, parse_headers
from urllib.parse import parse_qs, urlsplit

# Nobody keeps an answer, guesses another type, or embeds it into a page that was not served here.
_HEADERS = (
    "Cache-Control: no-store",
    "X-Content-Type-Options: nosniff",
    "Cross-Origin-Resource-Policy: same-origin",
    "Connection: close",
)


class RefusedRequest(Exception):
    """A request that is refused, with the answer to it."""

    def __init__(self, status: HTTPStatus, text: str, *headers: str) -> None:
        super().__init__(text)
        self.response = response(status, f"{text}\n".encode(), "text/plain; charset=utf-8", *headers)


@dataclass(frozen=True)
class Request:
    """The head of a request. path: without the query."""

    method: str
    path: str
    query: Mapping[str, Sequence[str]]
    headers: HTTPMessage

    @property
    def host(self) -> str | None:
        """The name or address in the Host header, in lower case and without the port; None unless there is one."""
        hosts = self.headers.get_all("Host", [])
        if len(hosts) != 1:
            return None
        try:
            return urlsplit(f"//{hosts[0].strip()}").hostname
        except ValueError:
            return None


def parse_head(head: bytes) -> Request:
    """Parse the head of a request. Raises RefusedRequest."""
    line, _, rest = head.partition(b"\r\n")
    try:
        method, target, version = line.decode("utf-8", "replace").split(" ")
        headers = parse_headers(io.BytesIO(rest))
        url = urlsplit(target)
        query = parse_qs(url.query, keep_blank_values=True, max_num_fields=8)
    except (ValueError, HTTPException):
        raise RefusedRequest(HTTPStatus.BAD_REQUEST, "a request that is not HTTP/1.1") from None
    if not version.startswith("HTTP/1."):
        raise RefusedRequest(HTTPStatus.BAD_REQUEST, "expected HTTP/1.1")
    return Request(method, url.path, query, headers)


def response(status: HTTPStatus, body: bytes, content_type: str, *headers: str) -> bytes:
    """Return a whole response, after which the connection ends."""
    return response_head(status, content_type, f"Content-Length: {len(body)}", *headers) + body


def response_head(status: HTTPStatus, content_type: str, *headers: str) -> bytes:
    """Return the head of a response."""
    lines = (f"HTTP/1.1 {status.value} {status.phrase}", f"Content-Type: {content_type}", *headers, *_HEADERS)
    return "".join(f"{line}\r\n" for line in lines).encode() + b"\r\n"
