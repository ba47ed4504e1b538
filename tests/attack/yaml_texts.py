"""Malicious YAML: bombs, tags, deep nesting; configurations and specs with anything in the place of a value."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random

import yaml
from places import ROOT

from agent.common.bounded_yaml import YamlError, load_yaml
from agent.config import check_config
from agent.vision.spec import load_model_spec
from attack.case import Case, Outcome, damaged, drawn
from attack.spoilt import spoilt

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 8)}]\n" for n in range(1, 12)
)
REFUSED = (
    ("a: !!binary aGk=", "line 1, column 4: a tag '!!binary'"),
    ("a: !!python/object:os.x {}", "line 1, column 4: a tag"),
    ("a: !secret x", "line 1, column 4: a tag '!secret'"),
    ("a: 1\nb: 2\na: 3", "line 3, column 1: the key 'a' a second time"),
    ("? [1]\n: 2", "line 1, column 3: a key that is not a word"),
    ("a: &a [*a]", "line 1, column 4: an alias to a value that contains it"),
    ("a: *b", "line 1, column 4: found undefined alias"),
    ("a: [1, 2", "line 1, column 9: expected"),
    ("a: " + "[" * 40 + "]" * 40, "more than 32 values inside each other"),
    ("a: " + "[" * 100_000, "more than 32 values inside each other"),
    (BOMB, "more than 10000 values, with every alias written out"),
    ("a: " + "9" * 100_000, "digits"),
    ("a: \x01", "special characters"),
    ("a: 1\n---\nb: 2", "line 2, column 1: but found another document"),
)
_PIECES = (
    *("&a ", "*a", "<<: *a\n", "!!set ", "? ", "- " * 200, "{" * 50, "[" * 50, "|\n", "'", '"', "%YAML 9\n", "---\n"),
    *(
        "\t",
        "\x00",
        "\ufeff",
        "\u2028",
        "\x1b",
        ": " * 100,
        "0x" + "f" * 5000,
        "1e" + "9" * 400,
        "2026-99-99",
        "@",
        "`",
    ),
)


# In the place of what config.yaml has as an example, and no folder here holds.
_ALONE = {"model": {"path": "model.onnx", "task": "raw"}, "camera": {"source": "v4l2:/dev/video0"}, "plan": None}


def _configuration(text: str, path: Path) -> Outcome:
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    check_config(path)
    return None


def _spec(text: str, path: Path) -> Outcome:
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    load_model_spec(path)
    return None


def _text(text: str) -> Outcome:
    try:
        load_yaml(text)
    except YamlError:
        return "refused cleanly"
    return None


def cases(rng: Random, folder: Path) -> Iterator[Case]:
    """Loose texts, config.yaml and a spec, each spoilt."""
    path = folder / "config.yaml"
    for name in ("model.onnx", "street.onnx"):
        (folder / name).write_bytes(b"a file")
    example = yaml.safe_dump({**yaml.safe_load((ROOT / "config.yaml").read_text(encoding="utf-8")), **_ALONE})
    street = (ROOT / "examples/street/model.yaml").read_text(encoding="utf-8")
    for text, _ in rng.sample(REFUSED, 3):
        yield Case("of the list of refusals", partial(_text, text))
    for name, whole, attempt in (("config.yaml", example, _configuration), ("a spec", street, _spec)):
        at = rng.randrange(len(whole))
        yield Case(f"{name}, a piece put in", partial(attempt, whole[:at] + rng.choice(_PIECES) + whole[at:], path))
        fault, content = damaged(rng, whole.encode())
        yield Case(f"{name}, {fault}", partial(attempt, content.decode("utf-8", "replace"), path))
        for document in drawn(spoilt(yaml.safe_load(whole)), rng, 8):
            yield Case(f"{name}, anything for a value", partial(attempt, json.dumps(document), path))
