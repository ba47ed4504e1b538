"""Log lines: a parser of logfmt reads back every field, and one of JSON; times are RFC 3339."""

from __future__ import annotations

import ast
import json
import logging
import re
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from places import ROOT

from agent.common.logfmt import JsonFormatter, LogfmtFormatter, fields_of, logfmt

VALUES = st.text() | st.integers() | st.booleans() | st.none()

# The grammar of go-logfmt: a key, and behind = a word without quotes, or a string in quotes with the escapes of JSON.
PAIR = re.compile(r'([^\s="]+)=(?:"((?:[^"\\\x00-\x1f]|\\.)*)"|([^\s="]*))(?: |$)')


def parsed(line: str) -> dict[str, str]:
    found, at = {}, 0
    while at < len(line):
        pair = PAIR.match(line, at)
        assert pair is not None, f"no logfmt from column {at}: {line!r}"
        found[pair[1]] = pair[3] if pair[2] is None else json.loads(f'"{pair[2]}"')
        at = pair.end()
    return found


def record(template: str, *values: object) -> logging.LogRecord:
    """A record as the logger makes it: a mapping alone would be taken for named values."""
    return logging.getLogger("agent.x").makeRecord("agent.x", logging.WARNING, "", 0, template, values, None)


@given(st.dictionaries(st.from_regex(r"\A[a-z_]+\Z"), VALUES, min_size=1))
def test_a_parser_reads_back_every_value(fields: dict[str, Any]) -> None:
    line = logfmt(fields)
    assert "\n" not in line
    shown = {key: value if isinstance(value, str) else json.dumps(value) for key, value in fields.items()}
    assert parsed(line) == shown


def test_a_call_names_its_fields_in_its_format() -> None:
    call = record("mqtt=down host=%s reason=%r retry_s=%.1f names=%r", "b.lan", 'it said "no"', 1.25, ["a", "b"])
    line = LogfmtFormatter().format(call)
    shown = parsed(line)
    assert list(shown) == ["time", "level", "at", "mqtt", "host", "reason", "retry_s", "names"]
    assert line.endswith(r'host=b.lan reason="it said \"no\"" retry_s=1.2 names="[\"a\", \"b\"]"')
    assert json.loads(JsonFormatter().format(call))["names"] == ["a", "b"]
    age = datetime.now(timezone.utc) - datetime.fromisoformat(shown["time"].replace("Z", "+00:00"))
    assert abs(age.total_seconds()) < 60.0


def test_a_field_is_in_a_line_once() -> None:
    call = record("event=%s artefact=%r gain_db=%r level=%r box=%r", "swap", "0f", 18.94001, 3, {"x": 1})
    shown = parsed(LogfmtFormatter().format(call))
    assert shown["level"] == "WARNING"
    assert {key: shown[key] for key in ("event", "artefact", "gain_db", "level_", "box")} == {
        "event": "swap",
        "artefact": "0f",
        "gain_db": "18.94",
        "level_": "3",
        "box": '{"x": 1}',
    }


@pytest.mark.parametrize(("template", "values"), [("%s: %s", ("a=b", 1)), ("100 % of it", ()), ("x=%s and y", (1,))])
def test_text_without_fields_is_a_message(template: str, values: tuple[object, ...]) -> None:
    assert parsed(LogfmtFormatter().format(record(template, *values)))["msg"] == record(template, *values).getMessage()


def templates() -> Iterator[tuple[str, str]]:
    for path in (each for room in ("agent", "fleet") for each in (ROOT / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("log."):
                text = node.args[1 if ast.unparse(node.func) == "log.log" else 0]
                if isinstance(text, ast.Constant) and isinstance(text.value, str):
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", text.value


def test_every_call_of_the_project_names_fields() -> None:
    found = dict(templates())
    assert len(found) > 40
    for where, template in found.items():
        values = tuple(1 for _ in re.findall("%", template))
        assert "msg" not in fields_of(record(template, *values)), where
