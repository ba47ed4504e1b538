"""The reference pages are those of this code, and what they list is what the code has."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from typing import get_args

import pytest
from places import ROOT
from pydantic import BaseModel

from agent.config import FIRST_KEYS, Config
from agent.contract.commands import OPS
from agent.contract.events import EVENTS, Part
from agent.contract.messages import Document
from agent.core.causes import REFUSED
from agent.vision.spec import ModelSpec
from docs.tools.reference.docstrings import summary
from docs.tools.reference.errors import UnresolvedCodeError, errors
from docs.tools.reference.markdown import anchor, prose
from docs.tools.reference.metrics import metrics
from docs.tools.reference.mqtt import fields_without_meaning, handler_of, topics
from docs.tools.reference.pages import pages
from docs.tools.reference.source import Module, source
from docs.tools.reference.texts import Texts

PAGES = pages()


@pytest.mark.parametrize("path", PAGES)
def test_the_page_is_that_of_this_code(path: str) -> None:
    assert (ROOT / path).read_text(encoding="utf-8") == PAGES[path], "run 'make generated'"


@pytest.mark.parametrize("path", PAGES)
def test_a_link_between_the_pages_leads_to_an_anchor(path: str) -> None:
    anchors = {page: set(re.findall(r'<a id="([^"]+)">', text)) for page, text in PAGES.items()}
    assert sum(map(len, anchors.values())) == sum(text.count('<a id="') for text in PAGES.values())  # each once
    links = re.findall(r"\]\(([\w-]*)(?:\.md)?#([^)]+)\)", PAGES[path])
    assert [
        (page, place) for page, place in links if place not in anchors[f"docs/reference/{page}.md" if page else path]
    ] == []


# ---- configuration


@pytest.mark.parametrize(("page", "schema"), [("configuration", Config), ("model-spec", ModelSpec)])
def test_every_key_has_a_place_and_a_meaning(page: str, schema: type[BaseModel]) -> None:
    text = PAGES[f"docs/reference/{page}.md"]
    rows = [line for line in text.splitlines() if line.startswith('| <a id="')]
    assert len(rows) >= len(schema.model_fields)
    assert [row for row in rows if row.endswith("|  |")] == []
    for name in schema.model_fields:
        assert f'<a id="{anchor(name)}"></a>' in text


def keys_of(schema: type[BaseModel], above: str = "") -> Iterator[str]:
    """The keys of config.yaml that hold a value, with dots."""
    for name, field in schema.model_fields.items():
        kinds = (field.annotation, *(() if name == "cameras" else get_args(field.annotation)))
        sections = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        if sections and name != "model":
            yield from keys_of(sections[0], f"{above}{name}.")
        else:
            yield above + name


def test_the_page_of_keys_begins_with_those_that_people_set() -> None:
    (first, *_) = re.findall(
        r"(?ms)^## [^\n]*The keys that people set\n(.*?)^## ", PAGES["docs/reference/configuration.md"]
    )
    assert tuple(re.findall(r"(?m)^\| (?:<a id=\S+></a>)?`([\w.]+)`", first)) == FIRST_KEYS


def test_every_key_stands_in_a_guide() -> None:
    """By its whole name, or by its own name on a page that names its section."""
    folders = ("start", "guides", "concepts", "fleet")
    guides = [path.read_text(encoding="utf-8") for name in folders for path in (ROOT / "docs" / name).glob("*.md")]

    def is_there(key: str) -> bool:
        section, _, name = key.rpartition(".")
        alone = re.compile(rf"(?<![\w.]){name}(?:: |`)")
        nearest = section.rpartition(".")[2]
        return any((section and key in text) or (nearest in text and alone.search(text)) for text in guides)

    keys = list(keys_of(Config))
    assert len(keys) > 110
    assert [key for key in keys if not is_there(key)] == []


# ---- errors


def test_every_code_has_one_anchor_and_no_text_is_empty() -> None:
    assert len(errors()) > 500
    assert [each for each in errors() if not (each.found and each.expected and each.remedy)] == []
    codes = {each.code for each in errors()}
    assert len({anchor(code) for code in codes}) == len(codes) > 300
    assert {each for each in codes if not re.fullmatch(r"[a-z-]+\.[a-z0-9_-]+", each)} == set()


def test_every_text_that_a_program_may_compare_with_is_a_code() -> None:
    """A comparison with a code that nothing raises would never hold."""
    known = {each.code for each in errors()}
    compared = {
        node.value
        for module in source().modules.values()
        for compare in module.parents
        if isinstance(compare, ast.Compare)
        and any(ast.unparse(side).endswith(".code") for side in (compare.left, *compare.comparators))
        for node in ast.walk(compare)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert len(compared) > 5
    assert set(REFUSED) <= known
    assert {each for each in compared if not any(code.endswith(each) for code in known)} == set()


def test_a_code_that_cannot_be_found_out_stops_the_writer() -> None:
    module = Module("agent/new.py", ast.parse("def fail(code):\n    raise AgentError(code, 'a', 'b', 'c')"))
    for node in ast.walk(module.tree):
        module.parents.update(dict.fromkeys(ast.iter_child_nodes(node), node))
    (call,) = (node for node in ast.walk(module.tree) if isinstance(node, ast.Call))
    (text,) = Texts(source(), follows_parts=True).of(module, call.args[0])
    assert not text.is_whole
    assert issubclass(UnresolvedCodeError, Exception)


# ---- events

_REPORTERS = ("self", "self.reporter", "self._reporter")


def reported() -> dict[str, set[str]]:
    """The kinds that the code reports, by the first argument of `.event(...)`, and the keywords it gives them."""
    texts, found = Texts(source()), dict[str, set[str]]()
    for module, call in source().calls["event"]:
        if not isinstance(call.func, ast.Attribute) or ast.unparse(call.func.value) not in _REPORTERS:
            continue
        for kind in texts.of(module, call.args[0]):
            assert kind.is_whole, f"{module.path}:{call.lineno}"
            found.setdefault(kind.text, set()).update(each.arg for each in call.keywords if each.arg)
    return found


def test_the_kinds_of_events_are_those_that_the_code_reports() -> None:
    assert reported().keys() == EVENTS.keys()


def test_the_fields_of_an_event_are_on_the_page() -> None:
    known = {str(kind): facts.fields.keys() for kind, facts in EVENTS.items()}
    unknown = {kind: fields - known[kind] for kind, fields in reported().items()}
    assert {kind: fields for kind, fields in unknown.items() if fields} == {}


def test_every_part_that_may_fail_has_an_event_for_its_return() -> None:
    parts = {
        argument.value
        for module, call in source().calls["_on_part"]
        for argument in call.args[:1]
        if isinstance(argument, ast.Constant)
    }
    assert parts == set(get_args(Part))


# ---- MQTT


def test_every_field_of_a_document_has_a_meaning() -> None:
    assert fields_without_meaning() == []


def test_every_document_that_is_sent_is_on_the_page() -> None:
    text = PAGES["docs/reference/mqtt.md"]

    def derived(owner: type[BaseModel]) -> list[type[BaseModel]]:
        return [each for child in owner.__subclasses__() for each in (child, *derived(child))]

    names = {each.__name__ for each in derived(Document) if each.__module__.startswith("agent.contract")}
    assert len(names) > 15
    assert {name for name in names if f'<a id="{anchor(name)}"></a>' not in text} == set()
    assert {each.path for each in topics() if f'<a id="{anchor(f"topic {each.path}")}"></a>' not in text} == set()


@pytest.mark.parametrize("op", OPS)
def test_the_results_of_a_command_are_described(op: str) -> None:
    keys = {
        str(key.value)
        for answer in ast.walk(handler_of(op))
        if isinstance(answer, ast.Return) and isinstance(answer.value, ast.Dict)
        for key in answer.value.keys
        if isinstance(key, ast.Constant)
    }
    described = " ".join(summary(OPS[op].args))
    assert {key for key in keys if f"`{key}`" not in described} == set()


def test_the_guide_describes_every_command() -> None:
    guide = (ROOT / "docs" / "guides" / "commands.md").read_text(encoding="utf-8")
    assert {op for op in OPS if f"\n| `{op}`" not in guide} == set()


def test_every_example_is_json() -> None:
    blocks = [block for text in PAGES.values() for block in re.findall(r"```json\n(.*?)```", text, re.DOTALL)]
    assert len(blocks) > len(EVENTS) + len(OPS)
    for block in blocks:
        json.loads(block)


# ---- metrics


def test_every_metric_that_a_rule_or_the_dashboard_reads_is_on_the_page() -> None:
    known = {each.name for each in metrics()}
    histograms = (each.name for each in metrics() if each.kind == "histogram")
    known |= {f"{name}{end}" for name in histograms for end in ("_bucket", "_sum", "_count")}
    for path in ("docs/prometheus/tared.rules.yml", "docs/grafana/tared.json"):
        text = (ROOT / path).read_text(encoding="utf-8")
        named = set(re.findall(r"\b(tared_[a-z_]+)\b(?=[\[{ ()])", text))
        assert len(named) > 5
        assert named - known == set(), path


# ---- Markdown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("above camera.max_pixels, e.g. 4K", "above `camera.max_pixels`, e.g. 4K"),
        ("a | b * <c> [d] {e}", "a \\| b \\* &lt;c> \\[d\\] \\{e\\}"),
        ("as `a|b` and max_loss", "as `a\\|b` and `max_loss`"),
    ],
)
def test_a_text_is_shown_as_it_is_meant(text: str, shown: str) -> None:
    assert prose(text) == shown
