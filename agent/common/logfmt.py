"""Format log records as logfmt, or as JSON: `time=... level=INFO at=agent.uplink event=swap capture_ts=58.2`.

A call names its fields in its format, as `log.info("mqtt=up host=%s", host)`; each argument is then a field's value.
A record of another library, which names none, has the field `msg`.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from typing import Any

from agent.common.redaction import shown

_FIELD = re.compile(r"(?:^| )([A-Za-z_]\w*)=('[^']*'|\S+)")
_CONVERSION = re.compile(r"%[-#0 +]*\d*(?:\.\d+)?[diouxXeEfFgGrsac]")
_BARE = re.compile(r"[^\s\"=\x00-\x1f\x7f\\]+")


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """Return a record's fields: time (RFC 3339, UTC), level, at, then its own."""
    time = datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds")
    fields: dict[str, Any] = {"time": time.replace("+00:00", "Z"), "level": record.levelname, "at": record.name}
    for key, value in _own(record):
        fields[f"{key}_" if key in fields else key] = value
    if record.exc_info:
        fields["exception"] = logging.Formatter().formatException(record.exc_info)
    return fields


def _own(record: logging.LogRecord) -> Iterator[tuple[str, Any]]:
    template, values = str(record.msg), record.args if isinstance(record.args, tuple) else ()
    pairs = _FIELD.findall(template)
    if not pairs or _FIELD.sub("", template).strip() or len(_CONVERSION.findall(template)) != len(values):
        yield "msg", record.getMessage()
        return
    rest = iter(values)
    for key, text in pairs:
        plain = text.strip("'")
        given = tuple(next(rest) for _ in _CONVERSION.findall(plain))
        yield key, given[0] if plain in ("%r", "%s", "%d") else plain % given


def logfmt(fields: Mapping[str, Any]) -> str:
    """Return fields as one line of logfmt; values that are not bare are quoted, lists and mappings are JSON."""
    return " ".join(f"{key}={_value(value)}" for key, value in fields.items())


def _value(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    text = json.dumps(value, default=str) if isinstance(value, dict | list | tuple) else str(value)
    is_bare = _BARE.fullmatch(text) and text == shown(text)
    return text if is_bare else shown(json.dumps(text, ensure_ascii=False))


class LogfmtFormatter(logging.Formatter):
    """Formats a record as one line of logfmt."""

    def format(self, record: logging.LogRecord) -> str:
        return logfmt(fields_of(record))


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(fields_of(record), default=str)
