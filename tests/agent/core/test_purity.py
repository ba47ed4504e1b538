"""The core is values: its modules reach for no clock, thread, disk or network."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import agent.core

MODULES = sorted(Path(agent.core.__file__).parent.glob("*.py"))
OUTSIDE = {"threading", "time", "os", "sqlite3", "socket", "subprocess", "queue", "logging", "pathlib", "random", "uuid",
           "shutil", "signal", "asyncio"}  # fmt: skip


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
    clocks = {"from datetime import time"} if module.stem == "due" else set()  # a time of day, not a clock
    assert imported & OUTSIDE - clocks == set()
