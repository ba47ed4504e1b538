"""The page of events: every kind with the time it is sent, its fields and an example."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import JsonValue

from agent.contract.events import EVENTS, EventKind
from docs.tools.reference.event_details import DETAILS
from docs.tools.reference.examples import event_example
from docs.tools.reference.markdown import code, fenced, heading, page, paragraph, prose, table

_INTRODUCTION = """\
An event is a document on the topic `event`: `epoch`, `seq`, `ts` (Unix time in seconds) and `kind`, and beside them the
fields of its kind. Fields that have no value are null or absent. [MQTT](mqtt.md#event) has what all events share. The
log has the same events as lines with `event=KIND`.

*Kept first*: the board writes the event to the disk at once, and drops it last when the outbox is full."""


def events_page() -> str:
    """Return the page."""
    rows = [
        (f"[{code(kind)}](#{kind})", "yes" if facts.is_alarm else "", prose(facts.sent))
        for kind, facts in EVENTS.items()
    ]
    parts = [table(("Kind", "Kept first", "Sent when"), rows)]
    for kind, facts in EVENTS.items():
        parts += [heading(2, kind), paragraph(prose(facts.sent))]
        parts.append(table(("Field", "Meaning"), [(code(name), _linked(text)) for name, text in facts.fields.items()]))
        parts.append(fenced(event_example(kind, _detail(kind)), "json"))
    return page("Events", _INTRODUCTION, parts)


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
