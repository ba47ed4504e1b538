"""Run the examples in the docstrings of calibrate."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import calibrate

MODULES = sorted(
    module.name.removeprefix("calibrate.")
    for module in pkgutil.walk_packages(calibrate.__path__, "calibrate.")
    if not module.name.endswith("._count")
)
WITH_EXAMPLES = {
    *("histogram", "noise", "partition", "threshold", "statistics.confusion", "statistics.evidence"),
    *("statistics.fidelity_gain", "statistics.loss_bound", "statistics.sampling"),
}


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_are_true(name: str) -> None:
    results = doctest.testmod(importlib.import_module(f"calibrate.{name}"))
    assert results.failed == 0
    assert results.attempted > 0 or name not in WITH_EXAMPLES
