"""The core is values: its modules reach for no clock, thread, disk or network."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import agent.core

MODULES = sorted(Path(agent.core.__file__).parent.glob("*.py"))
OUTSIDE = {
    "asyncio", "logging", "os", "pathlib", "queue", "random", "shutil", "signal", "socket", "sqlite3", "subprocess",
    "threading", "time", "uuid",
}  # fmt: skip


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.stem)
def test_a_decision_reaches_for_nothing_outside(module: Path) -> None:
    tree = ast.parse(module.read_text())
    imported = {
        name.split(".")[0]
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert imported & OUTSIDE == set()
