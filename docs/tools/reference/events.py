"""The page of events: every kind with the time it is sent, its fields and an example."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import JsonValue

from agent.contract.events import EVENTS, PARTS, EventKind
from docs.tools.reference.event_details import DETAILS
from docs.tools.reference.examples import event_example
from docs.tools.reference.markdown import anchored, code, fenced, heading, page, paragraph, prose, table

_INTRODUCTION = """\
An event is a document on the topic `event`: `epoch`, `seq`, `ts` (Unix time in seconds) and `kind`, and beside them the
fields of its kind. Fields that have no value are null or absent. [MQTT](mqtt.md#event) has what all events share. The
log has the same events as lines with `event=KIND`.

*Kept first*: the board writes the event to the disk at once, and drops it last when the outbox is full."""
_BACK = """\
An error that the daemon survives is an event `error` with the name of the part in `part`. Once the part works again,
that name is the kind of an event."""


def events_page() -> str:
    """Return the page."""
    kinds = [kind for kind in EVENTS if kind not in PARTS]
    rows = [
        (f"[{code(kind)}](#{kind})", "yes" if EVENTS[kind].is_alarm else "", prose(EVENTS[kind].sent)) for kind in kinds
    ]
    rows.append((f"[{', '.join(map(code, PARTS))}](#back)", "", "A part of the daemon works again after an error."))
    parts = [table(("Kind", "Kept first", "Sent when"), rows)]
    for kind in kinds:
        parts += [heading(2, kind), paragraph(prose(EVENTS[kind].sent)), *_fields_and_example(kind)]
    parts += [heading(2, "back", "A part works again"), paragraph(_BACK)]
    parts.append(table(("Kind", "Sent when"), [(anchored(part), prose(EVENTS[part].sent)) for part in PARTS]))
    parts += _fields_and_example("results")  # which has all fields that any of them has
    return page("Events", _INTRODUCTION, parts)


def _fields_and_example(kind: EventKind) -> tuple[str, str]:
    fields = [(code(name), _linked(text)) for name, text in EVENTS[kind].fields.items()]
    return table(("Field", "Meaning"), fields), fenced(event_example(kind, _detail(kind)), "json")


def _linked(text: str) -> str:
    """Return a meaning as Markdown; a link in it stays one."""
    before, bracket, rest = text.partition("[")
    return prose(before) + bracket + rest if bracket else prose(text)


def _detail(kind: EventKind) -> Mapping[str, JsonValue]:
    """Return the detail of an example. Raises ValueError if it has a field that the kind has not."""
    detail = DETAILS[kind]
    if unknown := detail.keys() - EVENTS[kind].fields.keys():
        raise ValueError(f"the example of {kind} has the fields {sorted(unknown)}")
    return detail
