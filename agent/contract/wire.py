"""Parse bytes from the network into a JSON object, within limits that no sender can exceed."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

from pydantic import ValidationError

from agent.common.errors import AgentError
from agent.common.state_files import is_deeper

MAX_PAYLOAD_BYTES = 64 * 1024
MAX_DEPTH = 16  # containers inside each other


class MessageError(AgentError):
    """Report a document from the network that cannot be read."""


def read_object(payload: bytes, most_bytes: int = MAX_PAYLOAD_BYTES) -> dict[str, Any]:
    """Decode I-JSON (RFC 7493), which RFC 8785 can canonicalise: UTF-8, finite numbers, unique keys.

    Args:
        payload: The bytes of a message.
        most_bytes: The largest payload that is read.

    Raises MessageError:
        message.too_large   more than `most_bytes`
        message.too_deep    more than MAX_DEPTH containers inside each other
        message.malformed   not JSON in UTF-8, a key twice, NaN or infinity, a lone surrogate
        message.not_object  other JSON than an object

    >>> read_object(b'{"op": "status"}')
    {'op': 'status'}
    >>> try:
    ...     read_object(b'{"op": "status", "op": "restart"}')
    ... except MessageError as error:
    ...     print(error.code)
    message.malformed
    """
    if len(payload) > most_bytes:
        _refuse("too_large", f"a payload beyond {most_bytes} bytes", f"at most {most_bytes}")
    try:
        document = json.loads(
            payload.decode(), object_pairs_hook=_unique_keys, parse_constant=_no_constant, parse_float=_finite
        )
        too_deep = is_deeper(document, MAX_DEPTH)
    except RecursionError:
        too_deep = True
    except ValueError as error:
        _refuse("malformed", str(error)[:200], "JSON in UTF-8")
    if too_deep:
        _refuse("too_deep", "JSON nested too deep", f"at most {MAX_DEPTH} levels")
    if not isinstance(document, dict):
        _refuse("not_object", f"a JSON {type(document).__name__}", "a JSON object")
    try:
        json.dumps(document, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        _refuse("malformed", "an escaped lone surrogate", "text that UTF-8 can hold")
    return document


def describe_errors(error: ValidationError) -> str:
    """Return the first errors as `frames: Input should be a valid integer`; in ASCII, for keys are the sender's."""
    details = error.errors(include_url=False, include_context=False, include_input=False)
    lines = [
        f"{'.'.join(str(part) for part in detail['loc']) or 'document'}: {detail['msg']}" for detail in details[:3]
    ]
    return "; ".join(lines).encode("ascii", "backslashreplace").decode()[:300]


def _refuse(code: str, found: str, expected: str) -> NoReturn:
    raise MessageError(f"message.{code}", found, expected, "correct the sender") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keyed = dict(pairs)
    if len(keyed) < len(pairs):
        raise ValueError("a key that appears twice in one object")
    return keyed


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name}, which is no JSON number")


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError("a number beyond what a double holds")
    return value
