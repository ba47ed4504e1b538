"""The page of errors: every code, with what is found, what is expected and the remedy, from the syntax trees."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from docs.tools.reference.markdown import anchored, code, heading, page, prose, table
from docs.tools.reference.source import Module, source
from docs.tools.reference.texts import HOLE, Texts, combined

_PARTS = ("code", "found", "expected", "remedy")
_HEADS = ("Found", "Expected", "Remedy", "Raised in")
_INTRODUCTION = """\
Every error has a code, which does not change while its wording improves. A command prints an error as one line on
stderr, `error: CODE: FOUND; expected EXPECTED; REMEDY`, and ends with exit code 2. With `--json` stdout has an object
`{"error": {"code", "found", "expected", "remedy"}}`. A daemon that goes on reports the error as an event
[`error`](events.md#error).

The part of a code before the dot names its group below. A word in braces stands for a value that is known only at run
time, such as a path or a number. One code may have several rows: one for each place in the code that raises it."""


@dataclass(frozen=True)
class ErrorText:
    """One error as one place in the source raises it; its texts have holes. `path`: of the module."""

    code: str
    found: str
    expected: str
    remedy: str
    path: str


class UnresolvedCodeError(Exception):
    """A code that the syntax tree does not show."""


_HELD_BACK = """\
A job that is due may have to wait. `status`, telemetry (`held_back`, `held_back_code`) and the metric
`tared_job_held_back_info` then have one of these codes, or the code of an error."""


def errors_page() -> str:
    """Return the page of all errors."""
    groups: dict[str, list[ErrorText]] = defaultdict(list)
    for each in errors():
        groups[each.code.partition(".")[0]].append(each)
    parts = []
    for group, members in sorted(groups.items()):
        parts += [heading(2, f"group {group}", group), table(("Code", *_HEADS), _rows(members))]
    parts += [heading(2, "held-back", "Reasons that hold a job back"), _HELD_BACK]
    codes = [each.code for each in hindrances()]
    rows = []
    for at, each in enumerate(hindrances()):
        name = anchored(each.code, f"held {each.code}") if codes.index(each.code) == at else code(each.code)
        rows.append((name, _shown(each.found), _shown(each.remedy)))
    return page("Error codes", _INTRODUCTION, [*parts, table(("Code", "Found", "Remedy"), rows)])


def _rows(members: list[ErrorText]) -> Iterator[tuple[str, ...]]:
    before, shown = "", set[tuple[str, ...]]()
    for each in members:
        texts = (each.code, *(HOLE.sub("", text) for text in (each.found, each.expected, each.remedy)), each.path)
        if texts in shown:  # the same words with a value of another name
            continue
        shown.add(texts)
        name = anchored(each.code) if each.code != before else code(each.code)
        before = each.code
        yield name, _shown(each.found), _shown(each.expected), _shown(each.remedy), code(each.path)


def _shown(text: str) -> str:
    """Return a text as Markdown in one line, its holes as code in braces."""
    parts = HOLE.split(" ".join(text.split()))
    shown = "".join(f"\0{{{part}}}\0" if number % 2 else prose(part) for number, part in enumerate(parts))
    return shown.replace("\0\0", "").replace("\0", "`")


@cache
def errors() -> tuple[ErrorText, ...]:
    """Return every error of the code. Raises UnresolvedCodeError for a code that cannot be found out."""
    known = source()
    found: dict[ErrorText, None] = {}
    coded, worded = Texts(known, follows_parts=True), Texts(known)
    unresolved: list[str] = []
    classes = _error_classes()
    for name in (*classes, "error_type", "_error_type", "super().__init__"):
        for module, call in known.calls.get(name.rpartition(".")[2], ()):
            if name == "super().__init__" and not _is_of_error(module, call, classes):
                continue
            if len(call.args) + len(call.keywords) != len(_PARTS) or _is_repeated(call):
                continue  # an error class of other arguments calls super().__init__, which is looked at, too
            try:
                found.update(dict.fromkeys(_read(module, call, coded, worded)))
            except UnresolvedCodeError as error:
                unresolved.append(str(error))
    if unresolved:
        raise UnresolvedCodeError("\n".join(unresolved))
    return tuple(sorted(found, key=lambda each: (each.code, each.path, each.found)))


def _read(module: Module, call: ast.Call, coded: Texts, worded: Texts) -> Iterator[ErrorText]:
    named = {each.arg: each.value for each in call.keywords}
    values = [call.args[at] if at < len(call.args) else named[part] for at, part in enumerate(_PARTS)]
    code = coded.of(module, values[0])
    rest = [worded.of(module, value) for value in values[1:]]
    for each in code:
        if not each.is_whole:
            raise UnresolvedCodeError(f"{module.path}:{call.lineno}: {ast.unparse(values[0])}")
    for (word, found, expected, remedy), _ in combined([code, *rest]):
        yield ErrorText(word, found, expected, remedy, module.path)


def _is_repeated(call: ast.Call) -> bool:
    """Return whether the call passes on another error under its own code."""
    code = call.args[0] if call.args else None
    return isinstance(code, ast.Attribute) and code.attr == "code" and not _is_self(code.value)


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _is_of_error(module: Module, call: ast.Call, classes: tuple[str, ...]) -> bool:
    owner = module.class_of(call)
    return owner is not None and owner.name in classes and "super" in ast.dump(call.func)


@cache
def hindrances() -> tuple[ErrorText, ...]:
    """Return every reason that holds a job back; nothing is expected of them."""
    coded, worded = Texts(source(), follows_parts=True), Texts(source())
    found: dict[ErrorText, None] = {}
    for module, call in source().calls["Hindrance"]:
        texts = [coded.of(module, call.args[0]), *(worded.of(module, each) for each in call.args[1:])]
        for (word, reason, remedy), _ in combined(texts):
            if not HOLE.fullmatch(word):  # else it is the code of an error, which stands above
                named = HOLE.sub(lambda part: f"{{{part[1]}}}", word)
                found[ErrorText(named, reason, "", remedy, module.path)] = None
    return tuple(sorted(found, key=lambda each: (each.code, each.found)))


@cache
def _error_classes() -> tuple[str, ...]:
    """Return the names of TaredError and of all that are derived from it."""
    names = ["TaredError"]
    while True:
        derived = [
            node.name
            for module in source().modules.values()
            for node in module.defined.values()
            if isinstance(node, ast.ClassDef)
            and node.name not in names
            and any(isinstance(base, ast.Name) and base.id in names for base in node.bases)
        ]
        if not derived:
            return tuple(names)
        names += derived
