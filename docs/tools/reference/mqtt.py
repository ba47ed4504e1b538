"""The page of the MQTT contract: topics, documents with their fields, commands with arguments and results."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from itertools import chain

from pydantic import BaseModel

from agent.contract.board_status import BoardStatus, CameraStatus, DriftStatus, JobStatus, PreviewStatus
from agent.contract.commands import (
    OPS,
    Command,
    CommandResult,
    Desired,
    Failure,
    LabelledBox,
    Labels,
    Op,
    Release,
    Reported,
    RunLengths,
)
from agent.contract.histograms import ChunkHead, Facts
from agent.contract.messages import (
    Accuracy,
    Ack,
    Birth,
    Bounds,
    CameraTelemetry,
    Dropped,
    Event,
    FidelityReport,
    LabelledAccuracy,
    Latency,
    Observing,
    Status,
    Telemetry,
)
from agent.contract.topics import Topic, Topics
from docs.tools.reference.docstrings import arguments, summary
from docs.tools.reference.errors import errors
from docs.tools.reference.examples import DOCUMENTS, command_example
from docs.tools.reference.markdown import anchor, anchored, code, fenced, heading, page, paragraph, prose, table
from docs.tools.reference.schemas import bounds, kind
from docs.tools.reference.source import called, source

_INTRODUCTION = """\
The topics, documents and commands by which boards and the fleet communicate. Every document is a JSON object in UTF-8
of at most 64 KiB. Fields that have no value are left out. A reader ignores fields that it does not know. An unknown
argument of a command is refused. Times are Unix time in seconds unless a field says otherwise.

The examples are written and read back by tared's own code."""
_COMMANDS = """\
A command is a document [Command](#command) on the topic `cmd`. The board answers on `cmd/{id}/result`: ACCEPTED,
IN_PROGRESS with `step` and `percent`, then SUCCEEDED or FAILED; or REJECTED or EXPIRED. It carries out a command once,
however often the same `id` comes. [How a command is signed](../guides/commands.md)."""
_SHOWN: dict[str, tuple[type[BaseModel], ...]] = {
    "From the board": (
        Status,
        Birth,
        Telemetry,
        CameraTelemetry,
        Latency,
        FidelityReport,
        Accuracy,
        Observing,
        LabelledAccuracy,
        Bounds,
        Event,
        Dropped,
        Reported,
        CommandResult,
        Failure,
        BoardStatus,
        CameraStatus,
        DriftStatus,
        JobStatus,
        PreviewStatus,
    ),
    "To the board": (Command, Desired, Release, Labels, LabelledBox, RunLengths, Ack),
    "Histograms": (ChunkHead, Facts),
}
_TOPIC_OF = {
    Status: Topics.status,
    Birth: Topics.birth,
    Telemetry: Topics.telemetry,
    Event: Topics.event,
    Dropped: Topics.event,
    Reported: Topics.reported,
    CommandResult: Topics.command_result,
    Command: Topics.command,
    Desired: Topics.desired,
    Labels: Topics.labels,
    Ack: Topics.ack,
    ChunkHead: Topics.histogram_chunks,
}
_HANDLERS = "agent.daemon.handlers"  # the module with a method for each op
_CARRIED_OUT_IN = (_HANDLERS, "agent.control.executor", "agent.core.orders", "agent.contract.commands")


def mqtt_page() -> str:
    """Return the page."""
    parts = [heading(2, "topics", "Topics"), paragraph("Every topic begins with `tared/v1/{fleet}/{device}/`.")]
    parts.append(table(("Topic", "Direction", "QoS", "Retained", "Content", "Document"), _topics()))
    links = {
        each.__name__: f"[{each.__name__}](#{anchor(each.__name__)})" for group in _SHOWN.values() for each in group
    }
    links["JsonValue"] = "any JSON value"
    for title, documents in _SHOWN.items():
        parts.append(heading(2, f"documents {title}", f"Documents: {title[:1].lower()}{title[1:]}"))
        for each in documents:
            parts += _document(each, links)
    parts += [heading(2, "commands", "Commands"), _COMMANDS, _admission()]
    parts.append(table(("Op", "Meaning"), [(f"[{code(op)}](#op-{anchor(op)})", _meaning(op)) for op in OPS]))
    for op in OPS:
        parts += _command(op, links)
    return page("MQTT", _INTRODUCTION, parts)


def topics() -> list[Topic]:
    """Return every topic of a device."""
    return [each for each in vars(Topics).values() if isinstance(each, Topic)]


def _topics() -> Iterator[tuple[str, ...]]:
    for each in topics():
        names = [name.__name__ for name, topic in _TOPIC_OF.items() if topic is each]
        documents = ", ".join(f"[{name}](#{anchor(name)})" for name in names)
        yield (
            anchored(each.path, f"topic {each.path}"),
            "from the board" if each.from_board else "to the board",
            str(each.qos),
            "yes" if each.retain else "no",
            prose(each.holds),
            documents,
        )


def _document(document: type[BaseModel], links: dict[str, str]) -> Iterator[str]:
    yield heading(3, document.__name__)
    yield from (paragraph(prose(each)) for each in summary(document))
    if document is Event:
        yield "[The kinds of events](events.md) with their fields."
    yield _fields(document, links)
    if document in DOCUMENTS:
        yield fenced(DOCUMENTS[document](), "json")


def _fields(model: type[BaseModel], links: dict[str, str]) -> str:
    schema, meaning = model.model_json_schema(by_alias=True), arguments(model)
    required, rows = schema.get("required", []), []
    for name, field in model.model_fields.items():
        shown = field.alias or name
        node = schema["properties"][shown]
        text = meaning.get(name) or meaning.get(shown) or ""
        presence = "always" if shown in required or node.get("default") not in (None, [], {}) else ""
        rows.append((code(shown), kind(node, links), bounds(node), presence, prose(text[:1].upper() + text[1:])))
    return table(("Field", "Type", "Range", "Present", "Meaning"), rows)


def _meaning(op: str) -> str:
    text = summary(OPS[op].args)[0].partition(": ")[2]
    return prose(text[:1].upper() + text[1:])


def _command(op: str, links: dict[str, str]) -> Iterator[str]:
    arguments_type = OPS[op].args
    yield heading(3, f"op {op}", op)
    more = summary(arguments_type)[1:]
    yield paragraph(_meaning(op))
    yield from (paragraph(prose(each)) for each in more)
    if (result := OPS[op].result) is not None:
        yield f"Result: a document {links[result.__name__]}."
    if arguments_type.model_fields:
        rows = _argument_rows(arguments_type, links)
        yield table(("Argument", "Type", "Range", "Default", "Meaning"), rows)
    else:
        yield "It has no arguments."
    if declared := " ".join(_declared(OPS[op])):
        yield paragraph(prose(declared))
    codes = _codes(op)
    if codes:
        yield f"Errors: {', '.join(f'[{code(each)}](errors.md#{anchor(each)})' for each in codes)}."
    yield fenced(command_example(op), "json")


def _argument_rows(model: type[BaseModel], links: dict[str, str]) -> Iterator[tuple[str, ...]]:
    schema, meaning = model.model_json_schema(), arguments(model)
    for name in model.model_fields:
        node = schema["properties"][name]
        default = (
            "required"
            if name in schema.get("required", ())
            else code(str(node.get("default")).replace("None", "null").replace("False", "false"))
        )
        text = meaning.get(name, "")
        yield code(name), kind(node, links), bounds(node), default, prose(text[:1].upper() + text[1:])


def _admission() -> str:
    """Return the codes by which any command may be refused before it is carried out."""
    paths = (
        "agent/commands/dispatcher.py",
        "agent/commands/authority.py",
        "agent/commands/log.py",
        "agent/contract/wire.py",
    )
    refused = {each.code for each in errors() if each.path in paths} - {
        "command.release",
        "command.rollback",
        "command.privacy",
    }
    links = ", ".join(
        f"[{code(each)}](errors.md#{anchor(each)})" for each in sorted(refused) if not each.startswith("commands")
    )
    return f"Any command may be refused with one of these codes: {links}."


def _declared(op: Op) -> Iterator[str]:
    """Yield what the table of commands says of an op, in sentences."""
    if not op.changes:
        yield "It changes nothing, and may be carried out twice."
    if op.versioned:
        yield "Its version has to exceed the one before."
    if op.permission:
        yield f"The board's owner permits it by the key `{op.permission}` of config.yaml."
    if "release" in op.args.model_fields:
        yield "A board with keys also requires a release, signed by a release key."
    if op.rollout:
        yield f"A rollout sends it as `{op.rollout}`."
    if op.button is not None:
        yield "It has a button on the board's page."


def _codes(op: str) -> list[str]:
    """Return the codes of the errors that the handler of an op names, in its docstring too, or that it calls.

    An event that it hands to the core counts as a call of the core's function of that name.
    """
    known = {each.code for each in errors()}
    found = {"command.privacy"} if OPS[op].permission else set()
    functions = defaultdict[str, list[ast.AST]](list)
    for module in _CARRIED_OUT_IN:
        for function in ast.walk(source().modules[module].tree):
            if isinstance(function, ast.FunctionDef):
                functions[function.name].append(function)
    waiting = [op]
    while waiting:
        for node in chain.from_iterable(map(ast.walk, functions.pop(waiting.pop(), []))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= known & {node.value, *re.findall(r"`([a-z_.]+)`", node.value)}
            elif isinstance(node, ast.Call):
                waiting += [called(node), re.sub(r"(?<!^)(?=[A-Z])", "_", called(node)).lower()]
    return sorted(found)


def handler_of(op: str) -> ast.FunctionDef:
    """Return the method that carries out an op."""
    nodes = ast.walk(source().modules[_HANDLERS].tree)
    return next(each for each in nodes if isinstance(each, ast.FunctionDef) and each.name == op)


def fields_without_meaning() -> list[str]:
    """Return the fields and arguments that no docstring describes."""
    models = [*(each for group in _SHOWN.values() for each in group), *(each.args for each in OPS.values())]
    return [
        f"{model.__name__}.{name}"
        for model in models
        for name, field in model.model_fields.items()
        if not (arguments(model).get(name) or arguments(model).get(field.alias or name))
    ]
