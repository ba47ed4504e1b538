"""Read the modules of the four packages as syntax trees: names, calls, and what stands around a node."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TypeAlias

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("calibrate", "engines", "agent", "fleet")

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


@dataclass(eq=False)
class Module:
    """One module.

    Args:
        path: Relative to the repository, with slashes.
        parents: The node around each node.
        imported: By local name, the module and the name there.
        assigned: Values of the names that are assigned at the top.
        defined: Functions and classes at the top.
    """

    path: str
    tree: ast.Module
    parents: dict[ast.AST, ast.AST] = field(default_factory=dict)
    imported: dict[str, tuple[str, str]] = field(default_factory=dict)
    assigned: dict[str, ast.expr] = field(default_factory=dict)
    defined: dict[str, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    def around(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield what encloses a node, from the inside out."""
        while node in self.parents:
            node = self.parents[node]
            yield node

    def function(self, node: ast.AST) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
        """Return the function that encloses a node; None at the top of a module or class."""
        return next(
            (each for each in self.around(node) if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)), None
        )

    def class_of(self, node: ast.AST) -> ast.ClassDef | None:
        """Return the class that encloses a node."""
        return next((each for each in self.around(node) if isinstance(each, ast.ClassDef)), None)


@dataclass(eq=False)
class Source:
    """All modules, by dotted name.

    Args:
        calls: By the last part of the called name, each call and its module.
        class_constants: By name, the values that classes assign to a ClassVar.
    """

    modules: dict[str, Module]
    calls: dict[str, list[tuple[Module, ast.Call]]]
    class_constants: dict[str, list[tuple[Module, ast.expr]]]

    def value_of(self, module: Module, name: str) -> tuple[Module, ast.expr] | None:
        """Return what a module assigns to a name at its top, there or where it is imported from."""
        if name in module.assigned:
            return module, module.assigned[name]
        origin = module.imported.get(name)
        if origin is None or origin[0] not in self.modules:
            return None
        return self.value_of(self.modules[origin[0]], origin[1])

    def definition(self, module: Module, name: str) -> tuple[Module, ast.AST] | None:
        """Return a function or class by the name that a module has for it."""
        if name in module.defined:
            return module, module.defined[name]
        origin = module.imported.get(name)
        if origin is None or origin[0] not in self.modules:
            return None
        return self.definition(self.modules[origin[0]], origin[1])


@cache
def source() -> Source:
    """Return the modules of all packages."""
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    modules = {each.name: each for each in map(_module, paths)}
    calls: dict[str, list[tuple[Module, ast.Call]]] = defaultdict(list)
    constants: dict[str, list[tuple[Module, ast.expr]]] = defaultdict(list)
    for module in modules.values():
        for node in module.parents:
            if isinstance(node, ast.Call):
                calls[called(node)].append((module, node))
            elif isinstance(node, ast.AnnAssign) and node.value is not None and "ClassVar" in ast.dump(node.annotation):
                constants[ast.unparse(node.target)].append((module, node.value))
    return Source(modules, dict(calls), dict(constants))


def called(call: ast.Call) -> str:
    """Return the last part of the called name; of another expression nothing."""
    if isinstance(call.func, ast.Name):
        return call.func.id
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


def _module(path: Path) -> Module:
    module = Module(path.relative_to(ROOT).as_posix(), ast.parse(path.read_text(encoding="utf-8")))
    waiting: list[ast.AST] = [module.tree]
    while waiting:
        node = waiting.pop()
        children = [
            each for each in ast.iter_child_nodes(node) if not isinstance(each, ast.expr_context | ast.operator)
        ]
        module.parents.update(dict.fromkeys(children, node))
        waiting += children
        if isinstance(node, ast.ImportFrom) and node.module:
            module.imported.update({each.asname or each.name: (node.module, each.name) for each in node.names})
    for node in module.tree.body:
        if isinstance(node, ast.Assign):
            module.assigned.update({name.id: node.value for name in node.targets if isinstance(name, ast.Name)})
            for target in node.targets:
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs = zip(target.elts, node.value.elts, strict=True)
                    module.assigned.update({name.id: value for name, value in pairs if isinstance(name, ast.Name)})
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            module.assigned[node.target.id] = node.value
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            module.defined[node.name] = node
    return module
