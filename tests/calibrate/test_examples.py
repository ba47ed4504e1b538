"""Run the examples in the docstrings of calibrate."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import calibrate

MODULES = sorted(module.name for module in pkgutil.iter_modules(calibrate.__path__) if module.name != "_count")
WITH_EXAMPLES = {"confusion", "evidence", "histogram", "loss_bound", "noise", "partition", "threshold"}


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_are_true(name: str) -> None:
    results = doctest.testmod(importlib.import_module(f"calibrate.{name}"))
    assert results.failed == 0
    assert results.attempted > 0 or name not in WITH_EXAMPLES
