"""Read the forms of pages: small, and with the token that no other site can read."""

from __future__ import annotations

import hmac
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
