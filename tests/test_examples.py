"""Run the examples in docstrings, and require one of every public function and class of calibrate."""

from __future__ import annotations

import ast
import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("agent", "calibrate", "engines", "fleet", "docs/tools")
SOURCES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
    if path.stem not in ("__init__", "__main__")
}
WITH_EXAMPLES = sorted(name for name, path in SOURCES.items() if "\n    >>> " in path.read_text(encoding="utf-8"))
CALIBRATE = sorted(name for name in SOURCES if name.startswith("calibrate."))


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_the_examples_of_a_module_are_true(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0


@pytest.mark.parametrize("name", CALIBRATE)
def test_every_public_function_and_class_of_calibrate_has_an_example(name: str) -> None:
    definitions = ast.parse(SOURCES[name].read_text(encoding="utf-8")).body
    lacking = [
        each.name
        for each in definitions
        if isinstance(each, (ast.FunctionDef, ast.ClassDef))
        and not each.name.startswith("_")
        and ">>> " not in (ast.get_docstring(each) or "")
    ]
    assert not lacking
