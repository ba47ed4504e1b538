"""Read what browsers send: forms, small and with the token that no other site can read, and name and password."""

from __future__ import annotations

import hmac
from base64 import b64decode
from urllib.parse import parse_qsl

from starlette.exceptions import HTTPException
from starlette.requests import Request

_MOST_BYTES = 4096


async def read_form(request: Request, token: str) -> dict[str, str]:
    """Return the fields of a form that have a value, without its token. Raises HTTPException."""
    length = request.headers.get("content-length", "")
    if not (length.isascii() and length.isdigit() and int(length) <= _MOST_BYTES):
        raise HTTPException(413, "a form that is too large\n")
    form = dict(parse_qsl((await request.body()).decode("utf-8", "replace")))
    if not hmac.compare_digest(form.pop("token", "").encode(), token.encode()):
        raise HTTPException(403, "this form is not of this page: load the page again\n")
    return form


def basic_credentials(authorization: str) -> tuple[bytes, bytes]:
    """Return the name and the password of an Authorization header; both are empty if it has none."""
    scheme, _, content = authorization.partition(" ")
    try:
        name, _, password = b64decode(content, validate=True).partition(b":")
    except ValueError:
        return b"", b""
    return (name, password) if scheme.lower() == "basic" else (b"", b"")
